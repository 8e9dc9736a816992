"""The one place that imports Pallas.

The kernels are written in the Pallas-Triton dialect: it runs on every NVIDIA card and has a fast interpreter on CPU.
jax 0.11 marks the dialect deprecated and warns at each lowering; the warning is silenced here once, so that a move to
another dialect touches this file and the kernels' own files only.
"""

import contextlib
import contextvars
import functools
import warnings

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as pltriton

warnings.filterwarnings("ignore", message=".*Pallas.*Triton.*", category=DeprecationWarning)

__all__ = [
    "call",
    "cdiv",
    "default_implementation",
    "divisor_block",
    "fma",
    "kernels_run_compiled",
    "load",
    "next_power_of_2",
    "pl",
    "pltriton",
    "store",
]

cdiv = pl.cdiv
load = pltriton.load
store = pltriton.store


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n (n >= 1)."""
    return 1 << max(0, n - 1).bit_length()


def divisor_block(size: int, largest: int) -> int:
    """Largest power of two that divides `size`, at most `largest`: tile widths that need no mask."""
    return min(size & -size, largest)


@functools.cache
def kernels_run_compiled() -> bool:
    """True when the default backend compiles Pallas-Triton kernels (an NVIDIA GPU)."""
    return jax.default_backend() == "gpu"


def default_implementation() -> str:
    """What an operation runs where its caller does not say: "pallas" where kernels run compiled, else "xla"."""
    return "pallas" if kernels_run_compiled() else "xla"


_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def _traced_for(interpret: bool):
    token = _interpreted.set(interpret)
    try:
        yield
    finally:
        _interpreted.reset(token)


def fma(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """a * b + c of broadcastable float32 arrays within a kernel, rounded once where it is compiled.

    One instruction in place of two: neither Triton nor ptxas joins a product and a sum that were written apart. The
    interpreter rounds twice.
    """
    if _interpreted.get():
        return a * b + c
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    args = [jnp.broadcast_to(value, shape) for value in (a, b, c)]
    (out,) = pltriton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=args,
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return out


def call(kernel, *, grid, out_shape, num_warps, num_stages, name, input_output_aliases=None, interpret=False):
    """`pl.pallas_call` with every operand in place (no block specs) and explicit Triton parameters."""

    @functools.wraps(kernel)
    def body(*refs):
        with _traced_for(interpret):
            kernel(*refs)

    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )
