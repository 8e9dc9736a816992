"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): linear attention whose state is corrected rather than added to.

A sequence keeps one matrix [K, V] a value head, and the last inputs of a short convolution, in place of keys and
values. Shape letters here: G key heads, R value heads a key head, K and V widths of a key and a value head, c tokens a
chunk, n chunks, Kc taps of the convolution. The state's arithmetic is float32 whatever the compute dtype is.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from moe_jax.engine.kv_cache import LayerCache, PagedKV, StateTensor
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.causal_conv import causal_conv
from moe_jax.layers.linear import Linear, matmul_precision
from moe_jax.layers.norm import Normed, RMSNorm

CHUNK = 64  # tokens that one triangular system holds; the length the authors' kernels use

# Largest array [B, tokens, G R, K + V] of a prefill, in elements: 128 MiB of float32. A few of this size live at once.
MAX_ELEMENTS = 1 << 25

F32 = matmul_precision(jnp.float32)


def delta_net_cache(channels: int, taps: int, value_heads: int, key_dim: int, value_dim: int) -> LayerCache:
    """What a layer keeps of a sequence: inputs of the convolution [Kc - 1, channels] and the state [G R, K, V], f32."""
    state = StateTensor((value_heads, key_dim, value_dim), jnp.float32)
    return LayerCache(states={"conv": StateTensor((taps - 1, channels)), "delta": state})


