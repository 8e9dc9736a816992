"""What an expert computes and how its row stores the weights: static facts that every implementation is built from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_ffn import packed
from pallas_kernels.formats import Dense, Format

# The numbers that each activation needs.
ACTIVATIONS = {"silu": (), "clamped_swiglu": ("alpha", "limit"), "clamped_silu": ("limit",), "relu": ()}


@dataclass(frozen=True)
class ExpertSpec:
    """One expert, hashable, a static argument: y = act(x gate_up^T + b_gate_up) down^T + b_down.

    Args:
      activation: of the gated experts, whose `gate_up` [2F, D] holds the rows of gate before those of up,
        "silu": silu(gate) * up.
        "clamped_swiglu": (up + 1) * gate * sigmoid(alpha * gate) with gate at most `limit` and up within +-`limit`
        (gpt-oss).
        "clamped_silu": silu(gate) * up, clamped alike (DeepSeek-V4).
        "relu": relu(x gate_up^T + b_gate_up), no gate: `gate_up` is one matrix [F, D] (NLLB).
      alpha, limit: of the activations above, else None.
      biases: the row also holds `gate_up_bias` [2F] ([F] without a gate) and `down_bias` [D].
      gate_up, down: `Format` of these weights, whose parts are the row's tensors `gate_up<suffix>` and `down<suffix>`.

    Raises:
      ValueError: unknown activation; a format that is none; alpha or limit missing, out of range or without use.
    """

    activation: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    biases: bool = False
    gate_up: Format = Dense()
    down: Format = Dense()

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation = {self.activation!r}: must be one of {', '.join(ACTIVATIONS)}")
        for name in ("gate_up", "down"):
            if not isinstance(getattr(self, name), Format):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be a Format of pallas_kernels.formats")
        for name in ("alpha", "limit"):
            value = getattr(self, name)
            if name not in ACTIVATIONS[self.activation]:
                if value is not None:
                    raise ValueError(f"{name} = {value!r}: activation {self.activation!r} has none; leave it out")
            elif not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} = {value!r}: activation {self.activation!r} needs a positive number")

    @property
    def gated(self) -> bool:
        """Whether `gate_up` is two matrices."""
        return self.activation != "relu"

    def outs(self, tensor: str, size: int) -> tuple[int, ...]:
        """Output sizes of the matrices that `tensor` stacks, `size` rows together."""
        return (size // 2, size // 2) if tensor == "gate_up" and self.gated else (size,)

    def parts(self, tensor: str) -> tuple[str, ...]:
        """Names of the row tensors that the product with `tensor` ("gate_up" or "down") reads, itself first."""
        suffixes = getattr(self, tensor).suffixes
        return (*(tensor + suffix for suffix in suffixes), *((f"{tensor}_bias",) if self.biases else ()))

    def row_tensors(self, width: int, model: int) -> dict[str, tuple[tuple[int, ...], np.dtype | None]]:
        """{name: (shape, dtype)} of an expert's row, for F = `width` and D = `model`; the order is that of `parts`.

        dtype None: a floating dtype that the file chooses.

        Raises:
          ValueError: a format cannot hold rows of D or F values.
        """
        tensors = {}
        for name, size, n_in in (("gate_up", 2 * width if self.gated else width, model), ("down", model, width)):
            outs = self.outs(name, size)
            try:
                stored = getattr(self, name).row_tensors(outs, n_in)
            except ValueError as error:
                raise ValueError(f"{name} of experts with F = {width}, D = {model}: {error}") from error
            tensors |= {name + suffix: tensor for suffix, tensor in stored.items()}
            if self.biases:
                tensors[f"{name}_bias"] = ((size,), None)
        return tensors

    def activate(self, first: jax.Array, up: jax.Array | None = None) -> jax.Array:
        """Hidden values, float32, of the float32 products `first` (gate) and `up`; without a gate of `first` alone.

        Also traced inside the kernels, where minimum and maximum would turn NaN into a number.
        """
        if self.activation == "relu":
            return jnp.where(first < 0, 0, first)
        gate = first
        if self.limit is not None:
            gate, up = _at_most(gate, self.limit), -_at_most(-_at_most(up, self.limit), self.limit)
        if self.activation == "clamped_swiglu":
            return (up + 1) * (gate * jax.nn.sigmoid(gate * self.alpha))
        return gate * jax.nn.sigmoid(gate) * up

    def without_kernel(self) -> str | None:
        """Why the kernels do not serve these experts, one clause; None if they do."""
        for form in (self.gate_up, self.down):
            if not isinstance(form, Dense) and (reason := packed.without_kernel(form)):
                return reason
        return None


def _at_most(x, limit):
    """min(x, limit), NaN where x is."""
    return jnp.where(x > limit, limit, x)


SILU = ExpertSpec()
