"""Recipes of NLLB-MoE, the encoder-decoder, and its oracle.

transformers 5.17 to 5.24 runs only the first two experts of a sparse layer (`NllbMoeExperts.forward` takes the one-hot
mask of the first choice for expert numbers). The oracle computes with the experts that the router's combine weights
name, as fairseq and transformers 4 do.

Arrays of ``tests/data/nllb_moe*.npz`` (S source tokens, T decoder tokens, V vocabulary, D width, E experts a layer):

    input_ids [1,S], decoder_input_ids [1,T]        one pass: a source and what the decoder is given
    logits [1,T,V]                                  of that pass, no cache
    hidden/encoder/<i> [1,S,D]                      i = 0 embedding, then after each layer; the last normed
    hidden/decoder/<i> [1,T,D]                      likewise
    router/{encoder,decoder}/<i>/combine [.,E]      factor of each expert's output; 0: not chosen, or dropped
    gen_ids [1,8], gen_logits [7,V]                 greedy continuation of the start token, the first id forced, no EOS;
                                                    logits of the steps that chose
    batch_input_ids, batch_attention_mask [2,S]     two sources, the first right-padded by 5
    batch_logits [2,T,V]                            one pass with the same decoder tokens for both
    batch_gen_ids [2,8]                             greedy continuation of both together
    weights_crc32 []                                checksum of the checkpoint
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tiny_recipes import Recipe, Shapes, Tensors, in_memory_layout, initial_value

START, FORCED, PAD = 2, 12, 1
DECODER_TOKENS = 16
RIGHT_PADDING = 5
NEW_TOKENS = 8
MIN_MARGIN = 5e-3  # as in tiny_models
STACKS = ("encoder", "decoder")


def nllb_parameters(config: dict) -> Shapes:
    """NLLB-MoE: two pre-norm stacks with biases everywhere, one shared embedding, experts one by one."""
    width = config["d_model"]
    norm = {"weight": (width,), "bias": (width,)}
    yield "model.shared.weight", (config["vocab_size"], width)
    for stack in STACKS:
        inner, step = config[f"{stack}_ffn_dim"], config[f"{stack}_sparse_step"]
        attentions = ("self_attn", "cross_attention") if stack == "decoder" else ("self_attn",)
        dense = {
            "fc1.weight": (inner, width),
            "fc1.bias": (inner,),
            "fc2.weight": (width, inner),
            "fc2.bias": (width,),
        }
        for i in range(config[f"{stack}_layers"]):
            layer = f"model.{stack}.layers.{i}"
            for attention in attentions:
                for projection in ("q", "k", "v", "out"):
                    yield f"{layer}.{attention}.{projection}_proj.weight", (width, width)
                    yield f"{layer}.{attention}.{projection}_proj.bias", (width,)
            for name in (*(f"{attention}_layer_norm" for attention in attentions), "ff_layer_norm"):
                yield from ((f"{layer}.{name}.{key}", shape) for key, shape in norm.items())
            if (i + 1) % step:
                yield from ((f"{layer}.ffn.{key}", shape) for key, shape in dense.items())
                continue
            yield f"{layer}.ffn.router.classifier.weight", (config["num_experts"], width)
            if config["router_bias"]:
                yield f"{layer}.ffn.router.classifier.bias", (config["num_experts"],)
            for e in range(config["num_experts"]):
                yield from ((f"{layer}.ffn.experts.expert_{e}.{key}", shape) for key, shape in dense.items())
        yield from ((f"model.{stack}.layer_norm.{key}", shape) for key, shape in norm.items())


def nllb_value(name: str, shape: tuple[int, ...], tied: bool = False) -> np.ndarray:
    """As `initial_value`, for NLLB's names.

    The decoder's last norm has random signs: the tied head would else repeat the last token. The embedding, which the
    model multiplies by sqrt(D), is larger than the sinusoids, and what blocks add is larger still: tokens then differ
    in the experts they want.
    """
    if name == "model.shared.weight":
        value = initial_value(f"{name}.embed_tokens.weight", shape) * np.float32(2.5 * shape[1] ** -0.5)
        value[PAD] = 0
        return value
    if name == "model.decoder.layer_norm.weight":
        return 1.2 * (initial_value(name, shape) - 1.0) / np.float32(0.15)
    if name.endswith("classifier.weight"):
        return initial_value(f"{name}.router.weight", shape)
    gain = 2.5 / 1.3 if name.endswith(("out_proj.weight", "fc2.weight")) else 1.0
    return initial_value(name, shape) * np.float32(gain)


_NLLB_MOE = {
    "architectures": ["NllbMoeForConditionalGeneration"],
    "model_type": "nllb-moe",
    "is_encoder_decoder": True,
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "num_experts": 4,
    "expert_capacity": 64,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": 128,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "second_expert_policy": "all",
    "normalize_router_prob_before_dropping": False,
    "batch_prioritized_routing": False,
    "moe_eval_capacity_token_fraction": 1.0,
    "moe_token_dropout": 0.2,
    "tie_word_embeddings": True,
    "decoder_start_token_id": START,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}

_CAPACITY = {
    "moe_eval_capacity_token_fraction": 0.3,
    "batch_prioritized_routing": True,
    "normalize_router_prob_before_dropping": True,
    "router_bias": True,
}


# ---------------------------------------------------------------------------------------------- the oracle (torch)


@contextmanager
def every_chosen_expert():
    """transformers' NLLB-MoE, with the experts that have a combine weight instead of the first two."""
    import torch
    from transformers.models.nllb_moe import modeling_nllb_moe

    def forward(self, hidden_states, router_mask, router_probs):
        del router_mask
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            tokens = router_probs[:, e].nonzero().flatten()
            y = self[f"expert_{e}"](hidden_states[tokens]) * router_probs[tokens, e, None]
            out.index_add_(0, tokens, y * (1 - self.moe_token_dropout))
        return out

    experts = modeling_nllb_moe.NllbMoeExperts
    broken, experts.forward = experts.forward, forward
    try:
        yield
    finally:
        experts.forward = broken


