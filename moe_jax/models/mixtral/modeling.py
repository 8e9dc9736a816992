"""Mixtral: the shared decoder with router weights kept in float32."""

import jax.numpy as jnp

from moe_jax.models.decoder import Decoder


class MixtralForCausalLM(Decoder):
    """Mixtral weights each expert's output in float32 before the sum is cast to the compute dtype."""

    router_weights_dtype = jnp.float32
