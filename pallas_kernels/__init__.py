"""Pallas kernels of moe_jax: one folder an operation, each with a public function, a kernel and a plain reference."""
