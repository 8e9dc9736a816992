"""Tiny random-weight checkpoints and the outputs that transformers computes from them.

The file has two halves. The first needs NumPy only: ``build(name, directory)`` writes a complete Hugging Face
checkpoint of about a megabyte, byte for byte the same on every run, so the test-suite needs no download. The second,
the oracle, needs torch: it loads such a directory with transformers (fp32 compute, eager attention, eager experts) and
records what every module returns. The recorded arrays lie in ``tests/data/<name>.npz``; the suite compares with them.

    python tests/tiny_models.py --list                       # names and what each recipe exercises
    python tests/tiny_models.py --build DIR [NAME ...]       # write the checkpoints DIR/<name>
    python tests/tiny_models.py --write [NAME ...]           # recompute tests/data (torch)
    python tests/tiny_models.py --check [NAME ...]           # recompute and fail on a difference above 1e-5 (torch)

Arrays of ``tests/data/<name>.npz``, float32 or int64 (T prompt tokens, V vocabulary, D model width, K experts a token):

    input_ids [1,T]               the prompt
    logits [1,T,V]                one pass over the prompt, no cache
    gen_ids [1,8]                 greedy continuation with the KV cache, never stopped by EOS
    gen_logits [8,V]              logits of each of its steps
    batch_input_ids [2,T]         two prompts, the first left-padded by 5
    batch_attention_mask [2,T]    0 on the padding
    batch_position_ids [2,T]      counted from the first real token
    batch_logits [2,T,V]          one pass, no cache; the rows of padding mean nothing
    hidden/<i> [1,T,D]            i = 0 embedding, i = 1.. after layer i-1; the last one is after the final norm
    attn/<i> [1,T,D]              output of layer i's attention block, before the residual
    moe/<i> [1,T,D]               output of layer i's feed-forward block (dense or sparse), before the residual
    router/<i>/indices [T,K]      experts that sparse layer i chose, by descending weight, then ascending id
    router/<i>/weights [T,K]      the weights their outputs are multiplied with
    weights_crc32 []              checksum of the checkpoint the outputs were computed from

A further family is one entry of RECIPES, with a parameter list and, where its files name tensors otherwise, a layout.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).resolve().parent / "data"
NEW_TOKENS = 8
LEFT_PADDING = 5
TOLERANCE = 1e-5  # --check: the same formulas in the same precision; only the order of sums may differ
MIN_MARGIN = 5e-3  # greedy choices must be decided by far more than fp32 noise (about 1e-5)

Tensors = dict[str, np.ndarray]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Recipe:
    """One tiny checkpoint.

    Attributes:
        about: what the recipe exercises, one line.
        config: content of config.json, in the spelling that the family's released checkpoints use.
        parameters: yields (name, shape) of every parameter as transformers holds it in memory (experts stacked).
        layout: turns those parameters into the tensors of the file.
        prompt_length: T of the expected outputs.
        dtype: dtype of the tensors in the file.
        shard_bytes: start a new file before this many bytes; None writes a single file without an index.
    """

    about: str
    config: dict
    parameters: Callable[[dict], Shapes]
    layout: Callable[[Tensors], Tensors]
    prompt_length: int = 24
    dtype: type = np.float32
    shard_bytes: int | None = None


# ---------------------------------------------------------------------------------------------- random weights


def initial_value(name: str, shape: tuple[int, ...], tied: bool = False) -> np.ndarray:
    """Random fp32 value of a parameter, from a generator seeded by the parameter's name alone.

    The scales keep activations near 1 through every block and make the logits spread by about 2.5, so that each tensor
    moves the output and greedy choices are clear. Norm weights scatter around 1 so that a forgotten norm shows.
    A tied embedding takes the value of the head: at the embedding's own scale the logits would be four times larger.
    """
    if tied and name.endswith("embed_tokens.weight"):
        name = "lm_head.weight"
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 1.0 + 0.15 * normal  # a norm weight: none of these families has biases
    if name.endswith("embed_tokens.weight"):
        return normal
    if name.endswith("lm_head.weight"):
        gain = 2.5
    elif name.endswith(".gate.weight"):
        gain = 1.5  # router: spread the probabilities
    else:
        gain = 1.3  # projections, [out, in] or stacked [E, out, in]
    return normal * (gain * shape[-1] ** -0.5)


# ---------------------------------------------------------------------------------------------- parameter lists


def _attention(prefix: str, config: dict) -> Shapes:
    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or width // heads
    yield f"{prefix}.q_proj.weight", (heads * head_dim, width)
    yield f"{prefix}.k_proj.weight", (kv_heads * head_dim, width)
    yield f"{prefix}.v_proj.weight", (kv_heads * head_dim, width)
    yield f"{prefix}.o_proj.weight", (width, heads * head_dim)
    if config["model_type"] == "qwen3_moe":  # one norm over each head
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)
    if config["model_type"] == "olmoe":  # one norm over the whole projection
        yield f"{prefix}.q_norm.weight", (heads * head_dim,)
        yield f"{prefix}.k_norm.weight", (kv_heads * head_dim,)


def _glu_experts(prefix: str, config: dict, experts: int, expert_width: int) -> Shapes:
    width = config["hidden_size"]
    yield f"{prefix}.gate.weight", (experts, width)
    yield f"{prefix}.experts.gate_up_proj", (experts, 2 * expert_width, width)
    yield f"{prefix}.experts.down_proj", (experts, width, expert_width)


def _dense_mlp(prefix: str, config: dict) -> Shapes:
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield f"{prefix}.gate_proj.weight", (inner, width)
    yield f"{prefix}.up_proj.weight", (inner, width)
    yield f"{prefix}.down_proj.weight", (width, inner)


def decoder_parameters(config: dict) -> Shapes:
    """Parameters of the Mixtral, Qwen3-MoE and OLMoE decoders: pre-norm attention and a gated MLP or MoE a layer."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    experts = config.get("num_experts") or config["num_local_experts"]
    expert_width = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield from _attention(f"{layer}.self_attn", config)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        sparse = i not in config.get("mlp_only_layers", ()) and (i + 1) % config.get("decoder_sparse_step", 1) == 0
        yield from (
            _glu_experts(f"{layer}.mlp", config, experts, expert_width)
            if sparse
            else _dense_mlp(f"{layer}.mlp", config)
        )
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, width)


