"""Experts of every activation and row format: all implementations against a float64 definition."""

import functools
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_values import random_parts, values
from jax.sharding import SingleDeviceSharding

from pallas_kernels.expert_ffn import (
    ExpertSpec,
    decode,
    expert_ffn_decode,
    expert_ffn_round,
    group_pairs,
)
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense

E, ROWS, D, F = 5, 8, 64, 32
SILU = ExpertSpec(biases=True)
OSS = ExpertSpec(activation="clamped_swiglu", alpha=1.702, limit=7.0, biases=True)
V4 = ExpertSpec(activation="clamped_silu", limit=7.0)
RELU = ExpertSpec(activation="relu", biases=True)
PACKED = replace(OSS, gate_up=MXFP4(), down=MXFP4())


class Case(NamedTuple):
    implementation: str
    spec: ExpertSpec
    dtype: str = "float32"

    def __str__(self):
        spec = self.spec
        biased = "biased" if spec.biases else "plain"
        return f"{self.implementation}-{spec.activation}-{biased}-{spec.gate_up.name}-{spec.down.name}-{self.dtype}"


CASES = (
    *(Case("interpret", spec) for spec in (SILU, OSS, V4, RELU, replace(RELU, biases=False))),
    Case("interpret", OSS, "bfloat16"),
    Case("interpret", RELU, "bfloat16"),
    *(Case("xla", spec) for spec in (SILU, OSS, V4, RELU)),
    *(
        Case("xla", replace(spec, gate_up=form, down=form))
        for form in (MXFP4(), FP8(24), INT4(16, zeros=True))
        for spec in (replace(SILU, biases=False), OSS, V4, RELU)
    ),
    Case("xla", replace(V4, gate_up=INT4(D, order=True), down=INT4(F, zeros=True, order=True))),
    Case("xla", replace(SILU, gate_up=FP8(24), down=Dense())),
    Case("xla", PACKED, "bfloat16"),
)


def sides(spec, D=D, F=F):
    """(name, output size of its matrices, width) of an expert's weights."""
    return ("gate_up", (F, F) if spec.gated else (F,), D), ("down", (D,), F)


def random_rows(rng, spec, dtype, **size):
    """Rows {name: [E, ...]}, large enough that the clamp takes part."""
    experts = []
    for _ in range(E):
        row = {}
        for name, outs, width in sides(spec, **size):
            parts = random_parts(rng, getattr(spec, name), outs, width, 6 / np.sqrt(width), dtype)
            row |= {name + suffix: part for suffix, part in parts.items()}
            if spec.biases:
                row[f"{name}_bias"] = rng.normal(size=sum(outs)).astype(dtype)
        experts.append(row)
    return {name: np.stack([row[name] for row in experts]) for name in experts[0]}


def definition(x, rows, spec, expert, **size):
    """y [B, D] in float64, the hidden vector rounded to x's dtype."""

    def product(x, name, outs, width):
        form = getattr(spec, name)
        parts = {suffix: rows[name + suffix][expert] for suffix in form.suffixes}
        z = x.astype(np.float64) @ values(form, parts, outs, width).T
        return z + rows[f"{name}_bias"][expert].astype(np.float64) if spec.biases else z

    first, last = sides(spec, **size)
    z = product(x, *first)
    if spec.activation == "relu":
        h = np.maximum(z, 0)
    else:
        gate, up = np.split(z, 2, axis=1)
        if spec.activation != "silu":
            assert (gate > spec.limit).any() and (np.abs(up) > spec.limit).any(), "the clamp takes no part"
            gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
        h = gate / (1 + np.exp(-(spec.alpha or 1) * gate)) * (up + 1 if spec.activation == "clamped_swiglu" else up)
    return product(h.astype(x.dtype), *last)


def close(actual, wanted, dtype):
    limit = (1e-5 if dtype == "float32" else 2e-2) * np.abs(wanted).max()
    assert np.abs(np.asarray(actual, np.float64) - wanted).max() <= limit


def in_host_memory(rows):
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {name: jax.device_put(w, sharding) for name, w in rows.items()}


