"""`sinkhorn` in plain XLA."""

import jax
import jax.numpy as jnp


def sinkhorn_ref(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """logits [R, n, n] f32 -> [R, n, n] f32."""

    def columns(matrix):
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    def both(_, matrix):
        return columns(matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + eps))

    # A loop, as 20 unrolled iterations around every block of a model take long to compile.
    return jax.lax.fori_loop(1, iterations, both, columns(jax.nn.softmax(logits, axis=-1) + eps))