# ---------------------------------------------------------------------------------------------- file layouts


def in_memory_layout(parameters: Tensors) -> Tensors:
    """The names of transformers 5 in memory: experts stacked, ``mlp.experts.gate_up_proj [E, 2F, D]``."""
    return dict(parameters)


def _expert_layout(parameters: Tensors, gate: str, up: str, down: str, rename: Callable[[str], str]) -> Tensors:
    tensors = {}
    for name, value in parameters.items():
        block, _, leaf = name.rpartition(".experts.")
        if leaf == "gate_up_proj":
            inner = value.shape[1] // 2
            for e, expert in enumerate(value):
                tensors[rename(f"{block}.experts.{e}.{gate}.weight")] = expert[:inner]
                tensors[rename(f"{block}.experts.{e}.{up}.weight")] = expert[inner:]
        elif leaf == "down_proj":
            for e, expert in enumerate(value):
                tensors[rename(f"{block}.experts.{e}.{down}.weight")] = expert
        else:
            tensors[rename(name)] = value
    return tensors


def mixtral_layout(parameters: Tensors) -> Tensors:
    """Released Mixtral: ``block_sparse_moe.experts.<e>.{w1,w3,w2}.weight`` = gate, up, down."""
    return _expert_layout(parameters, "w1", "w3", "w2", lambda name: name.replace(".mlp.", ".block_sparse_moe."))


def per_expert_layout(parameters: Tensors) -> Tensors:
    """Released Qwen3-MoE and OLMoE: ``mlp.experts.<e>.{gate,up,down}_proj.weight``."""
    return _expert_layout(parameters, "gate_proj", "up_proj", "down_proj", lambda name: name)


# ---------------------------------------------------------------------------------------------- recipes

_COMMON = {"vocab_size": 256, "hidden_act": "silu", "max_position_embeddings": 256, "attention_dropout": 0.0}

_MIXTRAL = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MIXTRAL_WINDOW = _MIXTRAL | {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "num_local_experts": 4,
    "rope_theta": 1e4,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}

