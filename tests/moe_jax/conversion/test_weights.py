"""One matrix in another format: its parts, its errors, and what has no form."""

import ml_dtypes
import numpy as np
import pytest

from moe_jax.conversion.weights import Errors, Target, convert, decoded
from moe_jax.errors import CheckpointError
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

PACKED = (FP8(16), INT4(16), MXFP4())
# Half a step of the format over the largest magnitude of its group, the worst that rounding to the nearest can do: the
# step of e4m3 is 32 at 448, that of INT4 a seventh, and MXFP4 saturates values up to 8 at 6.
BOUND = {"bf16": 2.0**-8, "fp8": 16 / 448, "int4": 1 / 14, "mxfp4": 0.25}


def matrices(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((size, 32)).astype(np.float32) for size in (24, 24)]


@pytest.mark.parametrize("form", (Dense(), *PACKED), ids=lambda form: form.name)
def test_errors_are_those_of_the_decoded_values(form):
    target, ws = Target(form), matrices()
    parts, errors = convert(ws, target, "gate_up")
    values, w = decoded(parts, form, (24, 24), 32), np.concatenate(ws)
    wrong = np.abs(values.astype(np.float64) - w)
    assert errors.rms == pytest.approx(np.sqrt((wrong**2).sum() / (w.astype(np.float64) ** 2).sum()), rel=1e-5)
    tops = np.repeat([np.abs(m).max() for m in ws], 24)
    assert errors.largest == pytest.approx((wrong.max(axis=1) / tops).max(), rel=1e-5)
    assert 0 < errors.rms < errors.largest * 4 and errors.largest <= BOUND[target.name] * (1 + 1e-6)


def test_each_matrix_has_scales_of_its_own():
    first, second = matrices()
    parts, _ = convert([first, 1000 * second], Target(FP8(16)), "gate_up")
    assert len(parts["_scale"]) == 4  # two blocks a matrix of 24 rows, where 48 rows would have three
    alone, _ = convert([first], Target(FP8(16)), "gate")
    np.testing.assert_array_equal(parts[""][:24], alone[""])


def test_bf16_of_bf16_changes_no_bit():
    w = matrices()[0].astype(ml_dtypes.bfloat16)
    parts, errors = convert([w], Target(Dense()), "down")
    assert parts[""].tobytes() == w.tobytes() and errors == Errors(0.0, errors.squared_weight, 0.0)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_values_that_are_not_finite_are_found_in_every_format(bad):
    w = matrices()[0]
    w[3, 5] = bad
    for form in (Dense(), *PACKED):
        with pytest.raises(CheckpointError, match="down of expert 2: 1 of 768 weights are NaN or infinite"):
            convert([w], Target(form), "down of expert 2")


def test_a_width_that_the_format_cannot_hold():
    with pytest.raises(CheckpointError, match="down: an INT4 row of 32 values: must be a multiple of 8 and of"):
        convert([matrices()[0]], Target(INT4(24)), "down")


def test_a_matrix_of_zeros_has_no_error():
    _, errors = convert([np.zeros((8, 32), np.float32)], Target(INT4(16)), "down")
    assert errors.rms == errors.largest == 0