# Read by the kernels as they are stored: rows that fill no tile, tiles that fill no block, mixed formats.
PACKED_KERNELS = (
    Case("interpret", PACKED),
    Case("interpret", PACKED, "bfloat16"),
    Case("interpret", replace(RELU, gate_up=FP8(16), down=FP8(128)), "bfloat16"),
    Case("interpret", replace(V4, gate_up=FP8(128), down=FP8(16))),
    Case("interpret", replace(V4, gate_up=INT4(32), down=INT4(16, zeros=True))),
    Case("interpret", replace(SILU, gate_up=INT4(16, zeros=True), down=Dense()), "bfloat16"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "B"),
    # The kernels have an arithmetic of their own for one token.
    [(case, B) for case in CASES + PACKED_KERNELS for B in ((1, 3) if case.implementation == "interpret" else (3,))],
    ids=str,
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "units", "B"),
    [(MXFP4(), 1, 1), (MXFP4(), 1, 2), (FP8(16), 4, 1), (INT4(32), 2, 1), (INT4(16, zeros=True), 4, 2)],
    ids=str,
)
def test_rows_of_several_tiles(form, units, B):
    """More than one tile a row and the last one partly filled; what lies beyond it is junk. Fetched, then resident."""
    size = {"D": 160, "F": 16}
    spec = replace(V4, gate_up=form)
    rng = np.random.default_rng(1)
    rows = random_rows(rng, spec, "float32", **size)
    x = rng.normal(size=(B, size["D"])).astype("float32")
    banks = {name: jnp.full((ROWS, *w.shape[1:]), -1).astype(w.dtype) for name, w in rows.items()}
    at, keep, one = (jnp.array([v], jnp.int32) for v in (5, 1, 1))
    run = functools.partial(
        decode.expert_ffn_decode, distinct=1, spec=spec, tiles={"gate_up": {"units": units}}, interpret=True
    )
    args = jnp.asarray(x), at
    y, banks = run(*args, jnp.array([3], jnp.int32), keep, one, banks, in_host_memory(rows))
    close(y[0], definition(x, rows, spec, 3, **size), "float32")
    for name in rows:
        assert np.asarray(banks[name][5]).tobytes() == rows[name][3].tobytes(), f"{name}: deposited row"
        assert np.asarray(banks[name][4]).tobytes() == np.asarray(banks[name][6]).tobytes(), f"{name}: its neighbours"
    again, _ = run(*args, jnp.array([-1], jnp.int32), keep, one, banks, None)
    assert np.asarray(again).tobytes() == np.asarray(y).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "B"),
    [(form, B) for form in (Dense(), MXFP4(), FP8(16), INT4(16, zeros=True)) for B in (1, 2)] + [(INT4(32), 1)],
    ids=str,
)
def test_how_many_tiles_are_read_at_a_time_changes_no_sum(form, B):
    """One row resident and the same one fetched, with steps that fill it and steps that do not. The last bit is the CPU
    compiler's, which joins products and sums as it likes; on a GPU `fma` says where."""
    size = {"D": 160, "F": 16}
    spec = replace(V4, gate_up=form)
    rng = np.random.default_rng(4)
    rows = random_rows(rng, spec, "float32", **size)
    x = jnp.asarray(rng.normal(size=(B, size["D"])).astype("float32"))
    tile = {"block_in": 16} if isinstance(form, Dense) else {"units": 1}
    start = {name: jnp.full((ROWS, *w.shape[1:]), -1).astype(w.dtype).at[6].set(w[3]) for name, w in rows.items()}
    at, missing, keep = (jnp.array(pair, jnp.int32) for pair in ((6, 5), (-1, 3), (0, 1)))

    def run(**unroll):
        y, banks = decode.expert_ffn_decode(
            *(x, at, missing, keep, jnp.array([2], jnp.int32), start, in_host_memory(rows)),
            **dict(distinct=2, spec=spec, tiles={"gate_up": tile | unroll}, interpret=True),
        )
        for name, bank in banks.items():
            wanted = start[name].at[5].set(rows[name][3])
            assert np.asarray(bank).tobytes() == np.asarray(wanted).tobytes(), f"{name}: deposited row and the others"
        return np.asarray(y)

    sums = run(unroll=1)
    for y in sums:
        close(y, definition(np.asarray(x), rows, spec, 3, **size), "float32")
    if isinstance(form, Dense):
        steps = ({"unroll": 2, "unroll_missing": 5}, {"unroll": 5, "unroll_missing": 2})
    else:
        # One token's scales of a row in pinned memory are read at once by default: with `unroll` = 1, too.
        steps = (
            {"unroll": 2, "unroll_missing": 3, "row_sides_missing": False},
            {"unroll": 3, "unroll_missing": 2, "row_sides": True, "row_sides_missing": True},
        )
    for unroll in steps:
        assert np.abs(run(**unroll) - sums).max() < 1e-6 * np.abs(sums).max()


