"""Experts with biases and a clamped SwiGLU, and packed rows: all implementations against a float64 definition."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels.expert_ffn import ExpertSpec, expert_ffn_decode, expert_ffn_round, group_pairs
from pallas_kernels.formats import MXFP4, Dense

OSS = ExpertSpec(activation="clamped_swiglu", alpha=1.702, limit=7.0, biases=True)
PACKED = ExpertSpec(activation="clamped_swiglu", alpha=1.702, limit=7.0, biases=True, gate_up=MXFP4(), down=MXFP4())
BIASED_SILU = ExpertSpec(biases=True)
E, ROWS, D, F = 5, 8, 64, 32
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Case(NamedTuple):
    implementation: str
    spec: ExpertSpec
    dtype: str = "float32"


CASES = (
    Case("interpret", OSS),
    Case("interpret", OSS, "bfloat16"),
    Case("interpret", BIASED_SILU),
    Case("xla", OSS),
    Case("xla", BIASED_SILU),
    Case("xla", PACKED),
    Case("xla", PACKED, "bfloat16"),
)


def random_rows(rng, spec, dtype):
    """Rows {name: [E, ...]}, large enough that the clamp takes part."""
    rows = {}
    for name, (out, width) in {"gate_up": (2 * F, D), "down": (D, F)}.items():
        if getattr(spec, name) == MXFP4():
            rows[name] = rng.integers(0, 2**32, (E, out, width // 8), dtype=np.uint32)
            exponents = np.full((E, out, 4), 200, np.uint8)  # what is past the end must not be read
            exponents[..., : width // 32] = rng.integers(124, 127, (E, out, width // 32))
            rows[f"{name}_scale"] = exponents.view(np.uint32)
        else:
            rows[name] = (4 * rng.normal(size=(E, out, width)) / np.sqrt(width)).astype(dtype)
        rows[f"{name}_bias"] = rng.normal(size=(E, out)).astype(dtype)
    return rows


def weights(rows, name, spec, expert):
    if getattr(spec, name) == Dense():
        return rows[name][expert].astype(np.float64)
    words = rows[name][expert]
    codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(words.shape[0], -1)
    exponents = rows[f"{name}_scale"][expert].view(np.uint8)[:, : codes.shape[1] // 32]
    return FP4[codes] * np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)


def definition(x, rows, spec, expert):
    """y [B, D] in float64, the hidden vector rounded to x's dtype."""
    bias = {name: rows[f"{name}_bias"][expert].astype(np.float64) for name in ("gate_up", "down")}
    z = x.astype(np.float64) @ weights(rows, "gate_up", spec, expert).T + bias["gate_up"]
    gate, up = np.split(z, 2, axis=1)
    if spec.activation == "silu":
        h = gate / (1 + np.exp(-gate)) * up
    else:
        assert (gate > spec.limit).any() and (np.abs(up) > spec.limit).any(), "the clamp takes no part"
        gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
        h = (up + 1) * gate / (1 + np.exp(-spec.alpha * gate))
    return h.astype(x.dtype).astype(np.float64) @ weights(rows, "down", spec, expert).T + bias["down"]


def close(actual, wanted, dtype):
    limit = (1e-5 if dtype == "float32" else 2e-2) * np.abs(wanted).max()
    assert np.abs(np.asarray(actual, np.float64) - wanted).max() <= limit


