"""Dense feed-forward blocks: the gated one (SwiGLU), the same under a gate of its own, and one with ReLU."""

import jax
from flax import nnx
from jax import Array

from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import Normed


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x) with gate and up fused as one [2F, D] weight (Shazeer 2020, "GLU Variants")."""

    def __init__(self, features: int, hidden: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.gate_up = Linear(features, 2 * hidden, dtype, std=std, rngs=rngs)
        self.down = Linear(hidden, features, dtype, std=std, rngs=rngs)

    def __call__(self, x: Array | Normed) -> Array:
        return self.down(self.gate_up.swiglu(x, feeds_kernels=self.down.form is None))


class SigmoidGatedMLP(GatedMLP):
    """sigmoid(g . x) * `GatedMLP`(x), one factor a token, g [1, D]: the shared expert of Qwen's families."""

    def __init__(self, features: int, hidden: int, dtype, *, std: float, rngs: nnx.Rngs):
        super().__init__(features, hidden, dtype, std=std, rngs=rngs)
        self.gate = Linear(features, 1, dtype, std=std, rngs=rngs)

    def __call__(self, x: Array | Normed) -> Array:
        return jax.nn.sigmoid(self.gate(x)) * super().__call__(x)


class ReluMLP(nnx.Module):
    """down(relu(up x)), with biases."""

    def __init__(self, features: int, hidden: int, dtype, *, std: float, rngs: nnx.Rngs):
        self.up = Linear(features, hidden, dtype, bias=True, std=std, rngs=rngs)
        self.down = Linear(hidden, features, dtype, bias=True, std=std, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.relu(self.up(x)))