@pytest.mark.parametrize("form", [Dense(), MXFP4(), FP8(16), INT4(16, zeros=True)], ids=str)
def test_tiles_are_read_at_a_time_where_they_say(form):
    """`unroll_missing` is for rows of the pool, `unroll` alone for both: seen by the kernels' reads and writes."""
    size = {"D": 160, "F": 16}
    spec = replace(V4, gate_up=form)
    rows = random_rows(np.random.default_rng(4), spec, "float32", **size)
    tile = {"block_in": 16} if isinstance(form, Dense) else {"units": 1}
    x, one = jnp.zeros((1, size["D"])), jnp.ones(1, jnp.int32)

    def places(pool, **unroll):
        step = functools.partial(
            decode.expert_ffn_decode, distinct=1, spec=spec, tiles={"gate_up": tile | unroll}, interpret=True
        )
        return str(jax.make_jaxpr(step)(x, one, one, one, one, rows, pool)).count(" <- ")

    resident = places(None, unroll=1)
    assert places(None, unroll=1, unroll_missing=2) == resident > 0
    assert places(None, unroll=2) > resident
    both = places(rows, unroll=1)
    assert both < places(rows, unroll=1, unroll_missing=2) < places(rows, unroll=2)
    if not isinstance(form, Dense):
        # Ten tiles, four at a time: one read of each side in place of four.
        many = dict(unroll=4, row_sides_missing=False)
        assert places(None, **many) == places(None, **many | {"row_sides_missing": True})
        assert places(None, **many | {"row_sides": True}) < places(None, **many)
        assert places(rows, **many | {"row_sides_missing": True}) < places(rows, **many)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES + PACKED_KERNELS, ids=str)
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


@pytest.mark.parametrize("spec", [RELU, V4], ids=lambda s: s.activation)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_nan_and_infinity_reach_the_output(implementation, spec):
    """A token's NaN or infinity spoils that token alone; no clamp, maximum or mask hides it."""
    rng = np.random.default_rng(2)
    rows = random_rows(rng, spec, "float32")
    x = rng.normal(size=(3, D)).astype("float32")
    x[0, 5], x[2, 7] = np.nan, np.inf
    y, _ = expert_ffn_decode(
        jnp.asarray(x),
        *(jnp.array([v], jnp.int32) for v in (1, -1, 0, 1)),
        {name: jnp.asarray(w) for name, w in rows.items()},
        None,
        distinct=1,
        spec=spec,
        implementation=implementation,
    )
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = definition(x, rows, spec, 1)
    assert np.isnan(y[0, 0]).all() and np.isfinite(y[0, 1]).all()
    np.testing.assert_array_equal(np.isfinite(y[0, 2]), np.isfinite(wanted[2]))
    close(y[0, 1], wanted[1], "float32")


@pytest.mark.parametrize("spec", [SILU, OSS, V4, RELU], ids=lambda s: s.activation)
def test_activations_have_no_minimum_or_maximum(spec):
    """Pallas-Triton lowers those to instructions that drop NaN on a GPU, which the interpreter does not show."""
    z = [jnp.array([np.nan, 1], jnp.float32)] * (1 + spec.gated)
    operations = set(re.findall(r"= (\w+)", str(jax.make_jaxpr(spec.activate)(*z))))  # those of inner functions too
    assert operations and not operations & {"min", "max", "clamp"}
    assert "max" in re.findall(r"= (\w+)", str(jax.make_jaxpr(functools.partial(jnp.clip, min=0))(z[0])))
    assert np.isnan(spec.activate(*z)[0])


