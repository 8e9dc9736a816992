"""Every kernel cross-lowers for CUDA at the shapes of real models, and reaches all of its operands.

The interpreter accepts what Triton refuses (sizes that are no power of two, for example), so its tests alone prove
little about a GPU. Lowering needs none: an abstract device stands in for it. It ends before PTX: limits of registers
and shared memory stay untested here.

Triton adds 32-bit offsets to an operand's pointer while the operand has at most 2**32 bytes, and reads them as signed:
an array of one-byte elements between 2 and 4 GiB would wrap silently. So the offsets of all operands are checked.
"""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

from host_offload.policy import PolicySet, get_policy, is_elementwise, list_policies
from pallas_kernels.combine import combine
from pallas_kernels.combine.arg_specs import ARG_SPECS as COMBINE_SPECS
from pallas_kernels.dequant_gemm import dequant_gemm
from pallas_kernels.dequant_gemm.arg_specs import ARG_SPECS, ROWS
from pallas_kernels.expert_ffn import SILU, ExpertSpec, expert_ffn_decode, expert_ffn_round
from pallas_kernels.formats import FP8, INT4, MXFP4
from pallas_kernels.router_topk import Routing, route, router_topk
from pallas_kernels.row_linear import row_linear
from pallas_kernels.row_linear.arg_specs import ARG_SPECS as ROW_SPECS
from pallas_kernels.row_norm import RowNorm
from pallas_kernels.sinkhorn import sinkhorn_kernel
from pallas_kernels.slot_plan import slot_plan
from pallas_kernels.turn_heads import HeadNorm, turn_heads
from pallas_kernels.turn_heads.arg_specs import ARG_SPECS as HEAD_SPECS

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

REPOSITORY = Path(__file__).resolve().parents[2]
TRITON_CALL = "__gpu$xla.gpu.triton"


class Shape(NamedTuple):
    D: int
    F: int
    E: int
    K: int
    L: int


MODELS = {
    "qwen3-30b-a3b": Shape(D=2048, F=768, E=128, K=8, L=48),
    "olmoe": Shape(D=2048, F=1024, E=64, K=8, L=16),
    "mixtral": Shape(D=4096, F=14336, E=8, K=2, L=32),
    "qwen3-235b-a22b": Shape(D=4096, F=1536, E=128, K=8, L=94),
}


class Operand(NamedTuple):
    shape: tuple
    offset_bits: set  # widths of the offsets that the kernel adds to this operand's pointer; empty if it is not used


