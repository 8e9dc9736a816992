"""Decode attention over pages in plain jax.numpy: the kernel's reference."""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def _in_order(pool, page_table):
    """The tokens of each sequence: [pages, P, G, H] -> [B, n * P, G, H]."""
    B, n = page_table.shape
    return pool[page_table].reshape(B, n * pool.shape[1], *pool.shape[2:])


def paged_decode_attention(queries, keys, values, page_table, lengths, sinks, *, scale, window, softcap):
    """As `pallas_kernels.paged_attention.paged_decode_attention`."""
    B, N, _ = queries[0].shape
    G = values.shape[2]
    scores = 0.0
    for q, pool in zip(queries, keys, strict=True):
        q = q.reshape(B, G, N // G, -1).astype(jnp.float32)
        scores += jnp.einsum("bgrh,bsgh->bgrs", q, _in_order(pool, page_table).astype(jnp.float32), precision=_HIGHEST)
    scores *= scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    s = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    seen = s < lengths[:, None]
    if window is not None:
        seen &= lengths[:, None] - 1 - s < window
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.reshape(G, N // G)[None, ..., None].astype(jnp.float32)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(seen[:, None, None], jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    v = jnp.where(seen[:, :, None, None], _in_order(values, page_table), 0).astype(jnp.float32)
    out = jnp.einsum("bgrs,bsgh->bgrh", weights, v, precision=_HIGHEST) / jnp.where(total > 0, total, 1)
    return out.reshape(B, N, -1).astype(queries[0].dtype)