def in_host_memory(rows):
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {name: jax.device_put(w, sharding) for name, w in rows.items()}


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.implementation}-{c.spec.activation}-{c.spec.down.name}-{c.dtype}"
)
def test_decode(case, B):
    """A hit, a miss that is deposited and, through the kernels, a bypassed one that leaves no trace."""
    rng = np.random.default_rng(B)
    dtype = jnp.dtype(case.dtype)
    rows = random_rows(rng, case.spec, dtype)
    x = rng.normal(size=(B, D)).astype(dtype)
    banks = {name: np.zeros((ROWS, *w.shape[1:]), w.dtype) for name, w in rows.items()}
    for name in banks:
        banks[name][6] = rows[name][0]
    y, after = expert_ffn_decode(
        jnp.asarray(x),
        jnp.array([6, 2, 4, 0], jnp.int32),
        jnp.array([-1, 3, 4, -1], jnp.int32),
        jnp.array([0, 1, 0, 0], jnp.int32),
        jnp.array([3], jnp.int32),
        {name: jnp.asarray(b) for name, b in banks.items()},
        in_host_memory(rows),
        distinct=4,
        spec=case.spec,
        implementation=case.implementation,
    )
    for u, expert in enumerate((0, 3, 4)):
        close(y[u], definition(x, rows, case.spec, expert), case.dtype)
    assert set(after) == set(rows)
    for name in rows:
        assert np.asarray(after[name][2]).tobytes() == rows[name][3].tobytes(), f"{name}: deposited row"
        if case.implementation != "xla":
            assert not np.asarray(after[name][4]).any(), f"{name}: a bypassed row was written"


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.implementation}-{c.spec.activation}-{c.spec.down.name}-{c.dtype}"
)
def test_round(case):
    rng = np.random.default_rng(7)
    dtype = jnp.dtype(case.dtype)
    rows = random_rows(rng, case.spec, dtype)
    T, K = 12, 2
    x = rng.normal(size=(T, D)).astype(dtype)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    layout = group_pairs(jnp.asarray(ids), jnp.ones(T, bool), jnp.arange(E, dtype=jnp.int32), E, 16)
    layout["block_row"] = jnp.minimum(layout["block_position"], E - 1)
    span = jnp.stack([jnp.int32(0), layout["block_end"][-1]])
    y = jnp.zeros((T * K, D), dtype)
    banks = {name: jnp.asarray(w) for name, w in rows.items()}
    run = functools.partial(expert_ffn_round, block_rows=16, spec=case.spec, implementation=case.implementation)
    y = run(jnp.asarray(x), y, layout, span, banks)
    wanted = {e: definition(x, rows, case.spec, e) for e in range(E)}
    close(y, np.stack([wanted[e][t] for t in range(T) for e in ids[t]]), case.dtype)


def test_parts_of_a_row():
    assert ExpertSpec().parts("gate_up") == ("gate_up",)
    assert OSS.parts("down") == ("down", "down_bias")
    assert PACKED.parts("gate_up") == ("gate_up", "gate_up_scale", "gate_up_bias")
    assert len({OSS, PACKED, ExpertSpec(), ExpertSpec(activation="silu")}) == 3


def test_kernels_refuse_what_they_do_not_serve():
    assert ExpertSpec().without_kernel() is None and OSS.without_kernel() is None
    assert PACKED.without_kernel() == "no kernel reads mxfp4 rows"
    for implementation in ("pallas", "interpret"):
        with pytest.raises(ValueError, match="no kernel reads mxfp4 rows; use implementation='xla'"):
            expert_ffn_round(None, None, None, None, None, block_rows=16, spec=PACKED, implementation=implementation)
        with pytest.raises(ValueError, match="no kernel reads mxfp4 rows; use implementation='xla'"):
            expert_ffn_decode(*[None] * 7, distinct=1, spec=PACKED, implementation=implementation)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu"}, "activation = 'gelu': must be one of silu, clamped_swiglu, clamped_silu, relu"),
        ({"down": "int3"}, "down = 'int3': must be a Format"),
        ({"alpha": 1.0}, "alpha = 1.0: activation 'silu' has none"),
        ({"activation": "clamped_swiglu", "alpha": 1.0}, "limit = None: .* needs a positive number"),
        ({"activation": "clamped_swiglu", "alpha": 0, "limit": 1}, "alpha = 0: .* needs a positive number"),
    ],
)
def test_bad_specs(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpertSpec(**fields)
