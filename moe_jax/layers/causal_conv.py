"""The short causal convolution of recurrent layers: each channel sees its own last few tokens."""

import jax.numpy as jnp
from jax import Array


def causal_conv(u: Array, live: Array, weight: Array, bias: Array | None, past: Array) -> tuple[Array, Array]:
    """Depthwise causal convolution over time: out_t = bias + sum_j weight_j u_(t - Kc + 1 + j).

    Args:
        u: [B, T, Di]; live: [B, T] bool, the live tokens of a row come first.
        weight: [Di, Kc]; bias: [Di] or None; past: [B, Kc - 1, Di], the inputs before u.

    Returns:
        (out [B, T, Di] in float32, the last Kc - 1 live inputs [B, Kc - 1, Di] in u's dtype).
    """
    T, taps = u.shape[1], weight.shape[1]
    inputs = jnp.concatenate([past.astype(u.dtype), u], axis=1)  # [B, Kc - 1 + T, Di]
    wide = inputs.astype(jnp.float32)
    out = sum(wide[:, j : j + T] * weight[:, j].astype(jnp.float32) for j in range(taps))
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    count = jnp.sum(live, axis=1, dtype=jnp.int32)  # [B]
    last = count[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)
    return out, jnp.take_along_axis(inputs, last[:, :, None], axis=1)