def l2_normalized(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis; float32 [..., K]."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def delta_rule_step(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """One token of `gated_delta_rule`: q, k [B, G, K]; v [B, G R, V]; log_decay, beta [B, G R]; state [B, G R, K, V].

    Returns (o [B, G R, V], the state after the token). With S' = e^g S the output S_t^T q is S'^T q + (k . q) delta, so
    the old state is read for both products at once, as reductions: a matrix product of one row reads more slowly.
    """
    # Small vectors are repeated so that the state keeps its shape, and all its reads come before its one update: XLA
    # then updates it in place. Otherwise it copies the state every step (seen in the optimised HLO).
    q, k = (jnp.repeat(a, v.shape[1] // a.shape[1], axis=1) for a in (q, k))  # [B, G R, K]
    decay = jnp.exp(log_decay)[..., None]
    known, read = jnp.sum(state * k[..., None], axis=-2), jnp.sum(state * q[..., None], axis=-2)  # [B, G R, V]
    known, read, state = lax.optimization_barrier((known, read, state))
    delta = beta[..., None] * (v - decay * known)
    o = decay * read + jnp.sum(q * k, axis=-1, keepdims=True) * delta
    return o, decay[..., None] * state + k[..., None] * delta[:, :, None, :]


def _in_chunks(a: Array, length: int) -> Array:
    """[B, T, ...] as [B, n, length, ...], with zeros after the end."""
    B, T = a.shape[:2]
    count = -(-T // length)
    a = jnp.pad(a, ((0, 0), (0, count * length - T), *[(0, 0)] * (a.ndim - 2)))
    return a.reshape(B, count, length, *a.shape[2:])


def _chunked(q, k, v, log_decay, beta, state, chunk: int) -> tuple[Array, Array]:
    """`gated_delta_rule` over tokens that fit in memory: all chunks' systems at once, then a scan over the chunks.

    Within a chunk that starts at state S, with b_i the sum of log decays up to token i, the corrections d_i solve
    d_i + beta_i sum_(j<i) e^(b_i - b_j) (k_i . k_j) d_j = beta_i (v_i - e^(b_i) S^T k_i), a unit triangular system
    whose matrix does not depend on S. It is solved for both terms of the right side: d = u - w S.
    """
    (B, T, G, K), (heads, V) = q.shape, v.shape[2:]
    q, k = (_in_chunks(a, chunk) for a in (q, k))  # [B, n, c, G, K]
    n = q.shape[1]
    v = _in_chunks(v, chunk).reshape(B, n, chunk, G, -1, V).transpose(0, 1, 3, 4, 2, 5)  # [B, n, G, R, c, V]
    log_decay, beta = (
        _in_chunks(a, chunk).reshape(B, n, chunk, G, -1).transpose(0, 1, 3, 4, 2) for a in (log_decay, beta)
    )  # [B, n, G, R, c]

    total = jnp.cumsum(log_decay, axis=-1)
    earlier = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Masked before the exponential: a later token's sum minus an earlier one's may be too large for it.
    decay = jnp.exp(jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf))  # [B, n, G, R, c, c]
    products = jnp.einsum("bnigk,bnjgk->bngij", k, k, precision=F32)[:, :, :, None]
    reads = jnp.einsum("bnigk,bnjgk->bngij", q, k, precision=F32)[:, :, :, None] * decay
    keys = k.transpose(0, 1, 3, 2, 4)[:, :, :, None]  # [B, n, G, 1, c, K]
    right = jnp.concatenate([v, jnp.exp(total)[..., None] * keys], axis=-1) * beta[..., None]
    solved = lax.linalg.triangular_solve(
        beta[..., None] * products * decay, right, left_side=True, lower=True, unit_diagonal=True
    )
    u, w = jnp.split(solved, (V,), axis=-1)  # [B, n, G, R, c, V], [B, n, G, R, c, K]

    def advance(S, part):
        q, k, u, w, reads, total = part
        delta = u - jnp.einsum("bgrik,bgrkv->bgriv", w, S, precision=F32)
        o = jnp.einsum("bigk,bgrkv->bgriv", q, S, precision=F32) * jnp.exp(total)[..., None]
        o = o + jnp.einsum("bgrij,bgrjv->bgriv", reads, delta, precision=F32)
        last = total[..., -1:]
        S = jnp.exp(last)[..., None] * S
        S = S + jnp.einsum("bigk,bgriv->bgrkv", k, jnp.exp(last - total)[..., None] * delta, precision=F32)
        return S, o

    parts = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, u, w, reads, total))
    S, o = lax.scan(advance, state.reshape(B, G, -1, K, V), parts)  # o [n, B, G, R, c, V]
    o = o.transpose(1, 0, 4, 2, 3, 5).reshape(B, n * chunk, heads, V)[:, :T]
    return o, S.reshape(state.shape)


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    state: Array,
    *,
    chunk: int = CHUNK,
    max_elements: int = MAX_ELEMENTS,
) -> tuple[Array, Array]:
    """S' = e^(g_t) S_(t-1), S_t = S' + beta_t k_t (v_t - S'^T k_t)^T and o_t = S_t^T q_t, all float32.

    Formula: Yang et al. 2024, "Gated Delta Networks", equation 10; several tokens in the chunked form of its section
    3.3. Value heads r R to r R + R - 1 share key head r. A token with g = 0 and beta = 0 leaves the state as it is.

    Args:
        q, k: [B, T, G, K], scaled and normalised as the model wants; v: [B, T, G R, V].
        log_decay: g, at most zero, [B, T, G R]; beta: [B, T, G R]; state: S_0, [B, G R, K, V].
        chunk: tokens a triangular system.
        max_elements: B * tokens * G R * (K + V) that are worked on at once (at least one chunk).

    Returns:
        (o [B, T, G R, V], the state after the last token).
    """
    (B, T, _, K), (heads, V) = q.shape, v.shape[2:]
    if T == 1:
        o, state = delta_rule_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], state)
        return o[:, None], state
    chunk = min(chunk, T)
    piece = max(1, max_elements // (B * chunk * heads * (K + V))) * chunk
    arrays = (q, k, v, log_decay, beta)
    if T <= piece:
        return _chunked(*arrays, state, chunk)

    def advance(S, part):
        o, S = _chunked(*part, S, chunk)
        return S, o

    state, o = lax.scan(advance, state, tuple(jnp.moveaxis(_in_chunks(a, piece), 1, 0) for a in arrays))
    return jnp.moveaxis(o, 0, 1).reshape(B, -1, heads, V)[:, :T], state


class GatedDeltaNet(nnx.Module):
    """One block: convolved q, k and v go through `gated_delta_rule`; its normed output is gated and projected back.

    `in_proj` holds the rows of q, k, v (what is convolved), of the output gate z [G R V], of beta's logits b [G R] and
    of the decay's logits a [G R]: beta = sigmoid(b), g = -exp(A_log) softplus(a + dt_bias). Queries and keys have unit
    length before queries are scaled by K^-1/2. `A_log` and `dt_bias` are float32 whatever the compute dtype is.

    Args:
        features: D; key_heads: G; value_heads: G R, a multiple of G; key_dim: K; value_dim: V; taps: Kc.
        layer: number of the layer in the cache.
    """

    def __init__(
        self,
        features: int,
        dtype,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        eps: float,
        layer: int,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.key_width, self.value_width = key_heads * key_dim, value_heads * value_dim
        channels = 2 * self.key_width + self.value_width
        self.in_proj = Linear(features, channels + self.value_width + 2 * value_heads, dtype, std=std, rngs=rngs)
        self.conv_weight = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (channels, 1, taps), dtype))
        self.A_log = nnx.Param(jnp.log(jnp.linspace(1.0, 16.0, value_heads)))
        self.dt_bias = nnx.Param(jnp.ones((value_heads,), jnp.float32))
        self.norm = RMSNorm(value_dim, dtype, eps=eps)
        self.out = Linear(self.value_width, features, dtype, std=std, rngs=rngs)
        self.key_heads, self.value_heads = key_heads, value_heads
        self.layer = layer

    def __call__(
        self, x: Array | Normed, kv: PagedKV, call: AttentionCall, *, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """x [B, T, D] -> (output [B, T, D], plus `residual` if any; kv with the states after the live tokens)."""
        B, T, _ = x.shape
        states, live = kv.states[self.layer], call.live[:, :, None]
        with jax.named_scope("delta_conv"):
            channels = 2 * self.key_width + self.value_width
            ends = (channels, channels + self.value_width, channels + self.value_width + self.value_heads)
            qkv, z, b, a = jnp.split(self.in_proj(x), ends, axis=-1)
            qkv, conv = causal_conv(qkv, call.live, self.conv_weight[...][:, 0], None, states["conv"])
            qkv = jax.nn.silu(qkv).astype(x.dtype).astype(jnp.float32)
        with jax.named_scope("delta_rule"):
            q, k, v = jnp.split(qkv, (self.key_width, 2 * self.key_width), axis=-1)
            q, k = (l2_normalized(half.reshape(B, T, self.key_heads, -1)) for half in (q, k))
            v = v.reshape(B, T, self.value_heads, -1)
            beta = jnp.where(live, jax.nn.sigmoid(b.astype(jnp.float32)), 0.0)
            step = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...])
            log_decay = jnp.where(live, -jnp.exp(self.A_log[...]) * step, 0.0)
            o, delta = gated_delta_rule(q * q.shape[-1] ** -0.5, k, v, log_decay, beta, states["delta"])
        with jax.named_scope("delta_out"):
            o = self.norm(o.astype(x.dtype)) * jax.nn.silu(z.astype(jnp.float32).reshape(o.shape))
            out = self.out(o.astype(x.dtype).reshape(B, T, self.value_width), residual=residual)
            return out, kv.with_states(self.layer, {"conv": conv, "delta": delta})
