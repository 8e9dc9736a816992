"""Attention of an encoder-decoder to a whole source: of the source to itself, and of the target to the source."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.layers.attention import blocked_attention
from moe_jax.layers.linear import Linear


def attend_to_all(q: Array, keys: Array, values: Array, live: Array) -> Array:
    """softmax(q k^T / sqrt(H)) v over all live keys, whatever the position.

    Args:
        q: [B, T, N, H]; keys, values: [B, S, N, H]; live: [B, S] bool.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    B, T, _, H = q.shape
    S = keys.shape[1]
    return blocked_attention(
        q,
        keys,
        values,
        jnp.full((B, T), S, jnp.int32),  # past every key
        jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S)),
        live,
        window=None,
        scale=H**-0.5,
    )


class SourceAttention(nnx.Module):
    """Multi-head attention of a source to itself in both directions; the projections have biases."""

    def __init__(self, features: int, num_heads: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.qkv = Linear(features, 3 * features, dtype, bias=True, std=std, rngs=rngs)
        self.out = Linear(features, features, dtype, bias=True, std=std, rngs=rngs)
        self.num_heads = num_heads

    def __call__(self, x: Array, live: Array) -> Array:
        """x [B, S, D], live [B, S] bool -> [B, S, D]."""
        B, S, D = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(B, S, 3 * self.num_heads, -1), 3, axis=2)
        return self.out(attend_to_all(q, k, v, live).reshape(B, S, D))


class CrossAttention(nnx.Module):
    """Multi-head attention of a target to its source, whose keys and values are made once; with biases."""

    def __init__(self, features: int, num_heads: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.q = Linear(features, features, dtype, bias=True, std=std, rngs=rngs)
        self.kv = Linear(features, 2 * features, dtype, bias=True, std=std, rngs=rngs)
        self.out = Linear(features, features, dtype, bias=True, std=std, rngs=rngs)
        self.num_heads = num_heads

    def remember(self, source: Array) -> dict[str, Array]:
        """The encoder's output [B, S, D] -> {"source_k", "source_v"}: [B, S, N, H]."""
        B, S, _ = source.shape
        k, v = jnp.split(self.kv(source).reshape(B, S, 2 * self.num_heads, -1), 2, axis=2)
        return {"source_k": k, "source_v": v}

    def __call__(self, x: Array, memory: dict[str, Array], live: Array) -> Array:
        """x [B, T, D], what `remember` gave, live [B, S] bool of the source -> [B, T, D]."""
        q = self.q(x).reshape(*x.shape[:2], self.num_heads, -1)
        return self.out(attend_to_all(q, memory["source_k"], memory["source_v"], live).reshape(x.shape))
