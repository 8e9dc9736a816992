"""Products with decoded weights in plain jax.numpy: the kernel's reference, and the path of other platforms."""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def product(x, w, bias=None):
    """x w^T + b in float32: x [M, in], w [out, in], bias [out] or None -> [M, out]."""
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=_HIGHEST, preferred_element_type=jnp.float32)
    return y if bias is None else y + bias.astype(jnp.float32)


def dequant_gemm(x, parts, form, bias, out_dtype):
    """As `pallas_kernels.dequant_gemm.dequant_gemm`."""
    w = form.decode(parts, (parts[""].shape[0],), x.shape[1], x.dtype)
    return product(x, w, bias).astype(out_dtype)
