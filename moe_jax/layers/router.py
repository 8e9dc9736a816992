"""Softmax top-k router: which experts serve a token, and with which weights."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import Normed
from pallas_kernels import kernels_run_compiled
from pallas_kernels.router_topk import Routing, route, router_topk


def top_k(scores: Array, k: int) -> tuple[Array, Array]:
    """The k largest scores of each row: values [T, k] descending and ids [T, k] int32; ties: the lower id first."""
    if kernels_run_compiled():
        return router_topk(scores, k)
    values, ids = lax.top_k(scores, k)
    return values, ids.astype(jnp.int32)


class KernelRouter(nnx.Module):
    """A router that is two kernels where kernels serve one row: its `gate`, a `Linear`, and `route` with the formula of
    `routing(dtype of x)`."""

    gate: Linear

    def routing(self, dtype) -> Routing:
        """What becomes of the logits of rows of `dtype`."""
        raise NotImplementedError

    def __call__(self, x: Array | Normed, read_by_kernels: frozenset[str] = frozenset()) -> tuple[Array, Array, Array]:
        """x [T, D] -> ids [T, K] int32 by descending weight, weights [T, K], scores [T, E] float32.

        read_by_kernels: as of `Experts`, which get norm(x) of a `Normed` and the ids next.
        """
        logits = self.gate(x, feeds_kernels="x" in read_by_kernels)
        return route(logits, self.routing(x.dtype), feeds_kernels="ids" in read_by_kernels)


class Router(KernelRouter):
    """Softmax over all E experts in float32, then the K largest.

    `normalize` divides the K weights by their sum. `weights_dtype` is the dtype of the returned weights: Mixtral keeps
    float32 (its expert outputs are weighted in float32), Qwen3-MoE and OLMoE round to the compute dtype.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        k: int,
        dtype,
        *,
        normalize: bool,
        weights_dtype,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.gate = Linear(features, num_experts, dtype, packs=False, std=std, rngs=rngs)
        self.k = k
        self.normalize = normalize
        self.weights_dtype = jnp.dtype(weights_dtype)

    def routing(self, dtype) -> Routing:
        # Logits are rounded to x's dtype before the softmax: near-ties then fall as they do in transformers.
        return Routing(self.k, norm=1 if self.normalize else None, weights=self.weights_dtype.name)
