"""The top-2 router of NLLB: experts take a limited number of tokens, those beyond it are dropped."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moe_jax.layers.linear import Linear


class Top2Router(nnx.Module):
    """The two likeliest experts of a token, as far as they have room, weighted by their share of both probabilities.

    An expert takes ceil(`fraction` * tokens of the call) tokens: first those whose first choice it is, then those whose
    second choice it is, each in the order of the call or, with `prioritized`, the most certain token first. A pair
    beyond that is dropped: its weight is zero. It keeps its expert's id all the same, which costs no transfer: an
    expert that drops a token has taken others. Logits, weights and the parameters are float32.

    Sources: NLLB Team 2022, "No Language Left Behind", section 6.2; Lepikhin et al. 2020, "GShard", algorithm 1;
    Riquelme et al. 2021, "Scaling Vision with Sparse Mixture of Experts", section 4 (prioritized).

    Args:
        bias: whether the gate has one.
        fraction: > 0; from 1 on nothing is ever dropped.
        normalize_first: divide by the sum of both probabilities before dropping, so that the weight of what was dropped
            is lost; else by the sum of those that were kept.
        scale: factor on all weights.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        *,
        bias: bool,
        fraction: float,
        prioritized: bool,
        normalize_first: bool,
        scale: float,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.gate = Linear(features, num_experts, jnp.float32, bias=bias, std=std, rngs=rngs)
        self.fraction = fraction
        self.prioritized = prioritized
        self.normalize_first = normalize_first
        self.scale = scale

    def __call__(self, x: Array, live: Array, counted: Array) -> tuple[Array, Array, Array]:
        """Chooses the experts of one call.

        Args:
            x: [T, D].
            live: [T] bool; the others take no room.
            counted: int32 scalar, at most T: the tokens of the call that the capacity is a share of.

        Returns:
            ids [T, 2] int32, the likelier first; weights [T, 2] float32, 0 where dropped; scores [T, E] float32.
        """
        logits = self.gate(x.astype(jnp.float32))
        scores = jax.nn.softmax(logits, axis=-1)
        rounded = scores.astype(x.dtype)  # the first choice falls as in transformers where two round to the same
        first = jnp.argmax(rounded, axis=-1)
        rest = jnp.where(jnp.arange(logits.shape[1]) == first[:, None], -jnp.inf, logits)
        ids = jnp.stack([first, jnp.argmax(rest, axis=-1)], axis=-1).astype(jnp.int32)
        weights = jnp.take_along_axis(rounded, ids, axis=-1).astype(jnp.float32)
        kept = jnp.ones(ids.shape, bool) if self.fraction >= 1 else self._kept(ids, weights[:, 0], live, counted)
        shares = weights if self.normalize_first else jnp.where(kept, weights, 0)
        total = jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), jnp.finfo(x.dtype).eps)
        return ids, jnp.where(kept, weights / total, 0) * self.scale, scores

    def _kept(self, ids: Array, certainty: Array, live: Array, counted: Array) -> Array:
        """[T, 2] bool: the pairs that find room."""
        T, E = ids.shape[0], self.gate.weight.shape[0]
        wants = (ids.T[:, :, None] == jnp.arange(E)) & live[:, None]  # [2, T, E]
        order = jnp.argsort(-certainty, stable=True) if self.prioritized else jnp.arange(T)
        ahead = jnp.cumsum(wants[:, order], axis=1, dtype=jnp.int32)[:, jnp.argsort(order)] - 1  # [2, T, E]
        ahead = ahead.at[1].add(jnp.sum(wants[0], axis=0, dtype=jnp.int32))
        rank = jnp.take_along_axis(ahead, ids.T[:, :, None], axis=-1)[..., 0]  # [2, T]
        # A table: what float32 makes of fraction * tokens may round up past a whole number.
        capacity = jnp.asarray(np.ceil(self.fraction * np.arange(T + 1)).astype(np.int32))[counted]
        return (rank < capacity).T
