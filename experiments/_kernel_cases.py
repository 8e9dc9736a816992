"""One kernel at one shape in one format: its data, the call that is timed, and its distance from a plain reference.

Data are random and made on the device. A case has as many sets of weights (or pages) as fill 512 MB, and each call
reads the next set, so that nothing is found in a cache. Calls are chained, so that no two run at once: by their state
or result, or (`expert_ffn`, `router_topk`) by an operand that a kernel of a few elements makes of the result before.
That kernel is in the time.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _case import ROTATE_BYTES, Case, fill, relative, sets_for, unequal
from _gemm_cases import dequant_gemm, gemm_lines
from _released import CONFIGS
from _row_cases import head_lines, heads, routing, row_linear, row_lines

from host_offload.plan import apply, plan_event
from host_offload.prefetch.staging import AUTO_BUDGET
from moe_jax.engine.engine import block_rows
from moe_jax.models.registry import family_for
from pallas_kernels.choose_rows import choose_rows
from pallas_kernels.expert_ffn import ExpertSpec, Staging, decode, expert_ffn_decode, group_pairs, grouped
from pallas_kernels.expert_ffn import ref as expert_ref
from pallas_kernels.expert_ffn.staging import choose_prefix, regions
from pallas_kernels.fetch_rows import fetch_rows
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format
from pallas_kernels.paged_attention import kernel as attention_kernel
from pallas_kernels.paged_attention import ref as attention_ref
from pallas_kernels.router_topk import router_topk
from pallas_kernels.sinkhorn import sinkhorn_kernel, sinkhorn_ref
from pallas_kernels.slot_plan import slot_plan

# Sets of a kernel whose operands are small: they come from the kernel before, so from the cache, in an engine as well.
SMALL_SETS = 16

FORMATS: dict[str, Format] = {
    "bf16": Dense(),
    "fp8": FP8(128),
    "int4": INT4(128),
    "int4z": INT4(128, zeros=True),
    "mxfp4": MXFP4(),
}

# Formats in which the experts of a model are run; the first is that of its release.
EXPERTS: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b": ("bf16", "fp8", "int4", "int4z"),
    "olmoe-1b-7b": ("bf16",),
    "mixtral-8x7b": ("bf16", "int4", "int4z"),
    "deepseek-v2-lite": ("bf16",),
    "deepseek-v3": ("fp8",),
    "deepseek-v4-flash": ("mxfp4",),
    "gpt-oss-20b": ("mxfp4",),
    "gpt-oss-120b": ("mxfp4",),
    "dbrx": ("bf16",),
    "jamba-v0.1": ("bf16",),
    "qwen3.5-35b-a3b": ("bf16",),
    "nllb-moe-54b": ("bf16",),
}
PREFILL = ("qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "deepseek-v4-flash")
PREFILL_TOKENS = 4096
DEPOSIT = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b", "deepseek-v4-flash")


class Heads(NamedTuple):
    """N query and G key heads; widths of the parts of a key; width of a value, None if the first part is the value."""

    N: int
    G: int
    widths: tuple[int, ...]
    value: int | None
    sinks: bool = False


ATTENTION: dict[str, Heads] = {
    "qwen3-30b-a3b": Heads(32, 4, (128,), 128),
    "olmoe-1b-7b": Heads(16, 16, (128,), 128),
    "mixtral-8x7b": Heads(32, 8, (128,), 128),
    "gpt-oss-120b": Heads(64, 8, (64,), 64, sinks=True),
    "qwen3.5-35b-a3b": Heads(16, 2, (256,), 256),
    "deepseek-v2-lite": Heads(16, 1, (512, 64), None),
    "deepseek-v3": Heads(128, 1, (512, 64), None),
}
CONTEXTS = ((1, 4096), (1, 32768), (16, 2048))
PAGE = 64


class Experts(NamedTuple):
    """D, F, E experts, K of them a token, L layers, and what an expert computes from which rows."""

    D: int
    F: int
    E: int
    K: int
    L: int
    spec: ExpertSpec

    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{name: (shape, dtype)} of a row; floats that a file chooses are bf16."""
        return {n: (s, d or jnp.dtype(jnp.bfloat16)) for n, (s, d) in self.spec.row_tensors(self.F, self.D).items()}

    def part(self, name: str) -> tuple[Format, str]:
        """Format and suffix of a row tensor."""
        tensor = "gate_up" if name.startswith("gate_up") else "down"
        return getattr(self.spec, tensor), name.removeprefix(tensor)

    @property
    def row_bytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.tensors().values())


