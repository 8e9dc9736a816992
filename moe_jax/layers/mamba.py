"""The Mamba block (Gu and Dao 2023) with Jamba's norms: a causal convolution and a selective state space.

A sequence keeps the last d_conv - 1 inputs of the convolution and one state [Di, N] in place of keys and values. Shape
letters here: Di inner width, N state width, R rank of the step size, Kc taps of the convolution.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from moe_jax.engine.kv_cache import LayerCache, PagedKV, StateTensor
from moe_jax.layers.attention import AttentionCall
from moe_jax.layers.causal_conv import causal_conv
from moe_jax.layers.linear import Linear, project
from moe_jax.layers.norm import Normed, RMSNorm

# Largest array [B, chunk, Di, N] of a scan, in elements: 64 MiB of float32. It is written a few times a chunk.
MAX_SCAN = 1 << 24


def mamba_cache(inner: int, state_dim: int, taps: int) -> LayerCache:
    """What a Mamba layer keeps of a sequence: inputs of the convolution [Kc - 1, Di] and the state [Di, N], float32."""
    return LayerCache(
        states={"conv": StateTensor((taps - 1, inner)), "ssm": StateTensor((inner, state_dim), jnp.float32)}
    )


def _scan_chunk(state: Array, part: tuple[Array, Array, Array, Array], A: Array) -> tuple[Array, Array]:
    """One chunk of `selective_scan`: (state after it, y)."""
    u, dt, into, out_of = part
    decay = jnp.exp(dt[..., None] * A)  # [B, c, Di, N]
    added = (dt * u)[..., None] * into[:, :, None, :]

    def then(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    decay, added = lax.associative_scan(then, (decay, added), axis=1)
    states = decay * state[:, None] + added
    return states[:, -1], jnp.sum(states * out_of[:, :, None, :], axis=-1)


def selective_scan(
    u: Array, dt: Array, A: Array, into: Array, out_of: Array, state: Array, *, max_scan: int = MAX_SCAN
) -> tuple[Array, Array]:
    """s_t = exp(dt_t A) s_(t-1) + dt_t u_t B_t and y_t = s_t C_t, all float32 (Gu and Dao 2023, algorithm 2).

    A token with dt = 0 leaves the state as it is.

    Args:
        u, dt: [B, T, Di]; A: [Di, N]; into, out_of: B and C of the formula, [B, T, N]; state: s_0, [B, Di, N].
        max_scan: chunks keep B * chunk * Di * N at or under this (a chunk has at least one token).

    Returns:
        (y [B, T, Di], the state after the last token).
    """
    B, T, inner = u.shape
    fits = max(1, max_scan // (B * inner * A.shape[1]))
    chunk = min(T, 1 << (fits.bit_length() - 1))
    if chunk == T:
        state, y = _scan_chunk(state, (u, dt, into, out_of), A)
        return y, state
    count = -(-T // chunk)

    def cut(a):
        a = jnp.pad(a, ((0, 0), (0, count * chunk - T), (0, 0)))
        return jnp.moveaxis(a.reshape(B, count, chunk, a.shape[-1]), 1, 0)

    state, y = lax.scan(lambda s, part: _scan_chunk(s, part, A), state, tuple(map(cut, (u, dt, into, out_of))))
    return jnp.moveaxis(y, 0, 1).reshape(B, count * chunk, inner)[:, :T], state


class Mamba(nnx.Module):
    """One Mamba block: x -> (y * silu(gate)) projected back, with RMS norms of step size, B and C as in Jamba.

    `A_log`, `D` and the bias of the step size are float32 whatever the compute dtype is: the recurrence is float32.

    Args:
        features: D; inner: Di; state_dim: N; dt_rank: R; taps: Kc.
        layer: number of the layer in the cache.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        dtype,
        *,
        state_dim: int,
        dt_rank: int,
        taps: int,
        eps: float,
        layer: int,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.in_proj = Linear(features, 2 * inner, dtype, std=std, rngs=rngs)
        self.conv_weight = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (inner, 1, taps), dtype))
        self.conv_bias = nnx.Param(jnp.zeros((inner,), dtype))
        self.x_proj = Linear(inner, dt_rank + 2 * state_dim, dtype, std=std, rngs=rngs)
        self.dt_proj = Linear(dt_rank, inner, dtype, packs=False, std=std, rngs=rngs)
        self.dt_bias = nnx.Param(jnp.zeros((inner,), jnp.float32))
        self.dt_norm = RMSNorm(dt_rank, dtype, eps=eps)
        self.b_norm = RMSNorm(state_dim, dtype, eps=eps)
        self.c_norm = RMSNorm(state_dim, dtype, eps=eps)
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, state_dim + 1), (inner, 1))))
        self.D = nnx.Param(jnp.ones((inner,), jnp.float32))
        self.out = Linear(inner, features, dtype, std=std, rngs=rngs)
        self.state_dim, self.dt_rank = state_dim, dt_rank
        self.layer = layer

    def __call__(
        self, x: Array | Normed, kv: PagedKV, call: AttentionCall, *, residual: Array | None = None
    ) -> tuple[Array, PagedKV]:
        """x [B, T, D] -> (output [B, T, D], plus `residual` if any; kv with the states after the live tokens)."""
        states = kv.states[self.layer]
        with jax.named_scope("mamba_conv"):
            u, gate = jnp.split(self.in_proj(x), 2, axis=-1)  # [B, T, Di]
            u, conv = causal_conv(u, call.live, self.conv_weight[...][:, 0], self.conv_bias[...], states["conv"])
            u = jax.nn.silu(u).astype(x.dtype)
        with jax.named_scope("mamba_scan"):
            R, N = self.dt_rank, self.state_dim
            dt, into, out_of = jnp.split(self.x_proj(u), (R, R + N), axis=-1)
            dt = project(self.dt_norm(dt), self.dt_proj.weight[...]) + self.dt_bias[...]
            dt = jnp.where(call.live[:, :, None], jax.nn.softplus(dt), 0.0)
            into, out_of = self.b_norm(into).astype(jnp.float32), self.c_norm(out_of).astype(jnp.float32)
            wide = u.astype(jnp.float32)
            y, ssm = selective_scan(wide, dt, -jnp.exp(self.A_log[...]), into, out_of, states["ssm"])
            y = (y + self.D[...] * wide) * jax.nn.silu(gate.astype(jnp.float32))
        with jax.named_scope("mamba_out"):
            return self.out(y.astype(x.dtype), residual=residual), kv.with_states(
                self.layer, {"conv": conv, "ssm": ssm}
            )
