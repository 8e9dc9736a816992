"""Tiny random-weight checkpoints and the outputs that transformers computes from them.

The file has two halves. The first needs NumPy only: ``build(name, directory)`` writes a complete Hugging Face
checkpoint of about a megabyte, byte for byte the same on every run, so the test-suite needs no download. The second,
the oracle, needs torch: it loads such a directory with transformers (fp32 compute, eager attention, eager experts) and
records what every module returns. The recorded arrays lie in ``tests/data/<name>.npz``; the suite compares with them.

    python tests/tiny_models.py --list                       # names and what each recipe exercises
    python tests/tiny_models.py --build DIR [NAME ...]       # write the checkpoints DIR/<name>
    python tests/tiny_models.py --write [NAME ...]           # recompute tests/data (torch)
    python tests/tiny_models.py --check [NAME ...]           # recompute and fail on a difference above 1e-4 (torch)

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
    attn/<i> [1,T,D]              output of layer i's attention (or recurrent) block, before the residual
    moe/<i> [1,T,D]               output of layer i's feed-forward block (dense or sparse), before the residual
    router/<i>/indices [T,K]      experts that sparse layer i chose, by descending weight, then ascending id
    router/<i>/weights [T,K]      the weights their outputs are multiplied with
    weights_crc32 []              checksum of the checkpoint the outputs were computed from

The recipes themselves are in ``tests/tiny_recipes*.py``. An encoder-decoder has arrays of its own, see
``tests/tiny_recipes_nllb.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import tiny_recipes
import tiny_recipes_deepseek_v4
import tiny_recipes_fused
import tiny_recipes_nllb
import tiny_recipes_quantised
import tiny_recipes_qwen3_5
from safetensors.numpy import save_file
from tiny_recipes import Recipe, Tensors, initial_value

RECIPES = (
    tiny_recipes.RECIPES
    | tiny_recipes_deepseek_v4.RECIPES
    | tiny_recipes_fused.RECIPES
    | tiny_recipes_nllb.RECIPES
    | tiny_recipes_quantised.RECIPES
    | tiny_recipes_qwen3_5.RECIPES
)
DATA = Path(__file__).resolve().parent / "data"
NEW_TOKENS = 8
LEFT_PADDING = 5
# --check: the same formulas in the same precision; only the order of sums may differ. Nothing does on the kind of
# processor that the outputs were made on (AMD EPYC), up to 4.8e-5 on an Intel Xeon with AMX; a wrong formula far more.
TOLERANCE = 1e-4
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
MIN_MARGIN = 5e-3  # greedy choices must be decided by far more than fp32 noise (about 1e-5)


# ---------------------------------------------------------------------------------------------- the checkpoint writer


def recipe(name: str) -> Recipe:
    """The recipe called ``name``; ValueError with the known names otherwise."""
    if name not in RECIPES:
        raise ValueError(f"unknown tiny model {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def checkpoint_tensors(name: str, unpacked: bool = False) -> Tensors:
    """Tensors of the checkpoint by their names in the file, in the file's dtype, in file order.

    unpacked: the values of a packed format as floating-point tensors.
    """
    r = recipe(name)
    tied = r.text_config["tie_word_embeddings"]
    value_of = r.value or initial_value
    parameters = {key: value_of(key, shape, tied) for key, shape in r.parameters(r.config)}
    layout = r.float_layout if unpacked else r.layout
    return {
        key: np.ascontiguousarray(value.astype(r.dtype) if value.dtype == np.float32 else value)
        for key, value in layout(parameters).items()
    }


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


def build(name: str, directory: str | Path, unpacked: bool = False) -> Path:
    """Write the tiny checkpoint ``name`` into ``directory`` (created if missing) and return its path.

    unpacked: write the values of a packed format as floating-point tensors, and a config without its quantisation.
    Writes config.json, generation_config.json and either model.safetensors or numbered shards with
    model.safetensors.index.json. Raises ValueError for an unknown name.
    """
    r = recipe(name)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in r.config.items() if not (unpacked and k == "quantization_config")}
    _write_json(directory / "config.json", config | {"dtype": np.dtype(r.dtype).name})
    special = {k: r.text_config[k] for k in SPECIAL_TOKENS if k in r.text_config}
    _write_json(directory / "generation_config.json", {"_from_model_config": True} | special)

    tensors = checkpoint_tensors(name, unpacked)
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
    from transformers.utils import logging

    logging.disable_progress_bar()
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
            if match := re.search(r"layers\.(\d+)\.(self_attn|linear_attn|mamba|mlp|feed_forward)$", path):
                kind = "moe" if match[2] in ("mlp", "feed_forward") else "attn"
                self._handles.append(module.register_forward_hook(self._block(f"{kind}/{match[1]}")))
            elif match := re.search(r"blocks\.(\d+)\.(norm_attn_norm\.attn|ffn)$", path):  # DBRX
                kind = "moe" if match[2] == "ffn" else "attn"
                self._handles.append(module.register_forward_hook(self._block(f"{kind}/{match[1]}")))
                if kind == "moe":
                    self._handles.append(module.register_forward_hook(self._dbrx_router(f"router/{match[1]}")))
            elif match := re.search(r"layers\.(\d+)\.(mlp\.gate|mlp\.router|feed_forward\.router)$", path):
                self._handles.append(module.register_forward_hook(self._router(f"router/{match[1]}")))

    def _block(self, key):
        def hook(module, args, output):
            self.arrays[key] = _first(output).numpy().copy()

        return hook

    def _router(self, key):
        def hook(module, args, output):
            _, weights, indices = (part.numpy() for part in output)
            self._routing(key, weights, indices)

        return hook

    def _dbrx_router(self, key):
        """DBRX's router module returns logits only; the block around it chooses."""

        def hook(module, args, output):
            self._routing(key, *(part.numpy() for part in module.route_tokens_to_experts(module.router(args[0]))))

        return hook

    def _routing(self, key, weights, indices):
        order = np.lexsort((indices, -weights), axis=-1)
        self.arrays[f"{key}/indices"] = np.take_along_axis(indices, order, -1)
        self.arrays[f"{key}/weights"] = np.take_along_axis(weights, order, -1)

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
    if r.reference is not None:
        return r.reference(r, directory) | {"weights_crc32": np.array(fingerprint(checkpoint_tensors(name)), np.int64)}
    length, vocabulary = r.prompt_length, r.text_config["vocab_size"]
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
        if r.padding:
            padded = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
        else:
            padded = torch.zeros(*batch.shape, vocabulary)
            for row, real in enumerate(mask.bool()):
                padded[row, real] = model(input_ids=batch[row : row + 1, real], use_cache=False).logits[0]

    arrays = {
        "input_ids": prompt.numpy(),
        "logits": full.logits.numpy(),
        "gen_ids": generated.sequences[:, length:].numpy(),
        "gen_logits": torch.cat(generated.logits).numpy(),
        "batch_input_ids": batch.numpy(),
        "batch_attention_mask": mask.numpy(),
        "batch_position_ids": positions.numpy(),
        "batch_logits": padded.numpy(),
        "weights_crc32": np.array(fingerprint(checkpoint_tensors(name)), np.int64),
    }
    if r.modules:
        arrays |= {f"hidden/{i}": state.numpy() for i, state in enumerate(full.hidden_states)} | recorder.arrays
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
                unpacked = RECIPES[name].float_layout is not None
                computed = reference_outputs(name, build(name, Path(scratch) / name, unpacked))
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
