"""Manifold-constrained hyper-connections: n residual streams in place of one, mixed by a doubly stochastic matrix.

A block reads one combination of the streams and writes to all of them: with streams X_1..X_n of a token,

    x = sum_j pre_j X_j        X'_k = post_k block(x) + sum_j C_jk X_j

where pre, post and C depend on the token. Source: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections", and
DeepSeek-V4's report, section 2.2. Everything here is computed in float32 with float32 parameters.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moe_jax.layers.linear import project
from moe_jax.layers.norm import rms_norm
from pallas_kernels.sinkhorn import sinkhorn


def normalised(streams: Array, eps: float) -> Array:
    """All streams of a token as one vector of root mean square 1: [..., n, D] -> [..., n D] float32."""
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    return rms_norm(flat, jnp.float32(1.0), eps)


def collapse(streams: Array, weights: Array) -> Array:
    """sum_j weights_j X_j of streams [..., n, D] and float32 weights [..., n]: [..., D] in the streams' dtype."""
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=-2).astype(streams.dtype)


class HyperConnection(nnx.Module):
    """The three sets of weights around one block.

    Parameters, float32: `fn` [(2 + n) n, n D], whose rows make pre, post and C row by row; `base` of that length;
    `scale` [3], one for each set.

    Args:
        features: D; streams: n.
        iterations: of `sinkhorn`; eps: its eps, also added to pre; norm_eps: of the norm before `fn`.
    """

    def __init__(
        self, features: int, streams: int, *, iterations: int, eps: float, norm_eps: float, std: float, rngs: nnx.Rngs
    ):
        rows = (2 + streams) * streams
        self.fn = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (rows, streams * features), jnp.float32))
        self.base = nnx.Param(jnp.zeros((rows,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((3,), jnp.float32))
        self.streams = streams
        self.iterations, self.eps, self.norm_eps = iterations, eps, norm_eps

    def read(self, streams: Array) -> tuple[Array, Array, Array]:
        """Streams [B, T, n, D] -> (the block's input [B, T, D], post [B, T, n], C [B, T, n, n])."""
        n = self.streams
        mixed = project(normalised(streams, self.norm_eps), self.fn[...])  # [B, T, (2 + n) n]
        pre, post, matrix = jnp.split(mixed, (n, 2 * n), axis=-1)
        pre_base, post_base, matrix_base = jnp.split(self.base[...], (n, 2 * n))
        scale = self.scale[...]
        pre = jax.nn.sigmoid(pre * scale[0] + pre_base) + self.eps
        post = 2 * jax.nn.sigmoid(post * scale[1] + post_base)
        matrix = (matrix * scale[2] + matrix_base).reshape(*matrix.shape[:-1], n, n)
        return collapse(streams, pre), post, sinkhorn(matrix, self.iterations, self.eps)

    @staticmethod
    def write(streams: Array, y: Array, post: Array, matrix: Array) -> Array:
        """The new streams [B, T, n, D] from the old ones, the block's output y [B, T, D], and post and C of `read`."""
        wide = streams.astype(jnp.float32)
        # A sum over n terms, not a product of matrices: n is 4, and D lies along the lanes.
        kept = sum(matrix[..., j, :, None] * wide[..., j, None, :] for j in range(streams.shape[-2]))
        return (post[..., None] * y[..., None, :].astype(jnp.float32) + kept).astype(streams.dtype)


class HyperHead(nnx.Module):
    """One stream from n after the last layer: sum_j (sigmoid(z_j s + b_j) + eps) X_j, z = fn . normalised X.

    Parameters, float32: `fn` [n, n D], `base` [n], `scale` [1].
    """

    def __init__(self, features: int, streams: int, *, eps: float, norm_eps: float, std: float, rngs: nnx.Rngs):
        self.fn = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (streams, streams * features), jnp.float32))
        self.base = nnx.Param(jnp.zeros((streams,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((1,), jnp.float32))
        self.eps, self.norm_eps = eps, norm_eps

    def __call__(self, streams: Array) -> Array:
        """Streams [B, T, n, D] -> [B, T, D]."""
        mixed = project(normalised(streams, self.norm_eps), self.fn[...])
        return collapse(streams, jax.nn.sigmoid(mixed * self.scale[...] + self.base[...]) + self.eps)
