"""Weight table of NLLB-MoE: one embedding for both stacks and the head, experts one by one."""

from functools import partial

from host_offload.parts import padded
from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule
from moe_jax.models.nllb_moe.config import NllbMoeConfig

# Duplicates of the shared embedding that some files carry.
TIED = (("lm_head.weight", "embed.weight"), ("encoder.embed", "embed.weight"), ("decoder.embed", "embed.weight"))


def weight_table(cfg: NllbMoeConfig) -> tuple[Rule | ExpertRule | Ignore, ...]:
    """The table of a model of `cfg`: the decoder's layers are numbered after the encoder's."""
    stacks = (("encoder", cfg.encoder_ffn_dim, 0), ("decoder", cfg.decoder_ffn_dim, cfg.encoder_layers))
    return (
        Rule(r"model\.shared\.weight", "embed.weight"),
        Rule(r"lm_head\.weight", "lm_head.weight"),
        Ignore(r"model\.(encoder|decoder)\.embed_positions\.weights?", "computed from the config"),
        *(rule for stack, width, first in stacks for rule in _stack_rules(stack, width, first, cfg.expert_width)),
    )


def _stack_rules(stack: str, width: int, first: int, row_width: int) -> list[Rule | ExpertRule]:
    layer, ours = rf"model\.{stack}\.layers\.(\d+)\.", rf"{stack}.layers.\1."
    rules: list[Rule | ExpertRule] = [Rule(rf"model\.{stack}\.embed_tokens\.weight", f"{stack}.embed")]
    for kind in ("weight", "bias"):
        rules += [
            Rule(rf"model\.{stack}\.layer_norm\.{kind}", rf"{stack}.norm.{kind}"),
            Rule(layer + rf"self_attn_layer_norm\.{kind}", ours + f"attn_norm.{kind}"),
            Rule(layer + rf"cross_attention_layer_norm\.{kind}", ours + f"cross_norm.{kind}"),
            Rule(layer + rf"ff_layer_norm\.{kind}", ours + f"ffn_norm.{kind}"),
            *(
                Rule(layer + rf"self_attn\.{name}_proj\.{kind}", ours + f"attn.qkv.{kind}", part=(i, 3))
                for i, name in enumerate("qkv")
            ),
            Rule(layer + rf"self_attn\.out_proj\.{kind}", ours + f"attn.out.{kind}"),
            Rule(layer + rf"cross_attention\.q_proj\.{kind}", ours + f"cross.q.{kind}"),
            Rule(layer + rf"cross_attention\.k_proj\.{kind}", ours + f"cross.kv.{kind}", part=(0, 2)),
            Rule(layer + rf"cross_attention\.v_proj\.{kind}", ours + f"cross.kv.{kind}", part=(1, 2)),
            Rule(layer + rf"cross_attention\.out_proj\.{kind}", ours + f"cross.out.{kind}"),
            Rule(layer + rf"ffn\.fc1\.{kind}", ours + f"ffn.mlp.up.{kind}"),
            Rule(layer + rf"ffn\.fc2\.{kind}", ours + f"ffn.mlp.down.{kind}"),
            Rule(layer + rf"ffn\.router\.classifier\.{kind}", ours + f"ffn.router.gate.{kind}"),
        ]

    def expert(name: str, tensor: str, axis: int | None) -> ExpertRule:
        narrow = axis is not None and width < row_width
        view = partial(padded, axis=axis, size=row_width) if narrow else None
        pattern = layer + rf"ffn\.experts\.expert_(\d+)\.{name}"
        return ExpertRule(pattern, tensor, views=(view,), first=first)

    return [
        *rules,
        expert(r"fc1\.weight", "gate_up", 0),
        expert(r"fc1\.bias", "gate_up_bias", 0),
        expert(r"fc2\.weight", "down", 1),
        expert(r"fc2\.bias", "down_bias", None),
    ]
