"""The dense gated feed-forward block (SwiGLU)."""

from flax import nnx
from jax import Array

from moe_jax.layers.linear import Linear, silu_product


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x) with gate and up fused as one [2F, D] weight (Shazeer 2020, "GLU Variants")."""

    def __init__(self, features: int, hidden: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.gate_up = Linear(features, 2 * hidden, dtype, std=std, rngs=rngs)
        self.down = Linear(hidden, features, dtype, std=std, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(silu_product(self.gate_up(x)))
