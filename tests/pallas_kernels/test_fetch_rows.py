"""Missing rows arrive in their bank rows, byte for byte, and nothing else changes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.fetch_rows import fetch_rows
from pallas_kernels.fetch_rows.kernel import tile_of
from tests.pallas_kernels.test_lowering import arrays, check_offsets, lower

# Tensors of a row: (shape, dtype).
ODD = {
    "w": ((33, 90), np.uint32),
    "scale": ((7, 23), np.uint32),
    "bias": ((45,), np.float16),
    "one": ((1, 1), np.int32),
}


def rows_of(count, seed):
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 2**16, (count, *shape)).astype(np.uint16 if dtype == np.float16 else dtype).view(dtype)
        for name, (shape, dtype) in ODD.items()
    }


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_rows_arrive_and_nothing_else_changes(implementation, data):
    R, E, U = 6, 5, 4
    banks, pool = rows_of(R, 0), rows_of(E, 1)
    rows = np.array(data.draw(st.permutations(range(R)))[:U], np.int32)
    src = np.array(data.draw(st.lists(st.integers(-1, E - 1), min_size=U, max_size=U)), np.int32)
    count = data.draw(st.integers(0, U))
    got = fetch_rows(
        jnp.asarray(rows),
        jnp.asarray(src),
        jnp.array([count], jnp.int32),
        {name: jnp.asarray(bank) for name, bank in banks.items()},
        {name: jnp.asarray(slab) for name, slab in pool.items()},
        distinct=U,
        implementation=implementation,
    )
    for row, expert in zip(rows[:count], src[:count], strict=True):
        if expert >= 0:
            for name in banks:
                banks[name][row] = pool[name][expert]
    for name, bank in banks.items():
        assert np.asarray(got[name]).tobytes() == bank.tobytes(), name


@pytest.mark.parametrize(
    ("shape", "most"), [((5760, 360), 0.1), ((2880, 23), 0.4), ((5760, 2048), 0.0), ((1, 2880), 0.1), ((16, 56), 0.2)]
)
def test_tiles_read_little_twice(shape, most):
    """What a tile reads past the last column is a small share of the row."""
    height, width = tile_of(shape)
    assert height * width <= 2048
    assert -(-shape[1] // width) * width / shape[1] - 1 <= most


@pytest.mark.parametrize("rows", [400, 800])
def test_lowers_for_cuda_at_the_rows_of_gpt_oss(rows):
    tensors = {
        "gate_up": ((5760, 360), jnp.uint32),
        "gate_up_scale": ((5760, 23), jnp.uint32),
        "gate_up_bias": ((5760,), jnp.bfloat16),
        "down": ((2880, 360), jnp.uint32),
        "down_scale": ((2880, 23), jnp.uint32),
        "down_bias": ((2880,), jnp.bfloat16),
    }
    kernels = lower(
        lambda *a: fetch_rows(*a, distinct=4, implementation="pallas"),
        arrays(4),
        arrays(4),
        arrays(1),
        {name: arrays(rows, *shape, dtype=dtype) for name, (shape, dtype) in tensors.items()},
        {name: arrays(32, *shape, dtype=dtype) for name, (shape, dtype) in tensors.items()},
    )
    assert [name for name, _ in kernels] == ["fetch_rows"]
    check_offsets(kernels)


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation = 'cuda'"):
        fetch_rows(None, None, None, {}, {}, distinct=1, implementation="cuda")
    with pytest.raises(ValueError, match="cube: must have one or two axes"):
        cube = {"cube": jnp.zeros((2, 3, 4, 5))}
        fetch_rows(None, None, None, cube, cube, distinct=1, implementation="interpret")