def reference_outputs(recipe: Recipe, directory: Path) -> Tensors:
    """What transformers, mended, computes from the checkpoint in ``directory``: the arrays in the table above.

    Raises RuntimeError if the checkpoint does not load one to one or a greedy choice could be decided by rounding.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if problems := {kind: sorted(map(str, found)) for kind, found in report.items() if found}:
        raise RuntimeError(f"{directory.name}: transformers did not load the checkpoint one to one: {problems}")
    model.eval()
    length, vocabulary = recipe.prompt_length, recipe.config["vocab_size"]
    source = torch.from_numpy(np.random.default_rng(1).integers(3, vocabulary, size=(1, length)))
    batch = torch.from_numpy(np.random.default_rng(2).integers(3, vocabulary, size=(2, length)))
    given = torch.from_numpy(np.random.default_rng(3).integers(3, vocabulary, size=(1, DECODER_TOKENS)))
    given[:, 0] = START
    mask = torch.ones_like(batch)
    mask[0, -RIGHT_PADDING:] = 0
    batch[0, -RIGHT_PADDING:] = PAD
    arrays: Tensors = {}

    def keep(stack, layer):
        def hook(module, args, output):
            combine = output[1] * (1 - recipe.config["moe_token_dropout"])
            arrays[f"router/{stack}/{layer}/combine"] = combine.numpy().copy()

        return hook

    def generate(ids, mask):
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            forced_bos_token_id=FORCED,
            return_dict_in_generate=True,
            output_logits=True,
        )

    model.generation_config.eos_token_id = None  # run all steps
    with torch.no_grad(), every_chosen_expert():
        hooks = [
            block.ffn.router.register_forward_hook(keep(stack, i))
            for stack in STACKS
            for i, block in enumerate(getattr(model.model, stack).layers)
            if block.is_sparse
        ]
        full = model(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            decoder_input_ids=given,
            output_hidden_states=True,
            use_cache=False,
        )
        for hook in hooks:
            hook.remove()
        generated = generate(source, torch.ones_like(source))
        padded = model(
            input_ids=batch, attention_mask=mask, decoder_input_ids=given.expand(2, -1).contiguous(), use_cache=False
        )
        together = generate(batch, mask)

    logits = torch.cat(generated.logits[1:]).numpy()  # the first is forced
    every = np.concatenate([logits, torch.cat(together.logits[1:]).numpy()])
    best = np.sort(every, -1)[:, -2:]
    if (margin := float((best[:, 1] - best[:, 0]).min())) < MIN_MARGIN:
        raise RuntimeError(f"{directory.name}: a greedy choice is decided by {margin:.1e} only: change the recipe")
    for stack in STACKS:
        states = getattr(full, f"{stack}_hidden_states")
        arrays |= {f"hidden/{stack}/{i}": state.numpy() for i, state in enumerate(states)}
    return arrays | {
        "input_ids": source.numpy(),
        "decoder_input_ids": given.numpy(),
        "logits": full.logits.numpy(),
        "gen_ids": generated.sequences[:, 1:].numpy(),
        "gen_logits": logits,
        "batch_input_ids": batch.numpy(),
        "batch_attention_mask": mask.numpy(),
        "batch_logits": padded.logits.numpy(),
        "batch_gen_ids": together.sequences[:, 1:].numpy(),
    }


RECIPES: dict[str, Recipe] = {
    "nllb_moe": Recipe(
        "encoder-decoder: two stacks of sparse and dense layers, ReLU experts with biases of two widths, top-2, tied",
        _NLLB_MOE,
        nllb_parameters,
        in_memory_layout,
        prompt_length=30,
        value=nllb_value,
        reference=reference_outputs,
    ),
    "nllb_moe_capacity": Recipe(
        "the same with a router bias and a capacity of 0.3 of the tokens: the most certain first, normalised before",
        _NLLB_MOE | _CAPACITY,
        nllb_parameters,
        in_memory_layout,
        prompt_length=30,
        value=nllb_value,
        reference=reference_outputs,
    ),
}
