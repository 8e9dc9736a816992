"""Kernels that let the next launch begin early (`feeds_kernels`): in no decode step does XLA read their results next.

XLA's kernels read with loads that the wait at their start does not order. So whatever XLA reads of such a kernel must
also need something that a kernel computed from it later.
"""

import functools
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "experiments"))
import plan
import random_checkpoint
import random_model

from host_offload.capacity import SlotBudget
from host_offload.policy import get_policy
from host_offload.prefetch import Experience
from host_offload.prefetch.staging import StagingSettings
from host_offload.store import RowSpec
from host_offload.transport.graph import GraphTransport
from host_offload.transport.staged import StagedTransport
from moe_jax import OffloadConfig
from moe_jax.engine.kv_cache import PagedKV
from moe_jax.engine.programs import LoopState, Programs
from moe_jax.generation.sampling import SamplingParams, sampler_arrays
from moe_jax.layers.attention import choose_implementation
from moe_jax.models.registry import abstract_params
from pallas_kernels import _compat
from pallas_kernels.expert_ffn import Prefix

BF16 = np.dtype(jnp.bfloat16)
# What XLA computes within the kernel that reads it: views, and arithmetic on indices.
WITHIN = (
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "lt",
    "add",
    "select_n",
    "concatenate",
    "convert_element_type",
)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Programs are traced as for an H200."""
    monkeypatch.setattr(_compat, "kernels_run_compiled", lambda: True)
    monkeypatch.setattr(_compat, "launches_early", lambda: True)
    monkeypatch.setattr("pallas_kernels.kernels_run_compiled", lambda: True)
    monkeypatch.setattr("moe_jax.layers.linear.kernels_run_compiled", lambda: True)
    monkeypatch.setattr("moe_jax.layers.router.kernels_run_compiled", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


def parts(name):
    """(config, row spec, expert spec) of two or four layers of a released model."""
    if name in random_model.SHAPES:
        cls, values = random_model.SHAPES[name]
        cfg = cls.from_hf({**values, "num_hidden_layers": 2})
        rows = {n: (s, BF16) for n, s in cfg.expert_row_shapes().items()}
        return cfg, RowSpec(rows, L=len(cfg.moe_layers), E=cfg.num_experts), cfg.expert_spec()
    layers = {"deepseek-v3": 4, "deepseek-v4-flash": 4, "qwen3.5-35b-a3b": 4, "jamba-v0.1": 8}.get(name, 2)
    found = plan._from_config(name, random_checkpoint.config_of(name, layers), OffloadConfig(), "test")
    return found.cfg, found.spec, found.experts


def traced(name, policy, batch, routing, prefetch=None):
    """jaxpr of the decode loop's body."""
    cfg, spec, experts = parts(name)
    L, E = spec.L, spec.E
    graphdef, params = abstract_params(cfg, BF16)
    slabs = [{n: jax.ShapeDtypeStruct((E, *s), d) for n, (s, d) in spec.tensors.items()} for _ in range(L)]
    budget = SlotBudget(L * E // 2, (E // 2,) * L, L, spec.row_bytes, "layer", "test")
    make = GraphTransport
    if prefetch is not None:
        settings = StagingSettings(prefetch, 1 << 21, True, 1, Prefix(16, 16), True, Experience(L, E))
        make = functools.partial(StagedTransport, prefetch=settings)
    transport = make(
        spec, SimpleNamespace(spec=spec, slabs=slabs), budget, get_policy(policy), forced_admit=False,
        max_pairs=batch * cfg.num_experts_per_tok, implementation="pallas", experts=experts,
    )  # fmt: skip
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    kv = jax.eval_shape(lambda: PagedKV.create(cfg.cache_layout(), 16, 64, batch, 12, BF16))
    live = jax.ShapeDtypeStruct((batch,), bool)
    loop = LoopState(kv, jax.eval_shape(transport.create_state), i32((batch,)), live, i32((batch,)), None)
    numbers = ("seed", "sequence", "length", "first")
    draws = {n: np.zeros(batch, np.uint32 if n == "seed" else np.int32) for n in numbers}
    draws |= {
        "arrays": sampler_arrays([SamplingParams(temperature=0.0)] * batch),
        "eos": np.zeros((batch, 1), np.int32),
    }
    attention = choose_implementation(
        platform="gpu", dtype=BF16, batch=batch, tokens=1, from_zero=False, page_size=64, head_dim=cfg.head_dim,
        sinks=cfg.attention_sinks, kernel=cfg.attention_kernel,
    )  # fmt: skip
    record = (L, cfg.num_experts_per_tok) if routing else None
    body = functools.partial(
        Programs(graphdef, transport)._decode, steps=4, greedy=True, sort=False, routing=record, attention=attention
    )
    operands = {"pool": slabs, "control": i32((L + 2,))}
    if prefetch is not None:
        operands["ahead"] = transport.operands()["ahead"]
    jaxpr = jax.jit(body).trace(params, operands, loop, draws, None).jaxpr
    (loop_equation,) = [e for e in flat(jaxpr) if e.primitive in ("while", "scan")]  # scan: of a fixed number of steps
    return loop_equation.params["body_jaxpr" if loop_equation.primitive == "while" else "jaxpr"]


def flat(jaxpr, names=None):
    """Equations of a closed jaxpr with those of the functions it calls, in order; operands and results by identity."""
    names = {} if names is None else names
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)

    def name(var):
        return names.get(var, var) if not hasattr(var, "val") else None

    found = []
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name not in ("pallas_call", "scan") and inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            # A function's variables are its own at each call.
            mine = {var: (object(), var) for e in inner.eqns for var in e.outvars}
            mine |= {var: name(outer) for var, outer in zip(inner.invars, equation.invars, strict=True)}
            found += flat(inner, mine)
            for outer, var in zip(equation.outvars, inner.outvars, strict=True):
                names[outer] = mine.get(var, var) if not hasattr(var, "val") else None
            continue
        ins = [name(var) for var in equation.invars]
        outs = [name(var) for var in equation.outvars]
        found.append(SimpleNamespace(primitive=equation.primitive.name, ins=ins, outs=outs, params=equation.params))
    return found


