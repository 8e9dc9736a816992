"""What an expert computes and how its row stores the weights: static facts that every implementation is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

FORMATS = ("dense", "mxfp4")
ACTIVATIONS = ("silu", "clamped_swiglu")


@dataclass(frozen=True)
class ExpertSpec:
    """One gated expert: y = act(x gate^T + b_gate, x up^T + b_up) down^T + b_down. Hashable, a static argument.

    Args:
      activation: "silu": silu(gate) * up. "clamped_swiglu": (up + 1) * gate * sigmoid(alpha * gate) with gate at most
        `limit` and up within +-`limit` (gpt-oss).
      alpha, limit: of "clamped_swiglu", else None.
      biases: the row also holds `gate_up_bias` [2F] and `down_bias` [D].
      gate_up, down: format of these tensors. "dense": an array [out, in] of a floating dtype. "mxfp4": see `mxfp4.py`;
        words in the tensor itself, scales in `gate_up_scale` or `down_scale`.

    Raises:
      ValueError: unknown activation or format; alpha or limit missing, out of range or without use.
    """

    activation: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    biases: bool = False
    gate_up: str = "dense"
    down: str = "dense"

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation = {self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")
        for name in ("gate_up", "down"):
            if getattr(self, name) not in FORMATS:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(FORMATS)}")
        for name in ("alpha", "limit"):
            value = getattr(self, name)
            if self.activation == "silu" and value is not None:
                raise ValueError(f"{name} = {value!r}: activation 'silu' has none; leave it out")
            if self.activation != "silu" and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} = {value!r}: activation {self.activation!r} needs a positive number")

    def parts(self, tensor: str) -> tuple[str, ...]:
        """Names of the row tensors that the product with `tensor` ("gate_up" or "down") reads, itself first."""
        scale = () if getattr(self, tensor) == "dense" else (f"{tensor}_scale",)
        return (tensor, *scale, *((f"{tensor}_bias",) if self.biases else ()))

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Hidden values of float32 gate and up of one shape, float32; also traced inside the kernels."""
        if self.activation == "silu":
            return gate * jax.nn.sigmoid(gate) * up
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(gate * self.alpha))

    def without_kernel(self) -> str | None:
        """Why the kernels do not serve these experts, one clause; None if they do."""
        packed = [name for name in ("gate_up", "down") if getattr(self, name) != "dense"]
        return f"no kernel reads {getattr(self, packed[0])} rows" if packed else None


SILU = ExpertSpec()
