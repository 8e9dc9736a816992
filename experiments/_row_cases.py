"""The lines of a decode step's small kernels: `row_linear`, `turn_heads` and `route` at shapes of released models.

Weights of `row_linear` rotate as those of other products do. Matrices so small that `MOST_SETS` of them do not fill
`ROTATE_BYTES` may lie in a cache, so they have no bound and no aim. Each call has an operand that is made of the result
of the call before, by a kernel of a few elements that is in the time.
"""

import jax
import jax.numpy as jnp
from _case import MOST_SETS, ROTATE_BYTES, Case, relative, sets_for, unequal

from pallas_kernels.router_topk import Routing, route
from pallas_kernels.row_linear import kernel as row_kernel
from pallas_kernels.row_linear import ref as row_ref
from pallas_kernels.row_linear.arg_specs import ARG_SPECS as ROW_SPECS
from pallas_kernels.row_linear.arg_specs import ArgSpec
from pallas_kernels.row_norm import RowNorm
from pallas_kernels.turn_heads import HeadNorm, turn_heads
from pallas_kernels.turn_heads.arg_specs import ARG_SPECS as HEAD_SPECS

SMALL_SETS = 16
PAGE = 64


def after(x, result):
    """x unchanged, but made after `result`."""
    at = result.reshape(-1)[0].astype(x.dtype)
    return x + jnp.where(at != at, at, jnp.zeros_like(at))


def row_lines(small: bool) -> list[tuple[str, str, str]]:
    """(model, format, matrix) of all lines of `row_linear`; `small`: one."""
    return [(spec.model, "bf16", spec.matrix) for spec in ROW_SPECS][: 1 if small else None]


def row_of(shape: str, matrix: str, small: bool) -> ArgSpec:
    """The matrix of a line; `small`: a size for any machine."""
    (spec,) = (spec for spec in ROW_SPECS if (spec.model, spec.matrix) == (shape, matrix))
    return spec._replace(N=96, D=200) if small else spec


def row_linear(shape: str, matrix: str, small: bool, tiles=None) -> Case:
    """One row times a weight, with the norm, bias and residual that the model has there."""
    spec = row_of(shape, matrix, small)
    N, D, dtype = spec.N, spec.D, jnp.bfloat16
    n_out = N // 2 if spec.gated else N
    norm = spec.norm and RowNorm(1e-6, spec.norm)
    nbytes = 2 * N * D
    sets = sets_for(max(nbytes, -(-ROTATE_BYTES // MOST_SETS)), small)

    def make():
        def draw(seed, *dims):
            return jax.random.normal(jax.random.key(seed), dims, dtype)

        every = jax.lax.map(lambda j: draw(j, N, D) * jnp.asarray(D**-0.5, dtype), jnp.arange(sets))
        data = {"weights": [every[j] for j in range(sets)], "x": draw(1000, D)}
        data["norm_weight"] = draw(1001, D) if norm else None
        data["bias"] = draw(1002, N) if spec.bias else None
        data["residual"] = draw(1003, n_out) if spec.residual else None
        return data, {"out": jnp.zeros((n_out,), dtype)}

    def run(implementation, data, x, weight):
        operands = x, weight, norm, data["norm_weight"], data["bias"], data["residual"], spec.gated
        if implementation == "xla":
            return row_ref.row_linear(*operands)[0]
        return row_kernel.row_linear(*operands, tiles=tiles, interpret=implementation == "interpret")[0]

    def step(implementation):
        def call(data, state, j):
            return {"out": run(implementation, data, after(data["x"], state["out"]), data["weights"][j])}

        return call

    def error(data, first, last):
        return relative(last["out"], run("xla", data, data["x"], data["weights"][0]))

    if nbytes * MOST_SETS < ROTATE_BYTES:
        return Case(make, step, error, 0.02, sets)
    return Case(make, step, error, 0.02, sets, moved=nbytes, memory="hbm", aim=0.85, starts=1)


def head_lines(small: bool) -> list[tuple[str, str, str]]:
    """(model, format, size) of all lines of `turn_heads`."""
    return [(spec.model, "bf16", "B1") for spec in HEAD_SPECS][: 1 if small else None]


def heads(shape: str, small: bool) -> Case:
    """A new token of one sequence, each call at the next position of its pages."""
    (spec,) = (spec for spec in HEAD_SPECS if spec.model == shape)
    N, G, H = (4, 2, 16) if small else (spec.N, spec.G, spec.H)
    R = (16 if small else spec.rotary) // 2 if spec.rotary else 0
    norm = spec.norm and HeadNorm(RowNorm(1e-6, spec.norm), spec.over_all)

    def make():
        def draw(seed, *dims):
            return jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16)

        data = {"heads": [draw(j, 1, N * spec.step + 2 * G, H) for j in range(SMALL_SETS)]}
        data["table"] = jnp.arange(1, 3, dtype=jnp.int32)[None]
        data["cos"], data["sin"] = (draw(100, 1, R), draw(101, 1, R)) if R else (None, None)
        widths = (N * H, G * H) if spec.over_all else (H, H)
        data["weights"] = [draw(102 + i, width) if norm else None for i, width in enumerate(widths)]
        pools = {"keys": draw(200, 3, PAGE, G, H), "values": draw(201, 3, PAGE, G, H)}
        return data, {"out": jnp.zeros((1, N, H), jnp.bfloat16), **pools}

    def run(implementation, data, state, j, x):
        q, keys, values = turn_heads(
            x, state["keys"], state["values"], data["table"], jnp.full(1, j, jnp.int32), jnp.ones(1, jnp.int32),
            data["cos"], data["sin"], query_heads=N, step=spec.step, norm=norm, q_weight=data["weights"][0],
            k_weight=data["weights"][1], clip=spec.clip, implementation=implementation,
        )  # fmt: skip
        return {"out": q, "keys": keys, "values": values}

    def step(implementation):
        return lambda data, state, j: run(implementation, data, state, j, after(data["heads"][j], state["out"]))

    def error(data, first, last):
        want = run("xla", data, make()[1], 0, data["heads"][0])
        names = ("out", "keys", "values")
        return jnp.max(jnp.stack([relative(first[name], want[name]) for name in names]))

    return Case(make, step, error, 0.02, SMALL_SETS)


def routing(shape: str, experts: int, k: int, tokens: int) -> Case:
    """Logits of `tokens` tokens to experts and normalised weights."""
    how = Routing(k, norm=1, weights="bfloat16")

    def make():
        logits = list(jax.random.normal(jax.random.key(0), (SMALL_SETS, tokens, experts)).astype(jnp.bfloat16))
        out = jnp.zeros((tokens, k), jnp.int32), jnp.zeros((tokens, k), jnp.bfloat16)
        return {"logits": logits}, {"out": (*out, jnp.zeros((tokens, experts)))}

    def step(implementation):
        def call(data, state, j):
            return {"out": route(after(data["logits"][j], state["out"][2]), how, implementation=implementation)}

        return call

    def error(data, first, last):
        want = route(data["logits"][0], how, implementation="xla")
        # Scores that differ in their last bit may tie or not: a choice is right if its scores are.
        chosen = [jnp.take_along_axis(want[2], ids, axis=1) for ids in (last["out"][0], want[0])]
        distance = relative(last["out"][2], want[2]) + relative(*chosen) + relative(last["out"][1], want[1])
        return distance + unequal(
            (
                jnp.sort(last["out"][0], axis=1)[:, 1:] == jnp.sort(last["out"][0], axis=1)[:, :-1],
                jnp.zeros((tokens, k - 1), bool),
            )
        )

    return Case(make, step, error, 0.02, SMALL_SETS)
