"""Compression of the past: every m tokens leave one entry, a softmax-weighted mean of what their tokens project to.

Entry w of a sequence covers the window of tokens w m .. w m + m - 1 and exists once the last of them is there:

    entry_w = rope(RMS(sum_j softmax_j(gate x_j + a_j) * kv x_j), position w m)

with the softmax over the tokens j of the window, for each channel by itself, and a_j learned for each place in it. With
overlap, kv and gate have two series of channels: entry w mixes the second series of window w with the first series of
window w - 1, over 2 m tokens. Source: DeepSeek-V4's report, section 2.3, equations 9 to 12 and 20 to 23.

A window may begin in one call and end in another, so a sequence keeps what its tokens project to until it is used: the
open window and, with overlap, the window before it.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.engine.kv_cache import StateTensor
from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import Float32RMSNorm
from moe_jax.layers.rope import Rope


def pending(width: int, every: int, overlap: bool) -> StateTensor:
    """State of a `Compressor`: kv and gate of the window before (with overlap), then of the open one, else zero."""
    tokens = 2 * every - 1 if overlap else every - 1
    return StateTensor((tokens, 2 * width * (1 + overlap)))


class Compressor(nnx.Module):
    """Parameters: `kv_gate.weight` [2 S W, D] (S series: 2 with overlap, else 1), `position_bias` [m, S W] float32,
    `norm.weight` [W] float32.

    Args:
        features: D; width: W, components of an entry; every: m.
        overlap: entries mix two windows.
        rope: turns the entries.
    """

    def __init__(
        self,
        features: int,
        width: int,
        dtype,
        *,
        every: int,
        overlap: bool,
        rope: Rope,
        eps: float,
        std: float,
        rngs: nnx.Rngs,
    ):
        channels = width * (1 + overlap)
        self.kv_gate = Linear(features, 2 * channels, dtype, std=std, rngs=rngs)
        self.position_bias = nnx.Param(jnp.zeros((every, channels), jnp.float32))
        self.norm = Float32RMSNorm(width, dtype, eps=eps)
        self.width, self.every, self.overlap = width, every, overlap
        self.rope = rope

    def _arrange(self, new: Array, state: Array, start: Array, count: Array) -> tuple[Array, Array]:
        """Tokens in their windows, and the state after them.

        Args:
            new: [B, T, C] projections of the new tokens; state: [B, t, C] of those before, see `pending`.
            start, count: [B] tokens before the new ones, and live new ones.

        Returns:
            (tokens [B, t + 1 + n m, C], the window before the open one first where there is overlap; state [B, t, C]).
        """
        T, kept = new.shape[1], state.shape[1]
        m = self.every
        before = kept - (m - 1)  # m with overlap, else 0
        n = (T + m - 1) // m  # windows that T tokens can end
        filled = (before + start % m)[:, None]  # [B, 1]
        place = jnp.arange(n * m + kept, dtype=jnp.int32)
        source = jnp.where(place < filled, place, jnp.minimum(place - filled, T - 1) + kept)
        tokens = jnp.concatenate([state.astype(new.dtype), new], axis=1)
        tokens = jnp.take_along_axis(tokens, source[:, :, None], axis=1)

        ended = (start % m + count) // m  # [B] windows
        place = jnp.arange(kept, dtype=jnp.int32)
        left = jnp.take_along_axis(tokens, (ended[:, None] * m + place)[:, :, None], axis=1)
        still = place < (before + (start + count) % m)[:, None]
        return tokens, jnp.where(still[:, :, None], left, 0)

    def __call__(self, x: Array, state: Array, start: Array, count: Array) -> tuple[Array, Array, Array, Array]:
        """Feeds tokens x [B, T, D]: `count` [B] live ones a row, after `start` [B] earlier ones.

        Returns:
            (entries [B, n, W], position [B, n] int32 of the first token of each, ended [B, n] bool: whether it is one
            (its window is complete), the new state).
        """
        B, m = x.shape[0], self.every
        tokens, state = self._arrange(self.kv_gate(x), state, start, count)
        n = (x.shape[1] + m - 1) // m
        before = m if self.overlap else 0

        def windows(first):
            """kv and gate [B, n, m, S W] float32 of n windows, from token `first` on."""
            part = tokens[:, first : first + n * m].astype(jnp.float32).reshape(B, n, m, -1)
            kv, gate = jnp.split(part, 2, axis=-1)
            return kv, gate + self.position_bias[...]

        index = start[:, None] // m + jnp.arange(n, dtype=jnp.int32)  # [B, n]
        kv, gate = windows(before)
        if self.overlap:
            past_kv, past_gate = windows(0)
            W = self.width
            past_gate = jnp.where((index > 0)[:, :, None, None], past_gate[..., :W], -jnp.inf)
            kv = jnp.concatenate([past_kv[..., :W], kv[..., W:]], axis=2)  # [B, n, 2 m, W]
            gate = jnp.concatenate([past_gate, gate[..., W:]], axis=2)
        entries = self.norm(jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2).astype(x.dtype))
        first = index * m
        entries = self.rope.turn(entries[:, :, None], first)[:, :, 0]
        ended = first + m <= (start + count)[:, None]
        return entries, first, ended, state
