"""What a line of the kernels' benchmark is made of: the case, its random data, its distance from the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import FP8, Format

ROTATE_BYTES = 512_000_000
# Calls in one program, at most.
MOST_SETS = 128


@dataclass(frozen=True)
class Case:
    """What one line of the benchmark runs.

    make: () -> (data, state), traceable; `data["pool"]`, if any, belongs in pinned host memory.
    step: (implementation) -> (data, state, j) -> state, one call on set j of `sets`, a Python number.
    error: (data, first, last) -> distance from the reference of the state after the first call, and after all of them;
      both calls are on set 0, and `first` has no banks.
    tolerance: largest distance that is right; 0: equal to the bit.
    moved: bytes that a call must read over `memory`, "hbm" or "link" (None: no such bound); flops: its operations.
    aim: share of the ceiling that is asked for, or None; starts: kernels that the aim allows a start.
    """

    make: Callable[[], tuple[dict, dict]]
    step: Callable[[str], Callable]
    error: Callable[[dict, dict, dict], Any]
    tolerance: float
    sets: int
    moved: int = 0
    memory: str | None = None
    flops: int = 0
    aim: float | None = None
    starts: int = 0


def fill(key, form: Format, suffix: str, shape, dtype):
    """A part of weights, or their bias: finite values of a spread near 0.02, so that no activation is saturated."""
    if suffix == "_order":
        return jax.vmap(lambda k: jax.random.permutation(k, shape[1]))(jax.random.split(key, shape[0])).astype(dtype)
    if dtype != np.uint32 and suffix != "_scale":
        return (jax.random.normal(key, shape, jnp.bfloat16) * 0.02).astype(dtype)
    if dtype != np.uint32:
        low = 0.01 if isinstance(form, FP8) else 0.003
        return jax.random.uniform(key, shape, jnp.float32, low, 2 * low).astype(dtype)
    words = jax.random.bits(key, shape, jnp.uint32)
    if suffix == "_scale":  # bytes of MXFP4, 2^-9 to 2^-6
        return (words & np.uint32(0x03030303)) + np.uint32(0x76767676)
    return words & np.uint32(0xBFBFBFBF) if isinstance(form, FP8) else words  # FP8 without its NaN


def sets_for(nbytes: int, small: bool) -> int:
    """Sets of `nbytes` that fill ROTATE_BYTES; raises ValueError if that takes more than MOST_SETS."""
    sets = 2 if small else max(2, -(-ROTATE_BYTES // nbytes))
    if sets > MOST_SETS:
        raise ValueError(f"{nbytes} bytes a call: {sets} sets are needed, at most {MOST_SETS} can be made")
    return sets


def relative(got, want):
    """Largest difference over the largest magnitude of `want`; infinite where `got` is not finite."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    error = jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))
    return jnp.where(jnp.isfinite(error), error, jnp.inf)


def unequal(*pairs):
    """Elements that differ in their bits, over all pairs of arrays."""
    return sum((jnp.sum(a != b, dtype=jnp.int32) for a, b in pairs), jnp.int32(0)).astype(jnp.float32)
