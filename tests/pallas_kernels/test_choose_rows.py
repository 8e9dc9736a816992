"""The experts to bring ahead: by likelihood, without those that have a slot, in every implementation."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.choose_rows import choose_rows
from tests.pallas_kernels.test_lowering import arrays, check_offsets, lower

L = 3


def definition(likely, slot_of, on, layer, count, width):
    order = sorted(range(len(likely)), key=lambda e: (-likely[e], e))[:width]
    wanted = [e for e in order if likely[e] > -np.inf and slot_of[layer, e] < 0 and on[layer]]
    return (wanted + [-1] * count)[:count]


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@settings(max_examples=10)
@given(
    scores=st.lists(st.sampled_from([-np.inf, -3.5, 0.0, 0.25, 7.0]), min_size=5, max_size=5),
    slots=st.lists(st.booleans(), min_size=5, max_size=5),
    layer=st.integers(0, L - 1),
    on=st.integers(0, 7),
    count=st.integers(1, 4),
    width=st.integers(1, 5),
)
def test_the_likeliest_without_a_slot(implementation, scores, slots, layer, on, count, width):
    slot_of = np.full((L, 5), -1, np.int32)
    slot_of[layer] = np.where(slots, np.arange(5), -1)
    slot_of[layer - 1] = 9
    switches = np.array([on >> bit & 1 for bit in range(L)], np.int32)
    likely = np.array(scores, np.float32)
    ids, after = choose_rows(
        jnp.asarray(likely), jnp.asarray(slot_of), jnp.asarray(switches), layer=layer, count=count, width=width,
        implementation=implementation,
    )  # fmt: skip
    assert ids.tolist() == definition(likely, slot_of, switches, layer, count, width) and ids.dtype == jnp.int32
    assert (np.asarray(after) == slot_of).all()


@pytest.mark.parametrize(("layers", "experts"), [(48, 128), (24, 32), (58, 256), (61, 384), (32, 8)])
def test_lowers_for_cuda_at_real_shapes(layers, experts):
    kernels = lower(
        lambda *a: choose_rows(*a, layer=layers - 1, count=4, width=8, implementation="pallas"),
        arrays(experts, dtype=jnp.float32),
        arrays(layers, experts),
        arrays(layers),
    )
    assert [name for name, _ in kernels] == ["choose_rows"]
    check_offsets(kernels)
    # Taken and handed on, not written.
    assert not kernels[0][1][-1].offset_bits and kernels[0][1][1].offset_bits


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation = 'cuda'"):
        choose_rows(None, None, None, layer=0, count=1, width=1, implementation="cuda")
