"""Doubly stochastic matrices from logits, one small matrix a token."""

import jax

from pallas_kernels._compat import kernels_run_compiled
from pallas_kernels.sinkhorn.kernel import sinkhorn_kernel
from pallas_kernels.sinkhorn.ref import sinkhorn_ref

__all__ = ["sinkhorn", "sinkhorn_kernel", "sinkhorn_ref"]


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """A nearly doubly stochastic matrix from each matrix of logits (Sinkhorn and Knopp 1967).

    softmax over rows plus eps; then columns are divided by their sum, and rows and columns in turn `iterations` - 1
    times, with eps added to every sum. The last step leaves columns (axis -2) that sum to 1.

    On a GPU it is one kernel: as separate steps of XLA, 20 iterations were 80 launches around every block of a model.

    Args:
      logits: [..., n, n] f32; iterations: static, at least 1; eps: static.

    Returns:
      [..., n, n] f32.

    Raises:
      ValueError: logits are no square matrices, or iterations < 1.
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits of shape {logits.shape}: must be square matrices [..., n, n]")
    if iterations < 1:
        raise ValueError(f"iterations = {iterations}: must be at least 1")
    run = sinkhorn_kernel if kernels_run_compiled() else sinkhorn_ref
    n = logits.shape[-1]
    return run(logits.reshape(-1, n, n), iterations=iterations, eps=eps).reshape(logits.shape)
