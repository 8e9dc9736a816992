"""Staged prefixes: which bytes they are, that they arrive, and that the decode kernels read them and nothing else."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import ExpertSpec, Prefix, Staging, expert_ffn_decode
from pallas_kernels.expert_ffn.staging import choose_prefix, prefix_bytes, regions
from pallas_kernels.fetch_rows import fetch_rows
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense
from tests.pallas_kernels.test_expert_spec import OSS, RELU, V4, D, F, in_host_memory, random_rows
from tests.pallas_kernels.test_lowering import MODELS, Shape, arrays, check_offsets, lower, row_arrays

E, ROWS, P = 5, 8, 2
PLAIN = ExpertSpec()
SPECS = {
    "plain": PLAIN,
    "biased": OSS,
    "one matrix": RELU,
    "mxfp4": replace(OSS, gate_up=MXFP4(), down=MXFP4()),
    "fp8": replace(V4, gate_up=FP8(16), down=FP8(16)),
    "int4": replace(V4, gate_up=INT4(32), down=INT4(16, zeros=True)),
    "mixed": replace(RELU, gate_up=FP8(16), down=Dense()),
}
# Output rows (gate_up, down): below a block of the kernels, one, several, with gate and up, all.
PREFIXES = (Prefix(0, 4), Prefix(0, 16), Prefix(0, 48), Prefix(16, D), Prefix(F, D))


def shapes_of(rows):
    return {name: w.shape[1:] for name, w in rows.items()}


def ruined(w, spans):
    """The rows with other bytes within `spans` of their first axis."""
    w = w.copy()
    for start, stop in spans:
        part = w[:, start:stop].view(np.uint8)
        part ^= np.uint8(0x55)
    return w


class Event:
    """Two misses that are kept, one that is bypassed, a hit; experts 3 and 4 of the misses lie in staging rows 1, 0."""

    def __init__(self, spec, dtype, B):
        rng = np.random.default_rng(B)
        self.spec, self.rows = spec, random_rows(rng, spec, jnp.dtype(dtype))
        self.x = rng.normal(size=(B, D)).astype(jnp.dtype(dtype))

    def staging(self, prefix, rows, ids=(4, 3)):
        held = {name: np.zeros((P, *w.shape[1:]), w.dtype) for name, w in rows.items()}
        covered = regions(prefix, self.spec, shapes_of(rows))
        for name, spans in covered.items():
            for p, expert in enumerate(ids):
                for start, stop in spans:
                    held[name][p, start:stop] = rows[name][expert, start:stop]
        used = {name: jnp.asarray(held[name]) for name in covered}
        return Staging(jnp.asarray(ids, jnp.int32), used, prefix)

    def run(self, implementation, pool, staging=None):
        banks = {name: np.zeros((ROWS, *w.shape[1:]), w.dtype) for name, w in self.rows.items()}
        for name in banks:
            banks[name][6] = self.rows[name][0]
        y, after, *rest = expert_ffn_decode(
            jnp.asarray(self.x),
            jnp.array([6, 2, 4, 1, 0], jnp.int32),
            jnp.array([-1, 3, 4, 1, -1], jnp.int32),
            jnp.array([0, 1, 0, 1, 0], jnp.int32),
            jnp.array([4], jnp.int32),
            {name: jnp.asarray(bank) for name, bank in banks.items()},
            in_host_memory(pool),
            distinct=5,
            spec=self.spec,
            implementation=implementation,
            staging=staging,
        )
        for found in rest:
            assert all(found.rows[name].shape == staging.rows[name].shape for name in staging.rows)
        # A bypassed expert passes through row 4 in plain XLA.
        return np.asarray(y)[:4], {name: np.delete(np.asarray(bank), 4, axis=0) for name, bank in after.items()}


def same(a, b):
    return a[0].tobytes() == b[0].tobytes() and all(a[1][name].tobytes() == b[1][name].tobytes() for name in a[1])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize(("name", "B"), [*((name, 1) for name in SPECS), ("plain", 3), ("mxfp4", 3), ("fp8", 3)])
def test_staged_parts_come_from_staging_and_change_no_bit(name, B, implementation):
    event = Event(SPECS[name], "float32" if name == "biased" else "bfloat16", B)
    wanted = event.run(implementation, event.rows)
    for prefix in PREFIXES if (name, B) == ("plain", 1) else (PREFIXES[3],):
        covered = regions(prefix, event.spec, shapes_of(event.rows))
        staging = event.staging(prefix, event.rows)
        assert same(event.run(implementation, event.rows, staging), wanted), prefix
        # Staging that holds nobody, or others, is not read.
        for ids in ((-1, -1), (2, 0)):
            other = replace(event.staging(prefix, event.rows), ids=jnp.array(ids, jnp.int32))
            assert same(event.run(implementation, event.rows, other), wanted), (prefix, ids)
        if prefix.down < 16:  # no whole block: the kernels need none of it
            continue
        # The pool has other bytes there, and is not read; then so has staging, and its bytes are used.
        pool = {name: w.copy() for name, w in event.rows.items()}
        for part, spans in covered.items():
            pool[part][3:] = ruined(pool[part][3:], spans)
        assert same(event.run(implementation, pool, staging), wanted), prefix
        wrong = event.staging(prefix, pool)
        assert not same(event.run(implementation, event.rows, wrong), wanted), prefix


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", SPECS)
def test_a_prefix_is_copied_and_nothing_else(name, prefix, implementation):
    event = Event(SPECS[name], "bfloat16", 1)
    covered = regions(prefix, event.spec, shapes_of(event.rows))
    before = {part: np.full((P, *event.rows[part].shape[1:]), 7, event.rows[part].dtype) for part in covered}
    got = fetch_rows(
        jnp.arange(P, dtype=jnp.int32),
        jnp.array([3, -1], jnp.int32),
        jnp.array([P], jnp.int32),
        {part: jnp.asarray(w) for part, w in before.items()},
        in_host_memory(event.rows),
        distinct=P,
        implementation=implementation,
        regions=covered,
    )
    copied = 0
    for part, spans in covered.items():
        for start, stop in spans:
            before[part][0, start:stop] = event.rows[part][3, start:stop]
            copied += before[part][0, start:stop].nbytes
        assert np.asarray(got[part]).tobytes() == before[part].tobytes(), part
    tensors = {part: (w.shape[1:], w.dtype) for part, w in event.rows.items()}
    assert copied == prefix_bytes(prefix, event.spec, tensors)


def test_a_prefix_fills_its_budget_with_whole_blocks_of_down_first():
    tensors = {"gate_up": ((2 * 768, 2048), jnp.bfloat16), "down": ((2048, 768), jnp.bfloat16)}  # 6.3 and 3.1 MB
    blocks = {"gate_up": 8, "down": 16}
    assert choose_prefix(PLAIN, tensors, 16 * 768 * 2 - 1, blocks) == Prefix(0, 0)
    assert choose_prefix(PLAIN, tensors, 16 * 768 * 2, blocks) == Prefix(0, 16)
    assert choose_prefix(PLAIN, tensors, 2 << 20, blocks) == Prefix(0, 1360)
    down = 2048 * 768 * 2
    assert choose_prefix(PLAIN, tensors, down + 2 * 8 * 2048 * 2 - 1, blocks) == Prefix(0, 2048)
    assert choose_prefix(PLAIN, tensors, down + 2 * 8 * 2048 * 2, blocks) == Prefix(8, 2048)
    whole = choose_prefix(PLAIN, tensors, 3 * down, blocks)
    assert whole == Prefix(768, 2048) and prefix_bytes(whole, PLAIN, tensors) == 3 * down
    assert regions(whole, PLAIN, {name: shape for name, (shape, _) in tensors.items()}) == {
        "gate_up": ((0, 1536),),
        "down": ((0, 2048),),
    }


def test_scales_of_blocks_cover_the_prefix():
    """FP8's scales serve blocks of rows, which the last rows of a prefix may share with others."""
    spec = replace(V4, gate_up=FP8(24), down=FP8(24))
    shapes = {"gate_up": (2 * 40, 16), "gate_up_scale": (2 * 2, 3), "down": (64, 10), "down_scale": (3, 2)}
    for rows in range(1, 41):
        got = regions(Prefix(rows, rows), spec, shapes)
        for matrix, (start, stop) in enumerate(got["gate_up_scale"] if len(got["gate_up_scale"]) == 2 else ()):
            assert start == 2 * matrix and stop - start >= -(-rows // 24)
        assert got["down_scale"][0][1] >= -(-rows // 24)


def test_a_region_must_lie_within_its_tensor():
    row = {"w": jnp.zeros((1, 4, 8))}
    with pytest.raises(ValueError, match=r"regions\['w'\] = .*: must lie within the 4 rows"):
        fetch_rows(None, None, None, row, row, distinct=1, implementation="xla", regions={"w": ((0, 5),)})


LOWERED = {
    "qwen3-30b-a3b": (MODELS["qwen3-30b-a3b"], PLAIN),
    "gpt-oss-20b": (Shape(D=2880, F=2880, E=32, K=4, L=24), SPECS["mxfp4"]),
    "deepseek-v3": (Shape(D=7168, F=2048, E=256, K=8, L=58), ExpertSpec(gate_up=FP8(128), down=FP8(128))),
}


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("part", ["down", "row"])
@pytest.mark.parametrize("model", LOWERED)
def test_lowers_for_cuda_at_real_shapes(model, part, B):
    shape, spec = LOWERED[model]
    tensors = spec.row_tensors(shape.F, shape.D)
    prefix = Prefix(0, shape.D // 2 // 16 * 16) if part == "down" else Prefix(shape.F, shape.D)
    covered = regions(prefix, spec, {name: size for name, (size, _) in tensors.items()})
    rows, distinct = 400, min(shape.E, B * shape.K)
    pool = row_arrays(shape, shape.E, jnp.bfloat16, spec)
    held = {name: row for name, row in row_arrays(shape, P, jnp.bfloat16, spec).items() if name in covered}

    def step(x, entry, count, banks, pool, staging):
        options = {"distinct": distinct, "spec": spec, "implementation": "pallas", "staging": staging}
        y, banks, staging = expert_ffn_decode(x, entry, entry, entry, count, banks, pool, **options)
        each = jnp.arange(P, dtype=jnp.int32)
        options = {"distinct": P, "implementation": "pallas", "regions": covered}
        return y, banks, fetch_rows(each, staging.ids, each[-1:] + 1, staging.rows, pool, **options)

    arguments = (
        arrays(B, shape.D, dtype=jnp.bfloat16),
        arrays(distinct),
        arrays(1),
        row_arrays(shape, rows, jnp.bfloat16, spec),
        pool,
        Staging(arrays(P), held, prefix),
    )
    kernels = dict(lower(step, *arguments))
    assert sorted(kernels) == ["expert_ffn_down", "expert_ffn_gate_up", "stage_rows"]
    check_offsets(kernels.items())
    for tensor in ("gate_up", "down"):
        operands = kernels[f"expert_ffn_{tensor}"]
        staged = [operand for operand in operands if operand.shape == (P, *tensors[tensor][0])]
        assert len(staged) == (2 if tensor in covered else 0)
        # Read as an operand; as a result it only stands for the order.
        assert not staged or (staged[0].offset_bits and not staged[1].offset_bits)
