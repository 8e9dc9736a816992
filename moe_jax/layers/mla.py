"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

A token leaves one latent [R] and one rotary key [Hr] in the cache, shared by all N heads; keys and values of a head are
linear in the latent: k_n = [U_n c, k_rope], v_n = V_n c. Prefill expands them; decode moves U_n to the query and V_n
behind the sum over tokens ("absorbed"), so that it reads latents only: R + Hr numbers a token in place of N (H + Hv).
"""

from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.engine.kv_cache import LayerCache, PagedKV
from moe_jax.layers.attention import (
    KERNELS,
    AttentionCall,
    Implementation,
    blocked_attention,
    fresh_attention,
    one_token,
)
from moe_jax.layers.linear import Linear, contract
from moe_jax.layers.norm import Normed, RMSNorm
from moe_jax.layers.rope import apply_rope, apply_rope_pairs
from pallas_kernels.paged_attention import paged_decode_attention

# The norms inside MLA take transformers' default, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6


def mla_cache(latent_dim: int, rope_dim: int) -> LayerCache:
    """What an MLA layer keeps of a token: the normalised latent [R] and the rotated key [Hr]."""
    return LayerCache(paged={"latent": (latent_dim,), "k_rope": (rope_dim,)})


def latent_attention(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    positions: Array,
    lengths: Array,
    *,
    scale: float,
) -> Array:
    """Causal attention in the space of latents: softmax(scale (q_latent c^T + q_rope k_rope^T)) c.

    Args:
        q_latent: [B, T, N, R] queries times U_n; q_rope: [B, T, N, Hr] rotated.
        latent: [B, S, R] and k_rope: [B, S, Hr] in sequence order; finite where stored.
        positions: [B, T] int32; lengths: [B] int32, tokens stored.

    Returns:
        [B, T, N, R] in q_latent's dtype; rows of dead tokens are meaningless but finite.
    """
    key_positions = jnp.arange(latent.shape[1], dtype=jnp.int32)
    stored = key_positions < lengths[:, None]  # [B, S]
    # Pages are recycled: 0 * NaN left behind by another sequence must not reach this one.
    latent = jnp.where(stored[:, :, None], latent, 0).astype(latent.dtype)
    scores = contract("btnr,bsr->bnts", q_latent, latent)
    scores += contract("btnh,bsh->bnts", q_rope, k_rope)
    visible = (key_positions <= positions[:, :, None]) & stored[:, None, :]  # [B, T, S]
    scores = jnp.where(visible[:, None], scores * scale, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q_latent.dtype)
    out = contract("bnts,bsr->btnr", weights, latent)
    return out.astype(q_latent.dtype)


class LatentAttention(nnx.Module):
    """Projections, rope, cache write and attention of one MLA layer.

    Args:
        features: D; num_heads: N.
        q_rank: width of the compressed query, or None for a full query projection.
        latent_dim: R; nope_dim, rope_dim: width of a head's query and key without and with rotation; v_dim: Hv.
        pairs: rope turns components 2i and 2i + 1 together (else i and i + H/2).
        score_factor: factor on the scores beside (nope_dim + rope_dim) ** -0.5.
        layer: number of the layer in the cache.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        dtype,
        *,
        q_rank: int | None,
        latent_dim: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        pairs: bool,
        score_factor: float,
        layer: int,
        std: float,
        rngs: nnx.Rngs,
    ):
        q_dim = num_heads * (nope_dim + rope_dim)
        self.q_width = q_rank or q_dim
        # One weight for everything that reads x: query (or its compression), latent, rotary key.
        self.qkv = Linear(features, self.q_width + latent_dim + rope_dim, dtype, std=std, rngs=rngs)
        self.q_norm = None if q_rank is None else RMSNorm(q_rank, dtype, eps=LATENT_NORM_EPS)
        self.q_up = None if q_rank is None else Linear(q_rank, q_dim, dtype, std=std, rngs=rngs)
        self.latent_norm = RMSNorm(latent_dim, dtype, eps=LATENT_NORM_EPS)
        self.kv_up = Linear(latent_dim, num_heads * (nope_dim + v_dim), dtype, packs=False, std=std, rngs=rngs)
        self.out = Linear(num_heads * v_dim, features, dtype, std=std, rngs=rngs)
        self.num_heads = num_heads
        self.latent_dim, self.nope_dim, self.rope_dim, self.v_dim = latent_dim, nope_dim, rope_dim, v_dim
        self.pairs = pairs
        self.scale = (nope_dim + rope_dim) ** -0.5 * score_factor
        self.layer = layer

    def _project(self, x: Array | Normed, call: AttentionCall) -> tuple[Array, Array, Array, Array]:
        """x [B, T, D] -> q_nope [B, T, N, H], q_rope [B, T, N, Hr], latent [B, T, R], k_rope [B, T, Hr]."""
        B, T, _ = x.shape
        q, latent, k_rope = jnp.split(self.qkv(x), (self.q_width, self.q_width + self.latent_dim), axis=-1)
        if self.q_up is not None:
            q = self.q_up(Normed(q, self.q_norm))
        q = q.reshape(B, T, self.num_heads, self.nope_dim + self.rope_dim)
        q_nope, q_rope = jnp.split(q, (self.nope_dim,), axis=-1)
        turn = apply_rope_pairs if self.pairs else apply_rope
        k_rope = turn(k_rope[:, :, None], call.cos, call.sin)[:, :, 0]
        return q_nope, turn(q_rope, call.cos, call.sin), self.latent_norm(latent), k_rope

    def _expand(self, latent: Array, k_rope: Array) -> tuple[Array, Array]:
        """Keys [B, S, N, H + Hr] and values [B, S, N, Hv] of latent [B, S, R] and k_rope [B, S, Hr]."""
        B, S, _ = latent.shape
        N = self.num_heads
        heads = self.kv_up(latent).reshape(B, S, N, self.nope_dim + self.v_dim)
        k_nope, values = jnp.split(heads, (self.nope_dim,), axis=-1)
        shared = jnp.broadcast_to(k_rope[:, :, None], (B, S, N, self.rope_dim))
        return jnp.concatenate([k_nope, shared], axis=-1), values

    def _absorbed(self, q_nope: Array, q_rope: Array, kv: PagedKV, call: AttentionCall) -> Array:
        """Attention over the latents in the cache: [B, T, N, Hv]."""
        up = self.kv_up.weight[...].reshape(self.num_heads, self.nope_dim + self.v_dim, self.latent_dim)
        to_key, to_value = jnp.split(up, (self.nope_dim,), axis=1)
        q_latent = contract("btnh,nhr->btnr", q_nope, to_key).astype(q_nope.dtype)
        if call.implementation in KERNELS:
            pools = kv.pages[self.layer]
            latents, rotary = (pools[name][:, :, None] for name in ("latent", "k_rope"))  # one key head
            out = paged_decode_attention(
                (one_token(q_latent), one_token(q_rope)),
                (latents, rotary),
                latents,
                kv.page_table,
                kv.lengths,
                scale=self.scale,
                implementation=call.implementation,
            )[:, None]
        else:
            latent, k_rope = kv.gather(self.layer, "latent"), kv.gather(self.layer, "k_rope")
            out = latent_attention(q_latent, q_rope, latent, k_rope, call.positions, kv.lengths, scale=self.scale)
        return contract("btnr,nvr->btnv", out, to_value).astype(q_nope.dtype)

    def _expanded(self, q: Array, kv: PagedKV, call: AttentionCall) -> Array:
        """Attention over keys and values made from the latents in the cache: q [B, T, N, H + Hr] -> [B, T, N, Hv]."""
        latent, k_rope = kv.gather(self.layer, "latent"), kv.gather(self.layer, "k_rope")
        B, S, _ = latent.shape
        key_positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        stored = key_positions < kv.lengths[:, None]
        latent = jnp.where(stored[:, :, None], latent, 0).astype(q.dtype)
        keys, values = self._expand(latent, k_rope.astype(q.dtype))
        return blocked_attention(q, keys, values, call.positions, key_positions, stored, window=None, scale=self.scale)

    def _fresh(self, q: Array, latent: Array, k_rope: Array, live: Array) -> Array:
        """Attention of a chunk from position 0 to itself through cuDNN, which wants keys and values of one width."""
        keys, values = self._expand(latent, k_rope)
        width = max(q.shape[-1], self.v_dim)
        q, keys, values = (jnp.pad(a, ((0, 0),) * 3 + ((0, width - a.shape[-1]),)) for a in (q, keys, values))
        out = fresh_attention(q, keys, values, live, window=None, scale=self.scale, implementation="cudnn")
        return out[..., : self.v_dim]

    def __call__(
        self, x: Array | Normed, kv: PagedKV, call: AttentionCall, *, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """x [B, T, D] -> (output [B, T, D], plus `residual` if any; kv with this layer's new latents written)."""
        B, T, _ = x.shape
        with jax.named_scope("qkv"):
            q_nope, q_rope, latent, k_rope = self._project(x, call)
        with jax.named_scope("kv_write"):
            kv = kv.write(self.layer, {"latent": latent, "k_rope": k_rope}, call.positions, call.live)
            kv = kv.settled(self.layer)
        with jax.named_scope("attention"):
            if call.implementation not in get_args(Implementation):
                raise ValueError(
                    f"attention implementation {call.implementation!r}: must be one of {get_args(Implementation)}"
                )
            if T == 1 or call.implementation in KERNELS:
                out = self._absorbed(q_nope, q_rope, kv, call)
            else:
                q = jnp.concatenate([q_nope, q_rope], axis=-1)
                if call.implementation == "cudnn":
                    out = self._fresh(q, latent, k_rope, call.live)
                else:
                    out = self._expanded(q, kv, call)
        with jax.named_scope("attention_out"):
            return self.out(out.reshape(B, T, self.num_heads * self.v_dim), residual=residual), kv