def experts_of(shape: str, form: str, small: bool) -> Experts:
    """The experts of a released model in a format; `small`: of widths 256 and 128, for any machine."""
    cfg = family_for(CONFIGS[shape]).config_cls.from_hf(CONFIGS[shape])
    spec = replace(cfg.expert_spec(), gate_up=FORMATS[form], down=FORMATS[form])
    if small:
        return Experts(256, 128, 8, 2, 2, spec)
    sides = cfg.hidden_size, cfg.expert_width
    return Experts(*sides, cfg.num_experts, cfg.num_experts_per_tok, len(cfg.moe_layers), spec)


def row_bank(experts: Experts, rows: int, seed: int) -> dict:
    """{name: [rows, ...]}, one row after the other: all at once would take several times the memory."""

    def row(r):
        key = jax.random.fold_in(jax.random.key(seed), r)
        return {
            name: fill(jax.random.fold_in(key, i), *experts.part(name), shape, dtype)
            for i, (name, (shape, dtype)) in enumerate(experts.tensors().items())
        }

    return jax.lax.map(row, jnp.arange(rows))


def empty_bank(experts: Experts, rows: int) -> dict:
    return {name: jnp.zeros((rows, *shape), dtype) for name, (shape, dtype) in experts.tensors().items()}


def distinct_experts(E: int, K: int, batch: int) -> int:
    """Expected distinct experts of `batch` tokens that choose K of E at random."""
    return max(K, round(E * (1 - (1 - K / E) ** batch)))


def _decode(experts, distinct, tiles):
    """impl -> f(x, rows, src, deposit, count, banks, pool) of the decode kernels or plain XLA."""

    def run(implementation, *operands):
        if implementation == "xla":
            return expert_ref.expert_ffn_decode(*operands, distinct=distinct, spec=experts.spec)
        return decode.expert_ffn_decode(
            *operands, distinct=distinct, spec=experts.spec, tiles=tiles, interpret=implementation == "interpret"
        )

    return run


def expert_ffn(shape: str, form: str, batch: int, small: bool, tiles=None) -> Case:
    """Decode with every expert in a slot: the distinct experts of `batch` tokens."""
    experts = experts_of(shape, form, small)
    distinct = distinct_experts(experts.E, experts.K, batch)
    sets = sets_for(distinct * experts.row_bytes, small)
    run, every = _decode(experts, distinct, tiles), jnp.arange(distinct, dtype=jnp.int32)

    def make():
        x = jax.random.normal(jax.random.key(1), (batch, experts.D), jnp.bfloat16)
        out = jnp.zeros((distinct, batch, experts.D), jnp.float32)
        return {"x": x, "banks": row_bank(experts, sets * distinct, 0)}, {"out": out}

    def operands(data, x, rows):
        idle = jnp.full((distinct,), -1, jnp.int32)
        return x, rows, idle, idle, jnp.array([distinct], jnp.int32), data["banks"], None

    def step(implementation):
        def call(data, state, j):
            at = state["out"][0, 0, 0]
            rows = every + j * distinct + (at != at)  # adds nothing, but only after the call before
            return {"out": run(implementation, *operands(data, data["x"], rows))[0]}

        return call

    def error(data, first, last):
        x = data["x"].astype(jnp.float32)
        return relative(last["out"], run("xla", *operands(data, x, every))[0])

    aim = (0.85 if form in ("bf16", "fp8") else 0.65) if batch == 1 else None
    moved = distinct * experts.row_bytes
    return Case(make, step, error, 0.01, sets, moved=moved, memory="hbm", aim=aim, starts=2)


def _host_rows(experts, sets):
    def make():
        out = jnp.zeros((experts.K, 1, experts.D), jnp.float32)
        x = jax.random.normal(jax.random.key(1), (1, experts.D), jnp.bfloat16)
        bank = empty_bank(experts, sets * experts.K)
        return {"x": x, "pool": row_bank(experts, sets * experts.K, 0)}, {"out": out, "banks": bank}

    return make


def _moved(data, banks):
    pool = jax.device_put(data["pool"], jax.memory.Space.Device)
    return unequal(*((banks[name], pool[name]) for name in pool))