def live(jaxpr):
    """As `flat`, without what no result needs."""
    names, inner = {}, getattr(jaxpr, "jaxpr", jaxpr)
    equations = flat(jaxpr, names)
    needed = {names.get(var, var) for var in inner.outvars if not hasattr(var, "val")}
    kept = []
    for equation in reversed(equations):
        if equation.primitive == "pallas_call" or any(out in needed for out in equation.outs):
            needed |= {value for value in equation.ins if value is not None}
            kept.append(equation)
    return kept[::-1]


def launches_next(equation):
    return equation.primitive == "pallas_call" and any(
        inner.primitive.name == "launch_dependents" for inner in equation.params["jaxpr"].eqns
    )


def read_too_soon(equations, early):
    """Primitives that read a result of the kernel `early` and need nothing that a kernel computed from it."""
    soon, after, found = set(early.outs), set(), []  # its results and views of them; what kernels computed from them
    for equation in equations[equations.index(early) + 1 :]:
        reads = {value for value in equation.ins if value is not None}
        if reads & after or (reads & soon and equation.primitive == "pallas_call"):
            after |= set(equation.outs)
        elif reads & soon and equation.primitive in WITHIN:
            soon |= set(equation.outs)
        elif reads & soon:
            found.append(equation.primitive)
    return found


MODELS = (
    "qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3",
    "deepseek-v4-flash", "jamba-v0.1", "qwen3.5-35b-a3b",
)  # fmt: skip


@pytest.mark.parametrize(("name", "routing"), [(MODELS[0], True), *((name, False) for name in MODELS)])
def test_no_result_is_read_by_xla_next(on_a_gpu, name, routing):
    equations = live(traced(name, "lru", 1, routing=routing))
    early = [equation for equation in equations if launches_next(equation)]
    assert early
    assert {e.params["name"]: found for e in early if (found := read_too_soon(equations, e))} == {}


@pytest.mark.parametrize(("policy", "batch"), [("lru", 4), ("moeinf_priority", 1), ("clock", 1)])
def test_neither_with_several_tokens_nor_with_a_policy_outside_of_the_plan(on_a_gpu, policy, batch):
    equations = live(traced("qwen3-30b-a3b", policy, batch, routing=True))
    early = [equation for equation in equations if launches_next(equation)]
    assert [found for e in early if (found := read_too_soon(equations, e))] == []


@pytest.mark.parametrize("prefetch", ("request-counts", "cross-layer+temporal"))
def test_neither_with_prefetch(on_a_gpu, prefetch):
    equations = live(traced("qwen3-30b-a3b", "lru", 1, routing=True, prefetch=prefetch))
    early = [equation for equation in equations if launches_next(equation)]
    assert early and [found for e in early if (found := read_too_soon(equations, e))] == []


@pytest.mark.parametrize(("routing", "others"), [(False, {"combine": 1}), (True, {"combine": 1, "route": 2})])
def test_a_step_of_one_token_launches_most_kernels_early(on_a_gpu, routing, others):
    equations = live(traced("qwen3-30b-a3b", "lru", 1, routing=routing))
    kernels = [e for e in equations if e.primitive == "pallas_call"]
    assert len(kernels) == 22  # two layers of eleven
    # Not: the last layer's sum, which XLA's norm reads, and the router's choice where it is recorded.
    assert Counter(e.params["name"] for e in kernels if not launches_next(e)) == others


def test_what_xla_reads_next_is_found(on_a_gpu):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    def copy(x, early):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return _compat.call(
            kernel, grid=(), out_shape=shape, num_warps=1, num_stages=1, name="copy", feeds_kernels=early
        )(x)

    def step(x, good):
        y = copy(x, True)
        return copy(y, False) + y if good else jnp.sin(y) + copy(y, False)

    for good in (True, False):
        equations = live(jax.make_jaxpr(functools.partial(step, good=good))(jnp.ones((8,))))
        (early,) = [equation for equation in equations if launches_next(equation)]
        assert read_too_soon(equations, early) == ([] if good else ["sin"])
