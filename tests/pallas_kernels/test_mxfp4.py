"""MXFP4: every code under every scale, rows whose scales do not fill a word, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.expert_ffn import mxfp4

# e2m1, from the table of the format's definition.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


def every_byte_under_every_scale():
    """Words [256 scales, 64] and scales [256, 4]: row e holds all 256 bytes, 16 to a block, under exponent byte e."""
    packed = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 16))
    return np.ascontiguousarray(packed).view(np.uint32), np.ascontiguousarray(scales).view(np.uint32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_byte_under_every_scale_is_exact(dtype):
    words, scales = every_byte_under_every_scale()
    got = np.asarray(jax.jit(mxfp4.decode, static_argnums=2)(words, scales, jnp.dtype(dtype)))
    assert got.shape == (256, 512) and got.dtype == jnp.dtype(dtype)
    byte = np.arange(256)
    codes = np.stack([byte & 15, byte >> 4], axis=-1).reshape(-1)  # the lower four bits come first
    wanted = VALUES[codes] * 2.0 ** (np.arange(256)[:, None] - 127.0)  # float64 holds all of them
    largest, smallest = float(np.finfo(np.float32).max), 2.0**-126
    normal = (np.abs(wanted) >= smallest) & (np.abs(wanted) <= largest) | (wanted == 0)
    normal[255] = False  # byte 255 stands for NaN
    assert normal[:253].all(axis=1).sum() >= 250
    with np.errstate(over="ignore"):  # of values that are not compared
        exact = wanted.astype(np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    bits = np.dtype("u2" if dtype == "bfloat16" else "u4")
    np.testing.assert_array_equal(got.view(bits)[normal], exact.view(bits)[normal])
    assert not np.isfinite(got[255].astype(np.float32)).any()


def test_scales_that_do_not_fill_a_word():
    """96 values: three exponent bytes in a word, the fourth is never read."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 5, 12), dtype=np.uint32)
    exponents = rng.integers(120, 130, (2, 5, 4)).astype(np.uint8)
    got = np.asarray(mxfp4.decode(words, exponents.view(np.uint32), jnp.float32))
    exponents[..., 3] = 255
    again = np.asarray(mxfp4.decode(words, exponents.view(np.uint32), jnp.float32))
    codes = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    scale = np.repeat(2.0 ** (exponents[..., :3].astype(np.float64) - 127), 32, axis=-1)
    np.testing.assert_array_equal(got, VALUES[codes.reshape(2, 5, 96)] * scale)
    np.testing.assert_array_equal(again, got)


def test_row_shapes():
    assert mxfp4.row_shapes(5760, 2880) == ((5760, 360), (5760, 23))
    assert mxfp4.row_shapes(3, 128) == ((3, 16), (3, 1))
    with pytest.raises(ValueError, match="100 values: must be a multiple of 32"):
        mxfp4.row_shapes(3, 100)
