"""Top-k of router scores, and all of a router behind its logits: scores, choice and weights in one launch.

`implementation` is "pallas" (compiled for an NVIDIA GPU), "interpret" or "xla"; None: "pallas" where kernels run
compiled, else "xla".
"""

import jax.numpy as jnp

from pallas_kernels import _compat
from pallas_kernels.router_topk import kernel, ref
from pallas_kernels.router_topk.kernel import router_topk
from pallas_kernels.router_topk.spec import Routing

__all__ = ["IMPLEMENTATIONS", "Routing", "route", "router_topk"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def route(logits, how: Routing, *, bias=None, feeds_kernels=False, implementation=None):
    """The experts of each token and their weights, see `Routing`.

    Among equal scores the lower id comes first. A NaN score is never preferred to a number; if it is chosen all the
    same, the kernel's weight is NaN. (Plain XLA prefers NaN to every number.)

    Args:
      logits: [T, E], any float dtype; computed in float32.
      how: `Routing`.
      bias: [E] f32 that takes part in the choice only, or None.
      feeds_kernels: see `_compat.call`.
      implementation: see the module.

    Returns:
      ids [T, k] i32 by descending weight, weights [T, k] in `how.weights`, scores [T, E] f32.

    Raises:
      ValueError: unknown implementation; k out of range.
    """
    if implementation is None:
        implementation = _compat.default_implementation()
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if how.k > logits.shape[1]:
        raise ValueError(f"k = {how.k}: must be from 1 to the {logits.shape[1]} experts")
    if bias is not None:
        bias = bias.astype(jnp.float32)
    if implementation == "xla":
        return ref.route(logits, bias, how)
    return kernel.route(logits, bias, how, feeds_kernels=feeds_kernels, interpret=implementation == "interpret")
