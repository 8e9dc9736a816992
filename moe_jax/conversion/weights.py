"""One matrix in another format, and what that costs in precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moe_jax.errors import CheckpointError
from pallas_kernels.formats import Dense, Format

BF16 = np.dtype(ml_dtypes.bfloat16)
OTHER_FORM = "name another --group-size or --format"  # what helps where the shapes do not fit the format


@dataclass(frozen=True)
class Target:
    """The format that experts' matrices are converted to; `Dense()` stands for bfloat16."""

    format: Format

    @property
    def name(self) -> str:
        """As the command line calls it."""
        return "bf16" if isinstance(self.format, Dense) else self.format.name

    def encode(self, w: np.ndarray) -> dict[str, np.ndarray]:
        """Parts of one matrix [out, in] of floats. Raises ValueError for values or a width that the format has not."""
        if isinstance(self.format, Dense):
            return {"": w.astype(BF16)}
        return self.format.encode(w)


@dataclass
class Errors:
    """Sums over the values of one or several matrices: squares of the error and of the weights, and the largest error
    of a weight as a share of its matrix' largest magnitude."""

    squared_error: float = 0.0
    squared_weight: float = 0.0
    largest: float = 0.0

    def add(self, other: Errors) -> None:
        """Takes the values of `other` in."""
        self.squared_error += other.squared_error
        self.squared_weight += other.squared_weight
        self.largest = max(self.largest, other.largest)

    @property
    def rms(self) -> float:
        """Root of the mean squared error over that of the mean squared weight."""
        return (self.squared_error / self.squared_weight) ** 0.5 if self.squared_weight else 0.0


def convert(matrices: Sequence[np.ndarray], target: Target, what: str) -> tuple[dict[str, np.ndarray], Errors]:
    """Parts of stacked matrices [out, in], and the errors of their values when they are decoded again.

    what: names the matrices in an error. Raises CheckpointError for values that are not finite and for a width that
    the format cannot hold.
    """
    for w in matrices:
        if bad := w.size - int(np.isfinite(w).sum()):
            raise CheckpointError(
                f"{what}: {bad} of {w.size} weights are NaN or infinite; the source is damaged: fetch it again"
            )
    try:
        encoded = [target.encode(w) for w in matrices]
    except ValueError as error:
        raise CheckpointError(f"{what}: {error}; {OTHER_FORM}") from error
    parts = {suffix: np.concatenate([each[suffix] for each in encoded]) for suffix in encoded[0]}
    outs = tuple(len(w) for w in matrices)
    values, errors, first = decoded(parts, target.format, outs, matrices[0].shape[1]), Errors(), 0
    for w in matrices:
        w = w.astype(np.float32)
        wrong = np.abs(values[first : first + len(w)] - w)
        top = float(np.abs(w).max(initial=0))
        errors.add(
            Errors(
                float(np.square(wrong, dtype=np.float64).sum()),
                float(np.square(w, dtype=np.float64).sum()),
                float(wrong.max(initial=0)) / top if top else 0.0,
            )
        )
        first += len(w)
    return parts, errors


def decoded(parts: Mapping[str, np.ndarray], form: Format, outs: tuple[int, ...], width: int) -> np.ndarray:
    """The values [sum(outs), width] float32 of stacked matrices."""
    if isinstance(form, Dense):
        return parts[""].astype(np.float32)
    return np.asarray(_decoded(dict(parts), form, outs, width))


def _decode(parts, form, outs, width):
    return form.decode(parts, outs, width, jnp.float32)


_decoded = jax.jit(_decode, static_argnums=(1, 2, 3))
