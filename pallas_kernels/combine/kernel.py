"""Program (b, c) sums a block of columns of row b: small programs, for what takes time is to wait for the memory twice,
first for the entries and then for the outputs they name."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._compat import call, cdiv, fma, load, next_power_of_2, pl, store

# Columns of a program: 16 bytes of each expert's output a thread of a single warp.
COLUMNS = 128


def _kernel(y_ref, weights_ref, live_ref, *refs, k, width, block, named, residual):
    *refs, out_ref = refs
    entry_ref = refs.pop(0) if named else None
    residual_ref = refs.pop(0) if residual else None
    b = pl.program_id(0)
    columns = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)
    mask = {} if width % block == 0 else dict(mask=columns < width)
    other = {} if width % block == 0 else dict(other=0.0)
    before = None if residual_ref is None else load(residual_ref.at[b, columns], **mask, **other)
    live = live_ref[b] != 0
    entries = [entry_ref[b, i] if named else i for i in range(k)]
    weights = [weights_ref[b, i].astype(jnp.float32) for i in range(k)]
    parts = [load(y_ref.at[entry, b, columns], **mask, **other) for entry in entries]
    out = jnp.zeros((block,), jnp.float32)
    for weight, part in zip(weights, parts, strict=True):
        out = fma(weight, part, out)
    out = jnp.where(live, out, 0.0)
    if before is not None:
        out = before.astype(jnp.float32) + out.astype(before.dtype).astype(jnp.float32)
    store(out_ref.at[b, columns], out.astype(out_ref.dtype), **mask)


@functools.partial(jax.jit, static_argnames=("feeds_kernels", "interpret"))
def combine(y, entry, weights, live, residual=None, *, feeds_kernels=False, interpret=False):
    """See `pallas_kernels.combine.combine`."""
    _, batch, width = y.shape
    given = dict(named=entry is not None, residual=residual is not None)
    block = min(COLUMNS, next_power_of_2(width))
    return call(
        functools.partial(_kernel, k=weights.shape[1], width=width, block=block, **given),
        grid=(batch, cdiv(width, block)),
        out_shape=jax.ShapeDtypeStruct((batch, width), jnp.float32 if residual is None else residual.dtype),
        num_warps=1,
        num_stages=1,
        name="combine",
        feeds_kernels=feeds_kernels,
        interpret=interpret,
    )(y, weights, live.astype(jnp.int32), *(operand for operand in (entry, residual) if operand is not None))
