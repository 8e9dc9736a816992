"""The Lightning Indexer: which compressed entries a query attends to.

Source: DeepSeek-V4's report, section 2.3.1, equations 13 to 17.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from moe_jax.layers.attention import MAX_SCORES
from moe_jax.layers.compressor import Compressor
from moe_jax.layers.linear import Linear, contract
from moe_jax.layers.query_blocks import by_blocks, fitting_block
from moe_jax.layers.rope import Rope


class Indexer(nnx.Module):
    """Scores of entries by small heads of their own, and the `top` best entries of each query.

    score(t, w) = sum_h (u x_t)_h I^-1/2 relu(q_th . k_w) Hi^-1/2, with I heads of width Hi; k_w are the entries of a
    compressor of width Hi over the same windows, q_t = rope(up c_t) comes from the compressed query c_t.

    Args:
        features: D; q_rank: width of c; heads: I; width: Hi; top: entries a query.
        every: tokens a window; rope: turns queries and entries.
    """

    def __init__(
        self,
        features: int,
        q_rank: int,
        heads: int,
        width: int,
        dtype,
        *,
        top: int,
        every: int,
        rope: Rope,
        eps: float,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.compressor = Compressor(
            features, width, dtype, every=every, overlap=True, rope=rope, eps=eps, std=std, rngs=rngs
        )
        self.q_up = Linear(q_rank, heads * width, dtype, std=std, rngs=rngs)
        self.weights = Linear(features, heads, dtype, std=std, rngs=rngs)
        self.heads, self.width, self.top = heads, width, top
        self.rope = rope

    def __call__(
        self, x: Array, q_low: Array, positions: Array, keys: Array, seen: Array, *, max_scores: int = MAX_SCORES
    ) -> Array:
        """The entries of the `top` largest scores for each query, among those it may see.

        Args:
            x: [B, T, D] and q_low: [B, T, q_rank] at positions [B, T].
            keys: [B, S, Hi] entries in order, finite everywhere, with S > top.
            seen: [B, T] int32, how many entries, from the first, a query may see.
            max_scores: blocks of queries keep B * queries * I * S at or under this.

        Returns:
            [B, T, top] int32; -1 where the query sees fewer entries.
        """
        B, T, _ = x.shape
        S = keys.shape[1]
        q = self.rope.turn(self.q_up(q_low).reshape(B, T, self.heads, self.width), positions)
        factors = self.weights(x).astype(jnp.float32) * (self.heads**-0.5 * self.width**-0.5)  # [B, T, I]

        def best(_, q, factors, seen):
            products = contract("bthi,bsi->btsh", q, keys)
            scores = jnp.sum(jax.nn.relu(products) * factors[:, :, None, :], axis=-1)  # [B, t, S]
            visible = jnp.arange(S, dtype=jnp.int32) < seen[:, :, None]
            values, ids = lax.top_k(jnp.where(visible, scores, -jnp.inf), self.top)
            return jnp.where(values == -jnp.inf, -1, ids.astype(jnp.int32))

        return by_blocks(best, fitting_block(B * S * self.heads, max_scores), q, factors, seen)