# The spelling that transformers 5 writes: rope settings in one dict instead of a top-level rope_theta.
_MIXTRAL_V5 = {k: v for k, v in _MIXTRAL.items() if k != "rope_theta"} | {
    "head_dim": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_OLMOE = _COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "clip_qkv": 1.2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

RECIPES: dict[str, Recipe] = {
    "mixtral": Recipe(
        "top-2 renormalised after softmax, grouped queries, released names w1/w2/w3",
        _MIXTRAL,
        decoder_parameters,
        mixtral_layout,
    ),
    "mixtral_swa_tied": Recipe(
        "sliding window shorter than the prompt, tied embedding, explicit head width, one kv head",
        _MIXTRAL_WINDOW,
        decoder_parameters,
        mixtral_layout,
        prompt_length=20,
    ),
    "mixtral_bf16_sharded": Recipe(
        "bf16 file in several shards with an index; the expected outputs are fp32 compute on the bf16 weights",
        _MIXTRAL,
        decoder_parameters,
        mixtral_layout,
        dtype=ml_dtypes.bfloat16,
        shard_bytes=300_000,
    ),
    "mixtral_v5keys": Recipe(
        "the weights of mixtral under transformers 5's in-memory names: stacked experts, rope_parameters",
        _MIXTRAL_V5,
        decoder_parameters,
        in_memory_layout,
    ),
    "qwen3_moe": Recipe(
        "norm per head, head width unequal to width / heads, dense layers by sparse step (0,2,4) and by list (3)",
        _QWEN3_MOE,
        decoder_parameters,
        per_expert_layout,
    ),
    "olmoe": Recipe(
        "norm over the whole q and k projection, clip after it, weights not renormalised",
        _OLMOE,
        decoder_parameters,
        per_expert_layout,
    ),
}


# ---------------------------------------------------------------------------------------------- the checkpoint writer


def recipe(name: str) -> Recipe:
    """The recipe called ``name``; ValueError with the known names otherwise."""
    if name not in RECIPES:
        raise ValueError(f"unknown tiny model {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def checkpoint_tensors(name: str) -> Tensors:
    """Tensors of the checkpoint by their names in the file, in the file's dtype, in file order."""
    r = recipe(name)
    tied = r.config["tie_word_embeddings"]
    parameters = {key: initial_value(key, shape, tied) for key, shape in r.parameters(r.config)}
    return {key: np.ascontiguousarray(value.astype(r.dtype)) for key, value in r.layout(parameters).items()}


def fingerprint(tensors: Tensors) -> int:
    """CRC-32 over names and bytes: a NumPy that drew other numbers is told apart from a wrong model."""
    crc = 0
    for key in sorted(tensors):
        crc = zlib.crc32(tensors[key].tobytes(), zlib.crc32(key.encode(), crc))
    return crc


def _shards(tensors: Tensors, limit: int | None) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    size = 0
    for key, value in tensors.items():
        if limit is not None and shards[-1] and size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = value
        size += value.nbytes
    return shards


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build(name: str, directory: str | Path) -> Path:
    """Write the tiny checkpoint ``name`` into ``directory`` (created if missing) and return its path.

    Writes config.json, generation_config.json and either model.safetensors or numbered shards with
    model.safetensors.index.json. Raises ValueError for an unknown name.
    """
    r = recipe(name)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", r.config | {"dtype": np.dtype(r.dtype).name})
    special = {k: v for k, v in r.config.items() if k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", {"_from_model_config": True} | special)

    tensors = checkpoint_tensors(name)
    shards = _shards(tensors, r.shard_bytes)
    if r.shard_bytes is None:
        files = ["model.safetensors"]
    else:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {key: file for file, shard in zip(files, shards, strict=True) for key in shard}
        total = sum(value.nbytes for value in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})
    return directory


def expected(name: str) -> Tensors:
    """The recorded outputs of the oracle for ``name`` (see the table above)."""
    recipe(name)
    with np.load(DATA / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


# ---------------------------------------------------------------------------------------------- the oracle (torch)


def _load_reference(directory: Path):
    """transformers' model in fp32, and proof that every tensor of the file found its parameter and the reverse."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {kind: sorted(map(str, found)) for kind, found in report.items() if found}
    if problems:
        raise RuntimeError(f"{directory.name}: transformers did not load the checkpoint one to one: {problems}")
    return model.eval()


def _first(output):
    return output[0] if isinstance(output, tuple) else output


class _Recorder:
    """Forward hooks on every layer's attention, feed-forward block and router; keeps what one pass returns."""

    def __init__(self, model):
        self.arrays: Tensors = {}
        self._handles = []
        for path, module in model.named_modules():
            if match := re.search(r"layers\.(\d+)\.(self_attn|mlp)$", path):
                kind = "attn" if match[2] == "self_attn" else "moe"
                self._handles.append(module.register_forward_hook(self._block(f"{kind}/{match[1]}")))
            elif match := re.search(r"layers\.(\d+)\.mlp\.gate$", path):
                self._handles.append(module.register_forward_hook(self._router(f"router/{match[1]}")))

    def _block(self, key):
        def hook(module, args, output):
            self.arrays[key] = _first(output).numpy().copy()

        return hook

    def _router(self, key):
        def hook(module, args, output):
            _, weights, indices = (part.numpy() for part in output)
            order = np.lexsort((indices, -weights), axis=-1)
            self.arrays[f"{key}/indices"] = np.take_along_axis(indices, order, -1)
            self.arrays[f"{key}/weights"] = np.take_along_axis(weights, order, -1)

        return hook

    def close(self):
        for handle in self._handles:
            handle.remove()


def reference_outputs(name: str, directory: Path) -> Tensors:
    """What transformers computes from the checkpoint in ``directory``: the arrays of ``tests/data/<name>.npz``.

    Raises RuntimeError if the checkpoint does not load one to one, if cached and uncached passes disagree, or if a
    greedy choice is so close that rounding could decide it.
    """
    import torch

    torch.set_num_threads(1)  # the order of sums, and so the last bits, must not depend on the machine
    r = recipe(name)
    length, vocabulary = r.prompt_length, r.config["vocab_size"]
    model = _load_reference(directory)
    prompt = torch.from_numpy(np.random.default_rng(1).integers(3, vocabulary, size=(1, length)))
    batch = torch.from_numpy(np.random.default_rng(2).integers(3, vocabulary, size=(2, length)))
    mask = torch.ones_like(batch)
    mask[0, :LEFT_PADDING] = 0
    batch[0, :LEFT_PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    model.generation_config.eos_token_id = None  # run all steps
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        recorder = _Recorder(model)
        full = model(input_ids=prompt, output_hidden_states=True, use_cache=False)
        recorder.close()
        generated = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        padded = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False)

    arrays = {
        "input_ids": prompt.numpy(),
        "logits": full.logits.numpy(),
        "gen_ids": generated.sequences[:, length:].numpy(),
        "gen_logits": torch.cat(generated.logits).numpy(),
        "batch_input_ids": batch.numpy(),
        "batch_attention_mask": mask.numpy(),
        "batch_position_ids": positions.numpy(),
        "batch_logits": padded.logits.numpy(),
        "weights_crc32": np.array(fingerprint(checkpoint_tensors(name)), np.int64),
        **{f"hidden/{i}": state.numpy() for i, state in enumerate(full.hidden_states)},
        **recorder.arrays,
    }
    _check_well_conditioned(name, arrays)
    return arrays


def _check_well_conditioned(name: str, arrays: Tensors) -> None:
    drift = np.abs(arrays["gen_logits"][0] - arrays["logits"][0, -1]).max()
    if drift > 1e-4:
        raise RuntimeError(f"{name}: logits with and without the KV cache differ by {drift:.1e}")
    if (margin := greedy_margin(arrays)) < MIN_MARGIN:
        raise RuntimeError(
            f"{name}: a greedy choice is decided by {margin:.1e} only (at least {MIN_MARGIN}); change the recipe"
        )


def greedy_margin(arrays: Tensors) -> float:
    """Smallest gap between the best and the second-best logit over the greedy steps."""
    top = np.sort(arrays["gen_logits"], -1)[:, -2:]
    return float((top[:, 1] - top[:, 0]).min())


def largest_difference(stored: Tensors, computed: Tensors) -> tuple[float, str]:
    """Largest |stored - computed| and where it was seen; infinite for other names, shapes, dtypes or integers."""
    if missing := sorted(stored.keys() ^ computed.keys()):
        return np.inf, f"arrays on one side only: {', '.join(missing)}"
    worst, where = 0.0, "-"
    for key, value in computed.items():
        old = stored[key]
        if old.shape != value.shape or old.dtype != value.dtype:
            return np.inf, f"{key}: {old.dtype}{old.shape} stored, {value.dtype}{value.shape} computed"
        if np.issubdtype(value.dtype, np.integer):
            difference = 0.0 if np.array_equal(old, value) else np.inf
        else:
            difference = float(np.nan_to_num(np.abs(old - value), nan=np.inf).max())
        if difference > worst:
            worst, where = difference, key
    return worst, where


# ---------------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tiny MoE checkpoints and their expected outputs.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print the recipes")
    action.add_argument("--build", metavar="DIR", help="write the checkpoints into DIR/<name> (no torch)")
    action.add_argument("--write", action="store_true", help="recompute tests/data with transformers and torch")
    action.add_argument("--check", action="store_true", help=f"recompute and fail on a difference above {TOLERANCE}")
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes, all by default")
    args = parser.parse_args(argv)
    names = args.names or list(RECIPES)
    for name in names:
        if name not in RECIPES:
            parser.error(f"unknown tiny model {name!r}: choose one of {', '.join(RECIPES)}")

    failed = []
    for name in names:
        if args.list:
            print(f"{name:22s} {RECIPES[name].about}")
        elif args.build:
            print(build(name, Path(args.build) / name))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                computed = reference_outputs(name, build(name, Path(scratch) / name))
            if args.write:
                DATA.mkdir(exist_ok=True)
                np.savez_compressed(DATA / f"{name}.npz", **computed)
                size = (DATA / f"{name}.npz").stat().st_size
                margin = greedy_margin(computed)
                print(f"{name:22s} {len(computed)} arrays, {size / 1e3:.0f} kB, greedy margin {margin:.3f}")
            else:
                worst, where = largest_difference(expected(name), computed)
                bad = worst > TOLERANCE
                failed += [name] if bad else []
                print(f"{name:22s} {'DIFFERS' if bad else 'equal'}: largest difference {worst:.1e} ({where})")
    if failed:
        print(f"{len(failed)} of {len(names)} recipes differ from tests/data by more than {TOLERANCE}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
