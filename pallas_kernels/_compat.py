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
from jax._src import core
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax._src.lib.triton import dialect as triton_dialect
from jax._src.pallas import core as pallas_core
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax._src.pallas.triton import lowering as triton_lowering
    from jax.experimental.pallas import triton as pltriton

warnings.filterwarnings("ignore", message=".*Pallas.*Triton.*", category=DeprecationWarning)

__all__ = [
    "call",
    "cdiv",
    "default_implementation",
    "divisor_block",
    "exp2",
    "fma",
    "kernels_run_compiled",
    "load",
    "next_power_of_2",
    "pl",
    "pltriton",
    "shared_memory",
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
    return _instruction("fma.rn.f32 $0, $1, $2, $3;", *(jnp.broadcast_to(value, shape) for value in (a, b, c)))


def exp2(x: jax.Array) -> jax.Array:
    """2**x of a float32 array within a kernel.

    Compiled it is one instruction in place of five or more: within 2**-22 of the result, subnormal results are 0 (PTX
    ISA, ex2.approx.ftz.f32).
    """
    return jnp.exp2(x) if _interpreted.get() else _instruction("ex2.approx.ftz.f32 $0, $1;", x)


def _instruction(asm, *args):
    (out,) = pltriton.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=f", *("f" for _ in args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, jnp.float32)],
    )
    return out


@functools.cache
def shared_memory() -> int:
    """Bytes of shared memory that a program may have on the default card (CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability"); those of an H200 where there is none."""
    capability = str(getattr(jax.devices()[0], "compute_capability", "9.0"))
    kibibytes = {"7.0": 96, "7.5": 64, "8.0": 163, "8.7": 163, "8.6": 99, "8.9": 99, "12.0": 99, "12.1": 99}
    return kibibytes.get(capability, 227) << 10


@functools.cache
def launches_early() -> bool:
    """True when the card can launch a kernel while the one before it runs (compute capability 9.0 and later)."""
    return kernels_run_compiled() and float(getattr(jax.devices()[0], "compute_capability", 0)) >= 9.0


class _LaunchEffect(core.Effect):
    """Keeps an equation without results in the kernel."""


_launch_effect = _LaunchEffect()
pallas_core.kernel_local_effects.add_type(_LaunchEffect)
_launch_dependents = core.Primitive("launch_dependents")
_launch_dependents.multiple_results = True


@_launch_dependents.def_effectful_abstract_eval
def _launch_dependents_type():
    return (), {_launch_effect}


@triton_lowering.register_lowering(_launch_dependents)
def _lower_launch_dependents(context):
    del context
    i32 = ir.IntegerType.get_signless(32)
    triton_dialect.elementwise_inline_asm(
        [i32],
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        constraints="=r,r",
        pure=False,
        packed_element=1,
        args=[arith.constant(i32, ir.IntegerAttr.get(i32, 0))],
    )
    return []


def call(
    kernel,
    *,
    grid,
    out_shape,
    num_warps,
    num_stages,
    name,
    input_output_aliases=None,
    feeds_kernels=False,
    interpret=False,
):
    """`pl.pallas_call` with every operand in place (no block specs) and explicit Triton parameters.

    feeds_kernels: what reads the results, before anything that was computed from them by kernels of this package, are
    such kernels. The next launch then happens while this kernel runs ("programmatic dependent launch", where
    `launches_early`). XLA lets every kernel begin by waiting until those before it are done and what they wrote is
    visible. But its own kernels read with loads that a compiler may move to before that wait, so a kernel whose results
    they read next must not call for them early.
    """

    @functools.wraps(kernel)
    def body(*refs):
        with _traced_for(interpret):
            if feeds_kernels and not interpret and launches_early():
                _launch_dependents.bind()
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
