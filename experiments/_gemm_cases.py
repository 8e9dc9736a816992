"""The lines of `dequant_gemm`: dense matrices of released models in their packed formats.

Each set has weights of its own, in arrays of their own: slices of one array would be copied first. x is that of the
call before plus nothing; the addition is part of the pass that brings x into the order of the kernel's tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
from _case import Case, fill, relative, sets_for

from pallas_kernels.dequant_gemm import kernel, ref
from pallas_kernels.dequant_gemm.arg_specs import ARG_SPECS, ArgSpec
from pallas_kernels.formats import FP8, INT4, Dense, Format


def label(form: Format) -> str:
    """Short name of a format: bf16, fp8, mxfp4, int4 with z for zero points, o for an order, its group if not 128."""
    if not isinstance(form, INT4):
        return "bf16" if isinstance(form, Dense) else form.name
    return "int4" + "z" * form.zeros + "o" * form.order + (f"g{form.group}" if form.group != 128 else "")


def gemm_lines(rows: int, small: bool) -> list[tuple[str, str, str]]:
    """(model, format, size) of all lines for `rows` rows of x; `small`: one of each format."""
    found = {}
    for spec in ARG_SPECS:
        line = spec.model, label(spec.form), f"{spec.matrix} M{rows}"
        found.setdefault(line[1] if small else line, line)
    return list(found.values())


def gemm_of(shape: str, form: str, size: str, small: bool) -> tuple[ArgSpec, int]:
    """The matrix of a line and its rows of x; `small`: sizes for any machine."""
    matrix, rows = size.split(" M")
    (spec,) = (s for s in ARG_SPECS if (s.model, s.matrix, label(s.form)) == (shape, matrix, form))
    return (spec._replace(N=96, D=256), min(int(rows), 24)) if small else (spec, int(rows))


def dequant_gemm(shape: str, form: str, size: str, small: bool, tiles=None) -> Case:
    """One product a call: bounded by the bytes of the weights up to 64 rows, by matrix products above."""
    (_, _, N, D, stored), M = gemm_of(shape, form, size, small)
    tensors = {s: (dims, dtype or jnp.dtype(jnp.bfloat16)) for s, (dims, dtype) in stored.row_tensors((N,), D).items()}
    nbytes = sum(int(np.prod(dims)) * dtype.itemsize for dims, dtype in tensors.values())
    sets = sets_for(nbytes, small)

    def make():
        def one(j):
            key = jax.random.fold_in(jax.random.key(0), j)
            return {s: fill(jax.random.fold_in(key, i), stored, s, *t) for i, (s, t) in enumerate(tensors.items())}

        every = jax.lax.map(one, jnp.arange(sets))
        weights = [jax.tree.map(lambda part, j=j: part[j], every) for j in range(sets)]
        x = jax.random.normal(jax.random.key(1), (M, D), jnp.bfloat16)
        return {"x": x, "weights": weights}, {"out": jnp.zeros((M, N), jnp.bfloat16)}

    def run(implementation, x, parts):
        if implementation == "xla":
            return ref.dequant_gemm(x, parts, stored, None, x.dtype)
        return kernel.dequant_gemm(
            x, parts, stored, None, x.dtype, tiles=tiles, interpret=implementation == "interpret"
        )

    def step(implementation):
        def call(data, state, j):
            # Weights that depend on the call before cannot be decoded once for all calls, outside of the loop.
            at, parts = jax.lax.optimization_barrier((state["out"][0, 0], data["weights"][j]))
            return {"out": run(implementation, data["x"] + jnp.where(at != at, at, 0), parts)}

        return call

    def error(data, first, last):
        return relative(last["out"], run("xla", data["x"].astype(jnp.float32), data["weights"][0]))

    if M > 64:
        return Case(make, step, error, 0.01, sets, flops=2 * M * N * D)
    aim = (0.85 if isinstance(stored, Dense | FP8) else 0.65) if M == 1 else None
    return Case(make, step, error, 0.01, sets, moved=nbytes, memory="hbm", aim=aim, starts=1)