def test_parts_of_a_row():
    assert ExpertSpec().parts("gate_up") == ("gate_up",)
    assert OSS.parts("down") == ("down", "down_bias")
    assert PACKED.parts("gate_up") == ("gate_up", "gate_up_scale", "gate_up_bias")
    assert replace(V4, down=INT4(32, True, True)).parts("down") == ("down", "down_scale", "down_zero", "down_order")
    assert len({OSS, PACKED, V4, RELU, ExpertSpec(), ExpertSpec(activation="silu")}) == 5


def test_tensors_of_a_row():
    word = np.dtype(np.uint32)
    assert ExpertSpec().row_tensors(768, 2048) == {"gate_up": ((1536, 2048), None), "down": ((2048, 768), None)}
    assert RELU.row_tensors(8192, 2048) == {
        "gate_up": ((8192, 2048), None),
        "gate_up_bias": ((8192,), None),
        "down": ((2048, 8192), None),
        "down_bias": ((2048,), None),
    }
    mixed = replace(V4, gate_up=FP8(), down=MXFP4())
    assert mixed.row_tensors(192, 256) == {
        "gate_up": ((384, 64), word),
        "gate_up_scale": ((4, 2), np.dtype(np.float32)),  # 192 rows of gate end within a block, as those of up do
        "down": ((256, 24), word),
        "down_scale": ((256, 2), word),
    }
    for spec in (OSS, PACKED, mixed):
        assert tuple(spec.row_tensors(64, 64)) == (*spec.parts("gate_up"), *spec.parts("down"))
    with pytest.raises(ValueError, match="down of experts with F = 100, D = 256: an MXFP4 row of 100 values"):
        mixed.row_tensors(100, 256)


def test_kernels_refuse_what_they_do_not_serve():
    assert all(spec.without_kernel() is None for spec in (SILU, RELU, PACKED, replace(V4, down=FP8())))
    reason = "no kernel undoes the column order of int4 rows"
    ordered = replace(V4, down=INT4(32, order=True))
    assert ordered.without_kernel() == reason
    for implementation in ("pallas", "interpret"):
        with pytest.raises(ValueError, match=f"{reason}; use implementation='xla'"):
            expert_ffn_round(None, None, None, None, None, block_rows=16, spec=ordered, implementation=implementation)
        with pytest.raises(ValueError, match=f"{reason}; use implementation='xla'"):
            expert_ffn_decode(*[None] * 7, distinct=1, spec=ordered, implementation=implementation)
    for form, message in (
        (FP8(24), "fp8 rows with a scale for 16, 32, .. or 128 columns, not 24"),
        (FP8(256), "fp8 rows with a scale for 16, 32, .. or 128 columns, not 256"),
        (INT4(8), "int4 rows with a scale for 16, 32, .. or 256 columns, not 8"),
        (INT4(2048), "int4 rows with a scale for 16, 32, .. or 256 columns, not 2048"),
    ):
        assert replace(V4, gate_up=form).without_kernel() == f"kernels read {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu"}, "activation = 'gelu': must be one of silu, clamped_swiglu, clamped_silu, relu"),
        ({"down": "int3"}, "down = 'int3': must be a Format"),
        ({"gate_up": "mxfp4"}, "gate_up = 'mxfp4': must be a Format of pallas_kernels.formats"),
        ({"alpha": 1.0}, "alpha = 1.0: activation 'silu' has none"),
        ({"activation": "clamped_silu", "limit": 1, "alpha": 2}, "alpha = 2: activation 'clamped_silu' has none"),
        ({"activation": "clamped_silu"}, "limit = None: activation 'clamped_silu' needs a positive number"),
        ({"activation": "relu", "limit": 7.0}, "limit = 7.0: activation 'relu' has none"),
        ({"activation": "clamped_swiglu", "alpha": 1.0}, "limit = None: .* needs a positive number"),
        ({"activation": "clamped_swiglu", "alpha": 0, "limit": 1}, "alpha = 0: .* needs a positive number"),
    ],
)
def test_bad_specs(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpertSpec(**fields)
