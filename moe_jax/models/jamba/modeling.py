"""Jamba: the shared decoder with Mamba in most layers."""

from flax import nnx

from moe_jax.layers.mamba import Mamba
from moe_jax.models.decoder import Decoder, TokenMixer


class JambaForCausalLM(Decoder):
    """Jamba; in Mamba layers `layers.N.attn` holds the parameters of `Mamba` in place of attention's."""

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> TokenMixer:
        cfg = self.cfg
        if layer in cfg.attention_layers:
            return super().make_attention(layer, rngs)
        return Mamba(
            cfg.hidden_size,
            cfg.mamba_inner,
            self.dtype,
            state_dim=cfg.mamba_d_state,
            dt_rank=cfg.mamba_dt_rank,
            taps=cfg.mamba_d_conv,
            eps=cfg.rms_norm_eps,
            layer=layer,
            std=cfg.initializer_range,
            rngs=rngs,
        )
