"""Routers of DeepSeek-V4: scores sqrt(softplus(logit)); experts by biased score, or by the token's id."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.layers.linear import Linear
from moe_jax.layers.router import top_k
from pallas_kernels.router_topk import Routing, route


class _SqrtSoftplusGate(nnx.Module):
    """Scores of all experts and the weights of the chosen ones, divided by their sum and times `scale`."""

    def __init__(self, features: int, num_experts: int, k: int, dtype, *, scale: float, std: float, rngs: nnx.Rngs):
        self.gate = Linear(features, num_experts, dtype, std=std, rngs=rngs)
        self.k = k
        self.scale = scale

    def scores(self, x: Array) -> Array:
        """x [T, D] -> [T, E] float32. Logits are rounded to x's dtype first: near-ties fall as in transformers."""
        return jnp.sqrt(jax.nn.softplus(self.gate(x).astype(jnp.float32)))

    def weigh(self, scores: Array, chosen: Array, dtype) -> tuple[Array, Array, Array]:
        """(ids [T, K] int32 by descending weight, weights [T, K] in `dtype`, scores) of the chosen ids [T, K]."""
        weights, order = top_k(jnp.take_along_axis(scores, chosen, axis=1), self.k)
        ids = jnp.take_along_axis(chosen, order, axis=1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20) * self.scale
        return ids, weights.astype(dtype), scores


class BiasedSqrtSoftplusRouter(_SqrtSoftplusGate):
    """The K experts of the largest score plus a float32 correction `bias` [E], which has no part in the weights."""

    def __init__(self, features: int, num_experts: int, k: int, dtype, *, scale: float, std: float, rngs: nnx.Rngs):
        super().__init__(features, num_experts, k, dtype, scale=scale, std=std, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32))

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """x [T, D] -> ids [T, K] int32 by descending weight, weights [T, K] in x's dtype, scores [T, E] float32."""
        how = Routing(self.k, "sqrt_softplus", norm=1, epsilon=1e-20, scale=self.scale, weights=x.dtype.name)
        return route(self.gate(x), how, bias=self.bias[...])


class HashRouter(_SqrtSoftplusGate):
    """The K experts that a table [V, K] int32 gives to the token's id; the gate only weighs them.

    Source: Roller et al. 2021, "Hash Layers For Large Sparse Models".
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        k: int,
        dtype,
        *,
        vocab_size: int,
        scale: float,
        std: float,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, num_experts, k, dtype, scale=scale, std=std, rngs=rngs)
        table = (jnp.arange(vocab_size, dtype=jnp.int32)[:, None] + jnp.arange(k, dtype=jnp.int32)) % num_experts
        self.table = nnx.Param(table)

    def __call__(self, x: Array, tokens: Array) -> tuple[Array, Array, Array]:
        """As `BiasedSqrtSoftplusRouter`, with the tokens' ids [T]."""
        scores = self.scores(x)
        return self.weigh(scores, jnp.take(self.table[...], tokens, axis=0, mode="clip"), x.dtype)