def expert_ffn_deposit(shape: str, form: str, small: bool, tiles=None) -> Case:
    """Read-use-deposit at batch 1: all K experts are missing, and are kept."""
    experts = experts_of(shape, form, small)
    K, sets = experts.K, sets_for(experts.K * experts.row_bytes, small)
    run, every, keep = _decode(experts, K, tiles), jnp.arange(K, dtype=jnp.int32), jnp.ones((K,), jnp.int32)
    count = jnp.array([K], jnp.int32)

    def step(implementation):
        def call(data, state, j):
            rows = every + j * K
            y, banks = run(implementation, data["x"], rows, rows, keep, count, state["banks"], data["pool"])
            return {"out": y, "banks": banks}

        return call

    def error(data, first, last):
        x = data["x"].astype(jnp.float32)
        want = run("xla", x, every, every, keep, count, last["banks"], None)[0]
        return relative(last["out"], want) + _moved(data, last["banks"])

    moved = K * experts.row_bytes
    return Case(_host_rows(experts, sets), step, error, 0.01, sets, moved=moved, memory="link", aim=0.9)


def fetch(shape: str, form: str, small: bool) -> Case:
    """K rows from pinned memory to the bank, in any format."""
    experts = experts_of(shape, form, small)
    K, sets = experts.K, sets_for(experts.K * experts.row_bytes, small)
    count = jnp.array([K], jnp.int32)

    def step(implementation):
        move = jax.jit(functools.partial(fetch_rows, distinct=K, implementation=implementation))

        def call(data, state, j):
            rows = jnp.arange(K, dtype=jnp.int32) + j * K
            return state | {"banks": move(rows, rows, count, state["banks"], data["pool"])}

        return call

    def error(data, first, last):
        return _moved(data, last["banks"])

    moved = K * experts.row_bytes
    return Case(_host_rows(experts, sets), step, error, 0.0, sets, moved=moved, memory="link", aim=0.9)


