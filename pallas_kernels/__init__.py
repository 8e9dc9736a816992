"""Pallas kernels of moe_jax: one folder an operation, each with a public function, a kernel and a plain reference."""

from pallas_kernels._compat import kernels_run_compiled

__all__ = ["kernels_run_compiled"]
