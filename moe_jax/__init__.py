"""Mixture-of-Experts models in JAX with experts offloaded to pinned host memory."""

from moe_jax._version import __version__

__all__ = ["__version__"]