def arrays(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function, *arguments):
    """[(kernel name, its operands then results as `Operand`)] of a function lowered for an H200."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    calls = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            calls.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        assert [ir.StringAttr(call.attributes["call_target_name"]).value for call in calls] == [TRITON_CALL] * len(
            calls
        )
        return [describe(call) for call in calls]


def describe(call):
    config = call.attributes["mhlo.backend_config"]
    types = [ir.RankedTensorType(value.type) for value in (*call.operands, *call.results)]
    with ir.Context() as context:
        triton.register_dialect(context)
        text = str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes))
    return ir.StringAttr(config["name"]).value, [
        Operand(tuple(t.shape), bits) for t, bits in zip(types, offset_bits(text, len(types)), strict=True)
    ]


def offset_bits(text, arguments):
    """For each pointer argument of a Triton kernel, the widths of the offsets added to it."""
    assert len(re.findall(r"tt\.func ", text)) == 1
    signature = re.search(r"tt\.func .*", text).group()
    assert len(re.findall(r"%arg\d+: !tt\.ptr", signature)) == arguments
    bits = [set() for _ in range(arguments)]
    root = {f"%arg{i}": i for i in range(arguments)}
    operations = re.compile(
        r"(?P<tile>%\w+) = tt\.splat (?P<argument>%arg\d+) : !tt\.ptr"
        r"|tt\.addptr (?P<pointer>%\w+), %\w+ : .*, (?:tensor<(?:\d+x)*)?i(?P<width>\d+)>?\n"
    )
    additions = 0
    # In order: regions side by side use the same names again.
    for found in operations.finditer(text):
        if found["tile"]:
            root[found["tile"]] = root[found["argument"]]
        else:
            additions += 1
            bits[root[found["pointer"]]].add(int(found["width"]))
    assert additions == text.count("tt.addptr")
    return bits


def check_offsets(kernels):
    """Every operand is addressed by 64-bit offsets, or has so few elements that signed 32 bits reach them all."""
    for name, operands in kernels:
        for i, operand in enumerate(operands):
            assert operand.offset_bits <= {32, 64}
            elements = int(np.prod(operand.shape, dtype=np.int64))
            assert 32 not in operand.offset_bits or elements <= 2**31, f"{name}: operand {i} {operand.shape} wraps"


def row_arrays(shape, rows, dtype, spec=SILU):
    tensors = spec.row_tensors(shape.F, shape.D)
    return {name: arrays(rows, *size, dtype=fixed or dtype) for name, (size, fixed) in tensors.items()}


def decode_kernels(
    shape, B, rows, *, row_dtype=jnp.bfloat16, compute=jnp.bfloat16, offload=True, between=None, spec=SILU
):
    distinct = min(shape.E, B * shape.K)
    entry = arrays(distinct)
    return lower(
        functools.partial(expert_ffn_decode, distinct=distinct, between=between, spec=spec, implementation="pallas"),
        arrays(B, shape.D, dtype=compute),
        entry,
        entry,
        entry,
        arrays(1),
        row_arrays(shape, rows, row_dtype, spec),
        row_arrays(shape, shape.E, row_dtype, spec) if offload else None,
    )


def round_kernels(shape, T, block_rows, rows, *, row_dtype=jnp.bfloat16, compute=jnp.bfloat16, spec=SILU):
    pairs = T * shape.K
    blocks = -(-pairs // block_rows) + min(shape.E, pairs)
    layout = {
        "token": arrays(blocks * block_rows),
        "pair": arrays(blocks * block_rows),
        "block_row": arrays(blocks),
    }
    return lower(
        functools.partial(expert_ffn_round, block_rows=block_rows, spec=spec, implementation="pallas"),
        arrays(T, shape.D, dtype=compute),
        arrays(pairs, shape.D, dtype=compute),
        layout,
        arrays(2),
        row_arrays(shape, rows, row_dtype, spec),
    )


def bank_of(operands, shape):
    return [o for o in operands if o.shape == shape and o.offset_bits]


def wide(bank):
    return 64 if bank.size * bank.dtype.itemsize > 2**32 else 32


@pytest.mark.parametrize("B", [1, 4, 16, 64])
@pytest.mark.parametrize("model", MODELS)
def test_decode_at_real_shapes(model, B):
    shape = MODELS[model]
    rows = shape.L * shape.E // 4 + min(shape.E, B * shape.K)
    kernels = decode_kernels(shape, B, rows)
    assert [name for name, _ in kernels] == ["expert_ffn_gate_up", "expert_ffn_down"]
    check_offsets(kernels)
    for (_, operands), bank in zip(kernels, row_arrays(shape, rows, jnp.bfloat16).values(), strict=True):
        # Read as an operand, written as a result.
        assert [o.offset_bits for o in bank_of(operands, bank.shape)] == [{wide(bank)}] * 2
        # The kernel reads the pool itself.
        assert len(bank_of(operands, (shape.E, *bank.shape[1:]))) == 1


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_decode_with_everything_resident_and_at_other_shares(model, share):
    shape = MODELS[model]
    rows = max(shape.E, int(shape.L * shape.E * share))
    check_offsets(decode_kernels(shape, 1, rows, offload=False))
    check_offsets(decode_kernels(shape, 1, rows + shape.K))


@pytest.mark.parametrize("B", [1, 16])
def test_decode_with_a_hook_between_its_kernels(B):
    """The hook gets what the first kernel computed, as arrays that a host call can take."""
    shape, seen = MODELS["qwen3-30b-a3b"], []

    def between(h, banks):
        seen.append((h.shape, h.dtype))
        return banks

    kernels = decode_kernels(shape, B, 264, offload=False, between=between)
    assert [name for name, _ in kernels] == ["expert_ffn_gate_up", "expert_ffn_down"]
    distinct = min(shape.E, B * shape.K)
    assert seen == [((distinct, shape.F) if B == 1 else (distinct, B, shape.F), jnp.bfloat16)]


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize(
    ("row_dtype", "compute"), [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_decode_with_mixed_dtypes(row_dtype, compute, B):
    kernels = decode_kernels(MODELS["olmoe"], B, 264, row_dtype=jnp.dtype(row_dtype), compute=jnp.dtype(compute))
    assert len(kernels) == 2
    check_offsets(kernels)


@pytest.mark.parametrize("block_rows", [16, 128])
@pytest.mark.parametrize("model", MODELS)
def test_prefill_of_8192_tokens_at_real_shapes(model, block_rows):
    shape = MODELS[model]
    rows = shape.L * shape.E // 4 + shape.E
    kernels = round_kernels(shape, 8192, block_rows, rows)
    assert [name for name, _ in kernels] == ["expert_ffn_grouped_gate_up", "expert_ffn_grouped_down"]
    check_offsets(kernels)
    for (_, operands), bank in zip(kernels, row_arrays(shape, rows, jnp.bfloat16).values(), strict=True):
        # Read only: the copy engine brings rows in.
        assert [o.offset_bits for o in bank_of(operands, bank.shape)] == [{wide(bank)}]


@pytest.mark.parametrize(
    ("row_dtype", "compute"), [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_prefill_with_mixed_dtypes(row_dtype, compute):
    kernels = round_kernels(MODELS["olmoe"], 64, 16, 264, row_dtype=jnp.dtype(row_dtype), compute=jnp.dtype(compute))
    assert len(kernels) == 2
    check_offsets(kernels)


# Experts of other activations, dense in bf16; 2880 = 45 * 64 leaves tiles of 64 columns.
GPT_OSS = ExpertSpec(activation="clamped_swiglu", alpha=1.702, limit=7.0, biases=True)
OTHER_EXPERTS = {
    "gpt-oss-20b": (Shape(D=2880, F=2880, E=32, K=4, L=24), GPT_OSS),
    "gpt-oss-120b": (Shape(D=2880, F=2880, E=128, K=4, L=36), GPT_OSS),
    "nllb-moe-54b": (Shape(D=2048, F=8192, E=128, K=2, L=12), ExpertSpec(activation="relu", biases=True)),
    "deepseek-v4-flash": (Shape(D=4096, F=2048, E=256, K=6, L=43), ExpertSpec(activation="clamped_silu", limit=10.0)),
}


@pytest.mark.parametrize("B", [1, 16])
@pytest.mark.parametrize("model", OTHER_EXPERTS)
def test_decode_of_other_experts(model, B):
    shape, spec = OTHER_EXPERTS[model]
    rows = shape.L * shape.E // 4
    kernels = decode_kernels(shape, B, rows, spec=spec)
    assert [name for name, _ in kernels] == ["expert_ffn_gate_up", "expert_ffn_down"]
    check_offsets(kernels)
    for (_, operands), tensor in zip(kernels, ("gate_up", "down"), strict=True):
        for part in spec.parts(tensor):
            size = spec.row_tensors(shape.F, shape.D)[part][0]
            # Weights and bias are each read from bank and pool, and deposited.
            assert len(bank_of(operands, (rows, *size))) == 2, part
            assert len(bank_of(operands, (shape.E, *size))) == 1, part
    assert len(decode_kernels(shape, B, rows, offload=False, spec=spec)) == 2


# Rows that the kernels read as they are stored; those of gpt-oss fill their last tile in part.
V3 = Shape(D=7168, F=2048, E=256, K=8, L=58)
PACKED_EXPERTS = {
    "gpt-oss-120b": (OTHER_EXPERTS["gpt-oss-120b"][0], replace(GPT_OSS, gate_up=MXFP4(), down=MXFP4())),
    "deepseek-v3-fp8": (V3, ExpertSpec(gate_up=FP8(), down=FP8())),
    "deepseek-v4-flash-fp4": (
        OTHER_EXPERTS["deepseek-v4-flash"][0],
        replace(OTHER_EXPERTS["deepseek-v4-flash"][1], gate_up=MXFP4(), down=MXFP4()),
    ),
    "qwen3-30b-a3b-awq": (MODELS["qwen3-30b-a3b"], ExpertSpec(gate_up=INT4(128, True), down=INT4(128, True))),
    "mixtral-gptq": (MODELS["mixtral"], ExpertSpec(gate_up=INT4(128), down=INT4(128))),
}


@pytest.mark.parametrize("B", [1, 16])
@pytest.mark.parametrize("model", PACKED_EXPERTS)
def test_decode_of_packed_experts(model, B):
    shape, spec = PACKED_EXPERTS[model]
    rows = shape.L * shape.E // 4
    kernels = decode_kernels(shape, B, rows, row_dtype=jnp.float16, spec=spec)
    assert [name for name, _ in kernels] == ["expert_ffn_gate_up", "expert_ffn_down"]
    check_offsets(kernels)
    for (_, operands), tensor in zip(kernels, ("gate_up", "down"), strict=True):
        for part in spec.parts(tensor):
            size = spec.row_tensors(shape.F, shape.D)[part][0]
            # Words, scales, zero points and biases are each read from bank and pool, and deposited.
            assert len(bank_of(operands, (rows, *size))) % 2 == 0 < len(bank_of(operands, (rows, *size))), part
            assert len(bank_of(operands, (shape.E, *size))) >= 1, part
    assert len(decode_kernels(shape, B, rows, row_dtype=jnp.float16, offload=False, spec=spec)) == 2


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", PACKED_EXPERTS)
def test_prefill_of_packed_experts(model, compute):
    shape, spec = PACKED_EXPERTS[model]
    rows = shape.L * shape.E // 4
    kernels = round_kernels(shape, 4096, 128, rows, row_dtype=jnp.float16, compute=jnp.dtype(compute), spec=spec)
    assert [name for name, _ in kernels] == ["expert_ffn_grouped_gate_up", "expert_ffn_grouped_down"]
    check_offsets(kernels)
    for (_, operands), tensor in zip(kernels, ("gate_up", "down"), strict=True):
        for part in spec.parts(tensor):
            assert bank_of(operands, (rows, *spec.row_tensors(shape.F, shape.D)[part][0])), part


@pytest.mark.parametrize("model", OTHER_EXPERTS)
def test_prefill_of_other_experts(model):
    shape, spec = OTHER_EXPERTS[model]
    rows = shape.L * shape.E // 4
    kernels = round_kernels(shape, 8192, 128, rows, spec=spec)
    assert [name for name, _ in kernels] == ["expert_ffn_grouped_gate_up", "expert_ffn_grouped_down"]
    check_offsets(kernels)
    for (_, operands), tensor in zip(kernels, ("gate_up", "down"), strict=True):
        for part in spec.parts(tensor):
            assert len(bank_of(operands, (rows, *spec.row_tensors(shape.F, shape.D)[part][0]))) == 1, part


def gemm_kernels(spec, rows, compute="bfloat16", **options):
    """The kernels of a product with one of ARG_SPECS, and the parts of its weights."""
    tensors = spec.form.row_tensors((spec.N,), spec.D)
    parts = {suffix: arrays(*size, dtype=fixed or jnp.bfloat16) for suffix, (size, fixed) in tensors.items()}
    run = functools.partial(dequant_gemm, form=spec.form, implementation="pallas", **options)
    return lower(run, arrays(rows, spec.D, dtype=jnp.dtype(compute)), parts), parts


@pytest.mark.parametrize("spec", ARG_SPECS, ids=lambda s: f"{s.model}-{s.matrix}-{s.form}")
def test_dequant_gemm_at_real_shapes(spec):
    for rows in ROWS:
        kernels, parts = gemm_kernels(spec, rows)
        assert [name for name, _ in kernels] == ["dequant_gemm"]
        check_offsets(kernels)
        ((_, (_, *operands)),) = kernels
        for suffix, part in parts.items():
            # The order of columns is applied to x, before the kernel.
            assert len(bank_of(operands, part.shape)) == (suffix != "_order"), suffix
        assert operands[-1].shape[-2:] == (rows, spec.N)


@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize("rows", [1, 64])
def test_dequant_gemm_in_other_dtypes(rows, compute):
    for spec in (ARG_SPECS[0], *(s for s in ARG_SPECS if s.matrix in ("qkv", "lm_head"))):
        kernels, _ = gemm_kernels(spec, rows, compute, bias=None, out_dtype="float32")
        check_offsets(kernels)


@pytest.mark.parametrize("T", [1, 8192])
@pytest.mark.parametrize("K", [2, 8])
@pytest.mark.parametrize("E", [8, 64, 128])
def test_router_topk_at_real_shapes(E, K, T):
    kernels = lower(functools.partial(router_topk, k=K), arrays(T, E, dtype=jnp.float32))
    assert [(name, [o.shape for o in operands]) for name, operands in kernels] == [
        ("router_topk", [(T, E), (T, K), (T, K)])
    ]
    assert all(operand.offset_bits for operand in kernels[0][1])
    check_offsets(kernels)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", ROW_SPECS, ids=lambda spec: f"{spec.model} {spec.matrix}")
def test_row_linear_at_real_shapes(spec, dtype):
    n_out = spec.N // 2 if spec.gated else spec.N
    norm = spec.norm and RowNorm(1e-6, spec.norm)

    def run(x, weight, norm_weight, bias, residual):
        rest = dict(norm_weight=norm_weight, bias=bias, residual=residual)
        return row_linear(x, weight, norm=norm, gated=spec.gated, **rest, implementation="pallas")

    some = functools.partial(arrays, dtype=jnp.dtype(dtype))
    kernels = lower(
        run,
        some(spec.D),
        some(spec.N, spec.D),
        some(spec.D) if norm else None,
        some(spec.N) if spec.bias else None,
        some(n_out) if spec.residual else None,
    )
    assert [name for name, _ in kernels] == ["row_linear"]
    check_offsets(kernels)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("spec", HEAD_SPECS, ids=lambda spec: spec.model)
def test_turn_heads_at_real_shapes(spec, B, dtype):
    norm = spec.norm and HeadNorm(RowNorm(1e-6, spec.norm), spec.over_all)
    some = functools.partial(arrays, dtype=jnp.dtype(dtype))
    pool, table = some(9000, 64, spec.G, spec.H), some(B, spec.rotary // 2) if spec.rotary else None
    weights = [some(n * spec.H if spec.over_all else spec.H) if norm else None for n in (spec.N, spec.G)]

    def run(*args):
        *args, q_weight, k_weight = args
        rest = dict(query_heads=spec.N, step=spec.step, norm=norm, clip=spec.clip, implementation="pallas")
        return turn_heads(*args, q_weight=q_weight, k_weight=k_weight, **rest)

    heads = some(B, spec.N * spec.step + 2 * spec.G, spec.H)
    kernels = lower(run, heads, pool, pool, arrays(B, 512), arrays(B), arrays(B), table, table, *weights)
    assert [name for name, _ in kernels] == ["turn_heads"]
    check_offsets(kernels)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", COMBINE_SPECS, ids=lambda spec: spec.model)
def test_combine_at_real_shapes(spec, dtype):
    def run(*args):
        return combine(*args, implementation="pallas")

    y, weights = arrays(spec.K, 1, spec.D, dtype=jnp.float32), arrays(1, spec.K, dtype=jnp.dtype(spec.weights))
    live, residual = arrays(1, dtype=jnp.bool_), arrays(1, spec.D, dtype=jnp.dtype(dtype))
    kernels = lower(run, y, arrays(1, spec.K), weights, live, residual)
    assert [name for name, _ in kernels] == ["combine"]
    check_offsets(kernels)


ROUTINGS = {
    "qwen3-30b-a3b": (128, Routing(8, norm=1, weights="bfloat16"), False),
    "mixtral": (8, Routing(2, norm=1), False),
    "gpt-oss": (32, Routing(4, over_chosen=True, weights="bfloat16"), False),
    "dbrx": (16, Routing(4, rounded="bfloat16", norm=1, weights="bfloat16"), False),
    "dbrx, another norm": (16, Routing(4, rounded="bfloat16", norm=3, weights="bfloat16"), False),
    "deepseek-v2-lite": (64, Routing(6, scale=1.0), False),
    "moonlight": (64, Routing(6, "sigmoid", norm=1, epsilon=1e-20, scale=2.446), True),
    "deepseek-v4": (256, Routing(6, "sqrt_softplus", norm=1, epsilon=1e-20, scale=1.5, weights="bfloat16"), True),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("T", [1, 8192])
@pytest.mark.parametrize("model", ROUTINGS)
def test_route_at_real_shapes(model, T, dtype):
    E, how, biased = ROUTINGS[model]
    kernels = lower(
        lambda logits, bias: route(logits, how, bias=bias, implementation="pallas"),
        arrays(T, E, dtype=jnp.dtype(dtype)),
        arrays(E, dtype=jnp.float32) if biased else None,
    )
    assert [name for name, _ in kernels] == ["route"]
    check_offsets(kernels)


@pytest.mark.parametrize("T", [1, 8192])
def test_sinkhorn_at_real_shapes(T):
    run = functools.partial(sinkhorn_kernel, iterations=20, eps=1e-6)
    kernels = lower(run, arrays(T, 4, 4, dtype=jnp.float32))
    assert [(name, [o.shape for o in operands]) for name, operands in kernels] == [("sinkhorn", [(T, 4, 4)] * 2)]
    check_offsets(kernels)


@pytest.mark.parametrize("B", [1, 4, 16, 64])
@pytest.mark.parametrize("model", MODELS)
def test_slot_plan_at_real_shapes(model, B):
    shape = MODELS[model]
    experts, pairs = shape.L * shape.E, B * shape.K
    kernels = lower(
        functools.partial(slot_plan, layer=shape.L - 1),
        arrays(pairs),
        arrays(pairs),
        arrays(shape.L + 2),
        arrays(experts, dtype=jnp.float32),
        arrays(experts),
        arrays(experts // 4 + min(shape.E, pairs)),
        arrays(shape.L * 4),
        arrays(1),
    )
    assert [name for name, _ in kernels] == ["slot_plan"]
    check_offsets(kernels)


@pytest.mark.parametrize("B", [1, 4])
@pytest.mark.parametrize("model", MODELS)
def test_slot_plan_with_policies_at_real_shapes(model, B):
    """All policies that the kernel evaluates, in one set."""
    shape = MODELS[model]
    experts, pairs = shape.L * shape.E, B * shape.K
    policy = PolicySet([name for name in list_policies() if is_elementwise(get_policy(name))])
    state = jax.eval_shape(functools.partial(policy.init, jnp, shape.L, shape.E, 0))
    kernels = lower(
        lambda *args: slot_plan(*args[:3], None, *args[3:-2], layer=1, policy=policy, state=args[-2], step=args[-1]),
        arrays(pairs),
        arrays(pairs),
        arrays(shape.L + 2),
        arrays(experts),
        arrays(experts // 4 + min(shape.E, pairs)),
        arrays(shape.L * 4),
        arrays(1),
        state,
        arrays(),
    )
    assert [name for name, _ in kernels] == ["slot_plan"]
    check_offsets(kernels)


def test_offsets_that_wrap_are_seen():
    """The check itself: one-byte rows between 2 and 4 GiB are what it must refuse, above 4 GiB they are fine again."""
    shape = MODELS["qwen3-30b-a3b"]
    row_bytes = 2 * shape.F * shape.D
    with pytest.raises(AssertionError, match="wraps"):
        check_offsets(decode_kernels(shape, 1, 3 * 2**30 // row_bytes, row_dtype=jnp.uint8))
    check_offsets(decode_kernels(shape, 1, 10 * 2**30 // row_bytes, row_dtype=jnp.uint8))
    check_offsets(decode_kernels(shape, 1, 2**30 // row_bytes, row_dtype=jnp.uint8))


def pallas_uses(path):
    """Line numbers where a file names `pallas_call` or imports Pallas."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names = [getattr(node, "attr", None), getattr(node, "id", None)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            if any(re.search(r"jax\.experimental(\.|.*)\bpallas\b", f"{module}.{alias.name}") for alias in node.names):
                yield node.lineno
        if "pallas_call" in names:
            yield node.lineno


def test_pallas_is_used_through_compat_only():
    compat = REPOSITORY / "pallas_kernels" / "_compat.py"
    assert list(pallas_uses(compat))
    folders = ("pallas_kernels", "host_offload", "moe_jax", "experiments")
    files = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py")) if path != compat]
    assert len(files) > 20
    assert {str(path.relative_to(REPOSITORY)): lines for path in files if (lines := list(pallas_uses(path)))} == {}