def staged(shape: str, form: str, small: bool) -> Case:
    """As `expert_ffn_deposit`, after the first 2 MiB of one of the K rows were chosen and staged."""
    experts = experts_of(shape, form, small)
    K, sets, tensors = experts.K, sets_for(experts.K * experts.row_bytes, small), experts.tensors()
    every, keep, count = jnp.arange(K, dtype=jnp.int32), jnp.ones((K,), jnp.int32), jnp.array([K], jnp.int32)
    prefix = choose_prefix(experts.spec, tensors, AUTO_BUDGET, {"gate_up": 16, "down": 16})
    covered = regions(prefix, experts.spec, {name: size for name, (size, _) in tensors.items()})
    nothing, on = jnp.full((1, sets * K), -1, jnp.int32), jnp.ones((1,), jnp.int32)

    def make():
        data, state = _host_rows(experts, sets)()
        held = empty_bank(experts, 1)
        return data, state | {"held": {name: held[name] for name in covered}}

    def step(implementation):
        how = {"implementation": implementation}

        def call(data, state, j):
            rows = every + j * K
            likely = jnp.where(jnp.arange(sets * K) == j * K + 1, 1.0, -jnp.inf)
            ids, _ = choose_rows(likely, nothing, on, layer=0, count=1, width=1, **how)
            pool = {name: data["pool"][name] for name in covered}
            held = fetch_rows(every[:1], ids, count // K, state["held"], pool, distinct=1, regions=covered, **how)
            entries = data["x"], rows, rows, keep, count, state["banks"], data["pool"]
            staging = Staging(ids, held, prefix)
            y, banks, staging = expert_ffn_decode(*entries, distinct=K, spec=experts.spec, staging=staging, **how)
            return {"out": y, "banks": banks, "held": staging.rows}

        return call

    def error(data, first, last):
        x, run = data["x"].astype(jnp.float32), _decode(experts, K, None)
        want = run("xla", x, every, every, keep, count, last["banks"], None)[0]
        return relative(last["out"], want) + _moved(data, last["banks"])

    return Case(make, step, error, 0.01, sets, moved=K * experts.row_bytes, memory="link")


def expert_ffn_prefill(shape: str, form: str, small: bool, tiles=None) -> Case:
    """All experts of a layer on a chunk of PREFILL_TOKENS tokens, top-K at random, in one round."""
    experts = experts_of(shape, form, small)
    T, E, K, D = 64 if small else PREFILL_TOKENS, experts.E, experts.K, experts.D
    sets = max(1, -(-ROTATE_BYTES // (E * experts.row_bytes))) if not small else 2
    BM = 16 if small else block_rows("gpu", T * K, SimpleNamespace(num_experts=E))

    def make():
        x = jax.random.normal(jax.random.key(1), (T, D), jnp.bfloat16)
        ids = jax.lax.top_k(jax.random.uniform(jax.random.key(2), (T, E)), K)[1].astype(jnp.int32)
        layout = group_pairs(ids, jnp.ones((T,), bool), jnp.arange(E, dtype=jnp.int32), E, BM)
        layout["row"] = jnp.minimum(layout["block_position"], E - 1)
        span = jnp.stack([jnp.int32(0), layout["block_end"][-1]])
        data = {"x": x, "layout": layout, "span": span, "banks": row_bank(experts, sets * E, 0)}
        return data, {"out": jnp.zeros((T * K, D), jnp.bfloat16)}

    def run(implementation, data, y, j, dtype=jnp.bfloat16):
        layout = data["layout"] | {"block_row": data["layout"]["row"] + j * E}
        operands = data["x"].astype(dtype), y, layout, data["span"], data["banks"]
        if implementation == "xla":
            return expert_ref.expert_ffn_round(*operands, block_rows=BM, spec=experts.spec)
        interpret = implementation == "interpret"
        return grouped.expert_ffn_round(*operands, block_rows=BM, spec=experts.spec, tiles=tiles, interpret=interpret)

    def step(implementation):
        return lambda data, state, j: {"out": run(implementation, data, state["out"], j)}

    def error(data, first, last):
        blank = jnp.zeros((T * K, D), jnp.float32)
        return relative(last["out"], run("xla", data, blank, 0, jnp.float32))

    flops = 2 * T * K * D * experts.F * (3 if experts.spec.gated else 2)
    return Case(make, step, error, 0.02, sets, flops=flops, aim=0.5 if K == 8 else None)


def attention(shape: str, batch: int, context: int, small: bool, tiles=None) -> Case:
    """One new token of each of `batch` sequences of `context` tokens, less 3: the last page is not full."""
    heads = ATTENTION[shape]
    if small:
        heads = heads._replace(N=heads.N // heads.G * min(heads.G, 2), G=min(heads.G, 2))
        heads = heads._replace(widths=tuple(w // 4 for w in heads.widths), value=heads.value and heads.value // 4)
        batch, context = min(batch, 2), 128
    N, G, widths, value, sinks = heads
    n = context // PAGE
    width = sum(widths) + (value or 0)
    moved = batch * context * G * width * 2
    sets = sets_for(moved, small)
    names = tuple(f"k{i}" for i in range(len(widths)))

    def make():
        pages = 1 + sets * batch * n

        def pool(i, w):
            keys = jax.random.split(jax.random.key(i), pages)
            return jax.lax.map(lambda key: jax.random.normal(key, (PAGE, G, w), jnp.bfloat16), keys)

        pools = {name: pool(i, w) for i, (name, w) in enumerate(zip(names, widths, strict=True))}
        if value is not None:
            pools["values"] = pool(7, value)
        order = np.random.default_rng(0).permutation(sets * batch * n) + 1
        q = [jax.random.normal(jax.random.key(20 + i), (batch, N, w), jnp.bfloat16) for i, w in enumerate(widths)]
        data = {
            "q": tuple(q),
            "tables": [jnp.asarray(table, jnp.int32) for table in order.reshape(sets, batch, n)],
            "lengths": jnp.full((batch,), context - 3, jnp.int32),
            "sinks": jnp.linspace(-1, 1, N) if sinks else None,
        }
        return data | pools, {"out": q[0]}

    options = dict(scale=sum(widths) ** -0.5, window=None, softcap=None)

    def attend(implementation):
        if implementation == "xla":
            return jax.jit(functools.partial(attention_ref.paged_decode_attention, **options))
        options_ = options | dict(tiles=tiles, interpret=implementation == "interpret")
        return jax.jit(functools.partial(_attend_kernel, latent=value is None, **options_))

    def operands(data, queries, j):
        keys = tuple(data[name] for name in names)
        values = keys[0] if value is None else data["values"]
        return queries, keys, values, data["tables"][j], data["lengths"], data["sinks"]

    def step(implementation):
        run = attend(implementation)
        return lambda data, state, j: {"out": run(*operands(data, (state["out"], *data["q"][1:]), j))}

    def error(data, first, last):
        queries = tuple(q.astype(jnp.float32) for q in data["q"])
        return relative(first["out"], attend("xla")(*operands(data, queries, 0)))

    aim = 0.75 if context >= 32768 else None
    return Case(make, step, error, 0.02, sets, moved=moved, memory="hbm", aim=aim)


def _attend_kernel(queries, keys, values, *operands, latent, **options):
    """The kernel knows a latent, which is key and value at once, by the identity of its arguments."""
    values = keys[0] if latent else values
    return attention_kernel.paged_decode_attention(queries, keys, values, *operands, **options)


def topk(shape: str, tokens: int, small: bool) -> Case:
    """Scores of `tokens` tokens."""
    experts = experts_of(shape, "bf16", small)
    E, K = experts.E, experts.K

    def make():
        scores = list(jax.random.normal(jax.random.key(0), (SMALL_SETS, tokens, E)))
        return {"scores": scores}, {"out": (jnp.zeros((tokens, K)), jnp.zeros((tokens, K), jnp.int32))}

    def step(implementation):
        def call(data, state, j):
            at = state["out"][0][0, 0]
            scores = data["scores"][j] + jnp.where(at != at, at, 0.0)  # unchanged, but after the call before
            if implementation == "xla":
                return {"out": tuple(jax.lax.top_k(scores, K))}
            return {"out": router_topk(scores, K, interpret=implementation == "interpret")}

        return call

    def error(data, first, last):
        return unequal(*zip(last["out"], jax.lax.top_k(data["scores"][0], K), strict=True))

    return Case(make, step, error, 0.0, SMALL_SETS)


def doubly_stochastic(shape: str, tokens: int) -> Case:
    """The small matrices of `tokens` tokens, each call on the result of the one before."""
    config = CONFIGS[shape]
    n, options = config["hc_mult"], dict(iterations=config["hc_sinkhorn_iters"], eps=config["hc_eps"])

    def make():
        logits = 2 * jax.random.normal(jax.random.key(0), (tokens, n, n))
        return {"logits": logits}, {"out": logits}

    def step(implementation):
        def call(data, state, j):
            if implementation == "xla":
                return {"out": sinkhorn_ref(state["out"], **options)}
            return {"out": sinkhorn_kernel(state["out"], **options, interpret=implementation == "interpret")}

        return call

    def error(data, first, last):
        return relative(first["out"], sinkhorn_ref(data["logits"], **options))

    return Case(make, step, error, 1e-5, SMALL_SETS)


def plan(shape: str, misses: int, small: bool) -> Case:
    """Events of one layer with K slots of whose K experts `misses` are new; those needed longest ago leave."""
    experts = experts_of(shape, "bf16", small)
    L, E, K = experts.L, experts.E, experts.K
    misses = min(misses, K)
    sets = E // misses if misses else SMALL_SETS
    control = np.full(L + 2, K, np.int32)
    control[L:] = 0, 1  # scope: layer; needed experts are admitted
    names = ("slot_of", "owner", "counters", "resident")

    def make():
        ids = (np.arange(sets)[:, None] * misses + np.arange(K)) % E
        priority = np.zeros((sets, L * E), np.float32)
        priority[:, :E] = -((ids[:, -1:] - np.arange(E)) % E)
        slot_of, owner = np.full(L * E, -1, np.int32), np.full(L * E // 4 + K, -1, np.int32)
        slot_of[ids[-1]], owner[:K] = np.arange(K), ids[-1]  # as the last event leaves it
        state = slot_of, owner, np.zeros(4 * L, np.int32), np.full(1, K, np.int32)
        data = {"ids": list(jnp.asarray(ids, jnp.int32)), "priority": list(jnp.asarray(priority))}
        return data, dict(zip(names, map(jnp.asarray, state), strict=True))

    def rule(data, state, j):
        need = jnp.zeros((E,), bool).at[data["ids"][j]].set(True)
        event = plan_event(
            jnp, need=need, slot_of=state["slot_of"].reshape(L, E), owner=state["owner"], layer=0, capacity=K,
            global_scope=False, forced_admit=True, t=0,
            priority=lambda layer, expert, t: data["priority"][j][layer * E + expert],
        )  # fmt: skip
        slot_of, owner = apply(jnp, event, state["slot_of"].reshape(L, E), state["owner"])
        counts = [jnp.sum(event.hit), jnp.sum(event.miss), jnp.sum(event.bypass), event.n_evicted]
        counters = state["counters"].at[:4].add(jnp.stack(counts).astype(jnp.int32))
        return state | {"slot_of": slot_of.reshape(-1), "owner": owner, "counters": counters}

    def step(implementation):
        def call(data, state, j):
            live, old = jnp.ones((K,), jnp.int32), [state[name] for name in names]
            operands = data["ids"][j], live, jnp.asarray(control), data["priority"][j], *old
            _, new, _ = slot_plan(*operands, layer=0, interpret=implementation == "interpret")
            return dict(zip(names, new, strict=True))

        return rule if implementation == "xla" else call

    def error(data, first, last):
        want = rule(data, make()[1], 0)
        # The last event needed the same experts: all of them, and no others, have slots again.
        held = ((state["slot_of"] >= 0).astype(jnp.int32) for state in (last, want))
        return unequal(*((first[name], want[name]) for name in names), tuple(held))

    return Case(make, step, error, 0.0, sets)


@dataclass(frozen=True)
class Entry:
    """A line of the benchmark by name; `build` makes its `Case` (of some kernels also with other tiles)."""

    op: str
    shape: str
    format: str
    size: str
    build: Callable[..., Case]

    @property
    def name(self) -> str:
        return " ".join((self.op, self.shape, self.format, self.size))


def entries(batches: tuple[int, ...], small: bool) -> list[Entry]:
    """All lines, those of one token first. `small`: shapes that any machine runs."""
    by_format = [(shape, form) for shape, forms in EXPERTS.items() for form in forms]
    host = [(shape, form) for shape, form in by_format if shape in DEPOSIT]

    def entry(op, shape, form, size, function, *arguments):
        return Entry(op, shape, form, size, functools.partial(function, shape, *arguments, small=small))

    def decode_at(batch):
        return [entry("expert_ffn", *at, f"B{batch}", expert_ffn, at[1], batch) for at in by_format]

    found = decode_at(batches[0])
    for line in row_lines(small):
        found.append(entry("row_linear", *line, row_linear, line[2]))
    for line in head_lines(small):
        found.append(entry("turn_heads", *line, heads))
    for batch, context in CONTEXTS:
        size = f"B{batch} S{context}"
        found += [entry("paged_attention", shape, "bf16", size, attention, batch, context) for shape in ATTENTION]
    found += [entry("expert_ffn_deposit", *at, "B1", expert_ffn_deposit, at[1]) for at in host]
    found += [entry("fetch_rows", *at, "B1", fetch, at[1]) for at in host]
    found += [entry("expert_ffn_staged", *at, "B1", staged, at[1]) for at in host]
    for at in by_format:
        if at[0] in PREFILL:
            found.append(entry("expert_ffn_prefill", *at, f"T{PREFILL_TOKENS}", expert_ffn_prefill, at[1]))
    for misses in (0, 4):
        found.append(entry("slot_plan", "qwen3-30b-a3b", "i32", f"miss{misses}", plan, misses))
    for tokens in (1, 4096):
        found.append(entry("router_topk", "qwen3-30b-a3b", "f32", f"T{tokens}", topk, tokens))
        experts = experts_of("qwen3-30b-a3b", "bf16", small)
        choose = functools.partial(routing, "qwen3-30b-a3b", experts.E, experts.K, tokens)
        found.append(Entry("route", "qwen3-30b-a3b", "bf16", f"T{tokens}", choose))
        matrices = functools.partial(doubly_stochastic, "deepseek-v4-flash", tokens)
        found.append(Entry("sinkhorn", "deepseek-v4-flash", "f32", f"T{tokens}", matrices))
    for batch in batches[1:]:
        found += decode_at(batch)
    for rows in (*batches, PREFILL_TOKENS):
        found += [entry("dequant_gemm", *line, dequant_gemm, *line[1:]) for line in gemm_lines(rows, small)]
    return found
