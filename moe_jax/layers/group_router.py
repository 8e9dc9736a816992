"""Routers that choose experts within the best groups of experts (DeepSeek-V2 and V3).

The E experts form n groups of E / n neighbours, a device each in the original systems; a token may only use experts of
its `top_groups` best groups. Both routers compute in float32 with float32 weights, whatever the compute dtype.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.layers.linear import Linear
from moe_jax.layers.router import top_k
from pallas_kernels.router_topk import Routing, route


def keep_best_groups(scores: Array, group_scores: Array, top_groups: int, other: float) -> Array:
    """scores [T, E] where the expert's group is among the `top_groups` largest of group_scores [T, n], else `other`."""
    T, E = scores.shape
    n = group_scores.shape[1]
    _, best = top_k(group_scores, top_groups)  # [T, top_groups]
    kept = jnp.any(best[:, :, None] == jnp.arange(n), axis=1)  # [T, n]
    return jnp.where(jnp.repeat(kept, E // n, axis=1), scores, other)


class GroupMaxRouter(nnx.Module):
    """DeepSeek-V2: softmax; a group scores as its best expert; weights are scores times `scale`, not renormalised.

    `groups` 1 is the plain greedy choice. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        k: int,
        *,
        groups: int,
        top_groups: int,
        scale: float,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.gate = Linear(features, num_experts, jnp.float32, std=std, rngs=rngs)
        self.k = k
        self.groups = groups
        self.top_groups = top_groups
        self.scale = scale

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [T, D] -> ids [T, K] int32 by descending weight, weights [T, K] and scores [T, E], float32."""
        logits = self.gate(x.astype(jnp.float32))
        if self.groups == 1:
            return route(logits, Routing(self.k, scale=self.scale))
        scores = jax.nn.softmax(logits, axis=-1)
        best = jnp.max(scores.reshape(scores.shape[0], self.groups, -1), axis=-1)  # [T, n]
        weights, ids = top_k(keep_best_groups(scores, best, self.top_groups, 0.0), self.k)
        return ids, weights * self.scale, scores


class BiasedSigmoidRouter(nnx.Module):
    """DeepSeek-V3: sigmoid scores; a correction bias takes part in the choice, not in the weights.

    A group scores as the sum of its two best biased scores. The weights are the plain scores of the chosen experts,
    divided by their sum if `normalize`, times `scale`. Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        k: int,
        *,
        groups: int,
        top_groups: int,
        normalize: bool,
        scale: float,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.gate = Linear(features, num_experts, jnp.float32, std=std, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32))
        self.k = k
        self.groups = groups
        self.top_groups = top_groups
        self.normalize = normalize
        self.scale = scale

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [T, D] -> ids [T, K] int32 by descending weight, weights [T, K] and scores [T, E], float32."""
        logits = self.gate(x.astype(jnp.float32))
        if self.groups == 1:
            norm = dict(norm=1, epsilon=1e-20) if self.normalize else {}
            return route(logits, Routing(self.k, "sigmoid", **norm, scale=self.scale), bias=self.bias[...])
        scores = jax.nn.sigmoid(logits)
        T, E = scores.shape
        choice = scores + self.bias[...]
        two, _ = top_k(choice.reshape(T * self.groups, -1), 2)
        choice = keep_best_groups(choice, jnp.sum(two, axis=-1).reshape(T, self.groups), self.top_groups, -jnp.inf)
        _, chosen = top_k(choice, self.k)  # by biased score
        is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(E), axis=1)  # [T, E]
        weights, ids = top_k(jnp.where(is_chosen, scores, -jnp.inf), self.k)  # the same experts, by weight
        if self.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return ids, weights * self.scale, scores
