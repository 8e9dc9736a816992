"""Writes a checkpoint of a released model's shapes with random weights, in its own file layout and number formats.

    python experiments/random_checkpoint.py gpt-oss-20b DIRECTORY --layers 24

Names and layouts are those of the tiny checkpoints (tests/tiny_models.py), shapes those of the release. Nothing is
quantised: packed weights are random codes under scales that give a matrix with D inputs a spread of D ** -0.5. Outputs
of blocks are `random_model.QUIET` times that, so the hidden state stays close to the token's embedding: routing depends
on the token, and is close to uniform.
"""

import json
import math
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import ml_dtypes
import numpy as np
import typer
from _released import CONFIGS, with_layers
from random_model import QUIET
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import tiny_models  # noqa: E402 (the recipes live beside the tests)
from tiny_recipes_deepseek_v4 import released_layout  # noqa: E402

PIECE = 1 << 20  # values that lie one after another in a block and in a file
BLOCK = 4 * PIECE
JOB_PIECES = 32  # a thread's turn, so that a bar moves and threads end together
SHARD_BYTES = 5_000_000_000
FP8_BLOCK, FP4_BLOCK = 128, 32
FP8_SPREAD = 64.0  # of e4m3 codes made from normal numbers: 7 times it is the largest, 448
FP4_SPREAD = (2 * (0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 16) ** 0.5  # of e2m1 values, all 16 codes equally likely
THREADS = 8

BFLOAT16, FP8, E8M0 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu))
NAME_IN_FILE = {
    BFLOAT16: "BF16",
    FP8: "F8_E4M3",
    E8M0: "F8_E8M0",
    **{np.dtype(t): name for t, name in ((np.float32, "F32"), (np.int64, "I64"), (np.int8, "I8"), (np.uint8, "U8"))},
}

# What the residual stream receives, and what would prefer some experts to others.
OUTPUT = re.compile(r".*\.(o_proj|out_proj|down_proj|w2|wo_b|o_b_proj)(\.weight|\.bias|_bias|)")
PREFERENCE = re.compile(r".*(router\.bias|gate\.bias|e_score_correction_bias)")
SINGLE = re.compile(r".*(e_score_correction_bias|gate\.bias|attn_sink|\.ape|hc_\w+)")  # float32 in the releases

# ---------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Fill:
    """Random values without end, of one distribution: `kind` names a maker of `block`, `scale` its spread or size."""

    kind: str
    scale: float = 1.0


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file: its values, or what it is filled with."""

    shape: tuple[int, ...]
    dtype: np.dtype
    values: np.ndarray | Fill

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@cache
def _normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(BLOCK, np.float32)


@cache
def block(fill: Fill, dtype: np.dtype) -> np.ndarray:
    """BLOCK values [BLOCK] of a distribution in a dtype of the file; pieces of it fill tensors."""
    if fill.kind == "normal":
        return (_normal() * fill.scale).astype(dtype)
    rng = np.random.default_rng(1)
    if fill.kind == "fp8":  # never NaN, which is past 448
        return np.clip(_normal() * FP8_SPREAD, -448, 448).astype(dtype)
    if fill.kind == "bytes":
        return rng.integers(0, 256, BLOCK, np.uint8).view(dtype)
    if fill.kind == "scale":
        return (fill.scale * rng.uniform(0.7, 1.3, BLOCK)).astype(dtype)
    if fill.kind == "exponent":  # 2 ** (byte - 127): the nearest below and the nearest above
        low = math.floor(math.log2(fill.scale)) + 127
        return rng.integers(low, low + 2, BLOCK, np.uint8).view(dtype)
    raise ValueError(f"unknown kind of random values {fill.kind!r}")


def pieces(name: str, tensor: FileTensor, first: int, count: int) -> Iterator[np.ndarray]:
    """`count` pieces of a tensor from the `first` on, each uint8 and from a place of the block that its name chooses.

    Pieces of one tensor start at unrelated places, so rows do not repeat at a period.
    """
    if isinstance(tensor.values, np.ndarray):
        yield np.ascontiguousarray(tensor.values).reshape(-1).view(np.uint8)
        return
    whole = block(tensor.values, tensor.dtype)
    for i in range(first, min(first + count, -(-tensor.size // PIECE))):
        start = zlib.crc32(f"{name}/{i}".encode()) % (BLOCK - PIECE)
        yield whole[start : start + min(PIECE, tensor.size - i * PIECE)].view(np.uint8)


# ---------------------------------------------------------------------------------------------- tensors of a checkpoint


def _spread(name: str, fan_in: int) -> float:
    if name.endswith(("embed_tokens.weight", "embed.weight")):
        return 1.0
    return fan_in**-0.5 * (QUIET if OUTPUT.fullmatch(name) else 1.0)


def fp8_tensors(name: str, shape: tuple[int, ...], scale_name: str, exponents: bool) -> dict[str, FileTensor]:
    """A matrix [N, K] in e4m3 with a scale for each block of 128 x 128, float32 or (V4) an exponent."""
    grid = tuple(-(-n // FP8_BLOCK) for n in shape)
    fill = Fill("exponent" if exponents else "scale", _spread(name, shape[1]) / FP8_SPREAD)
    return {
        name: FileTensor(shape, FP8, Fill("fp8")),
        scale_name: FileTensor(grid, E8M0 if exponents else np.dtype(np.float32), fill),
    }


def pack_fp8(name: str, shape: tuple[int, ...]) -> dict[str, FileTensor] | None:
    """DeepSeek-V3: every linear layer but router and head; None: `name` stays as it is."""
    if not re.fullmatch(r".*_proj(_with_mqa)?\.weight", name):
        return None
    return fp8_tensors(name, shape, f"{name}_scale_inv", exponents=False)


def pack_mxfp4(name: str, shape: tuple[int, ...]) -> dict[str, FileTensor] | None:
    """gpt-oss: experts [E, in, out] become blocks [E, out, in / 32, 16] and exponents [E, out, in / 32]."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    E, fan_in, out = shape
    scales = (E, out, fan_in // FP4_BLOCK)
    fill = Fill("exponent", _spread(name, fan_in) / FP4_SPREAD)
    return {
        f"{name}_blocks": FileTensor((*scales, FP4_BLOCK // 2), np.dtype(np.uint8), Fill("bytes")),
        f"{name}_scales": FileTensor(scales, np.dtype(np.uint8), fill),
    }


def pack_v4(name: str, shape: tuple[int, ...]) -> dict[str, FileTensor] | None:
    """DeepSeek-V4: experts in e2m1 [N, K / 2] with an exponent for 32 values, attention and shared experts in FP8."""
    scale_name = f"{name.removesuffix('weight')}scale"
    if re.fullmatch(r".*\.ffn\.experts\.\d+\.w[123]\.weight", name):
        N, K = shape
        fill = Fill("exponent", _spread(name, K) / FP4_SPREAD)
        return {
            name: FileTensor((N, K // 2), np.dtype(np.int8), Fill("bytes")),
            scale_name: FileTensor((N, K // FP4_BLOCK), E8M0, fill),
        }
    if re.fullmatch(r".*(\.attn\.(indexer\.)?(wq_a|wq_b|wkv|wo_a|wo_b)|\.shared_experts\.w[123])\.weight", name):
        return fp8_tensors(name, shape, scale_name, exponents=True)
    return None


@dataclass(frozen=True)
class Model:
    """How a release lays its files out.

    Args:
        recipe: the tiny checkpoint (tests/tiny_models.py) of the same family and layout.
        pack: (name, shape) of a file tensor in floating point -> the tensors in its place, or None to keep it.
        layout: the recipe's layout, unless the release has another.
    """

    recipe: str
    pack: Callable[[str, tuple[int, ...]], dict[str, FileTensor] | None] = lambda name, shape: None
    layout: Callable | None = None


MODELS = {
    "qwen3-30b-a3b": Model("qwen3_moe"),
    "olmoe-1b-7b": Model("olmoe"),
    "mixtral-8x7b": Model("mixtral"),
    "deepseek-v2-lite": Model("deepseek_v2_lite"),
    "deepseek-v3": Model("deepseek_v3", pack_fp8),
    "deepseek-v4-flash": Model("deepseek_v4", pack_v4, released_layout),
    "gpt-oss-20b": Model("gpt_oss", pack_mxfp4),
    "jamba-v0.1": Model("jamba"),
    "qwen3.5-35b-a3b": Model("qwen3_5_moe_released"),
}

# Options of scripts that read a checkpoint and can write it first.
Directory = Annotated[Path, typer.Argument(help="the checkpoint; with --make, a new directory for it")]
Make = Annotated[str | None, typer.Option(help=f"write this model first, one of {', '.join(MODELS)}")]
Layers = Annotated[int | None, typer.Option(help="with --make: decoder layers (default: all of the model)")]


def check_make(make: str | None, layers: int | None, dry: bool) -> None:
    """Raises typer.BadParameter if an option that only means something beside --make is given without it."""
    if make is None and (layers is not None or dry):
        raise typer.BadParameter("--layers and --dry belong to --make")


def config_of(name: str, layers: int | None = None, tiny: bool = False) -> dict:
    """config.json of a model: as released with its first `layers` layers (None: all), or that of its tiny recipe.

    Raises ValueError for an unknown model, a number of layers that it does not have, or `tiny` with `layers`.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}")
    if not tiny:
        return with_layers(CONFIGS[name], layers)
    if layers is not None:
        raise ValueError(f"layers={layers}: a tiny model has the layers of its recipe; leave layers out")
    packed = {key: CONFIGS[name][key] for key in ("quantization_config", "expert_dtype") if key in CONFIGS[name]}
    return tiny_models.recipe(MODELS[name].recipe).config | packed | {"torch_dtype": "bfloat16"}


def file_tensors(name: str, config: dict) -> dict[str, FileTensor]:
    """The tensors of a checkpoint by name, in file order.

    Parameters of up to PIECE values get those of the tiny recipe, which knows norms, biases and recurrences; of larger
    ones only shape and name matter, so an array without memory goes through the layout in their place.
    """
    model, text = MODELS[name], config.get("text_config", config)
    recipe = tiny_models.recipe(model.recipe)
    parameters = {}
    for key, shape in recipe.parameters(config):
        if key.endswith("tid2eid"):
            parameters[key] = _hash_table(key, shape, text["n_routed_experts"])
        elif math.prod(shape) <= PIECE:
            value = (recipe.value or tiny_models.initial_value)(key, shape)
            quiet = OUTPUT.fullmatch(key) or PREFERENCE.fullmatch(key)
            parameters[key] = value * np.float32(QUIET) if quiet else value
        else:
            parameters[key] = np.broadcast_to(np.zeros((), BFLOAT16), shape)
    found = {}
    for key, array in (model.layout or recipe.layout)(parameters).items():
        found |= model.pack(key, array.shape) or {key: _plain(key, array)}
    return found


def _hash_table(name: str, shape: tuple[int, int], E: int) -> np.ndarray:
    """K distinct experts of each token, each E / K or less after the one before: [V, K] int64."""
    V, K = shape
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.integers(E, size=(V, 1)) + rng.integers(1, E // K + 1, (V, 1)) * np.arange(K)) % E


def _plain(name: str, array: np.ndarray) -> FileTensor:
    if array.strides and not any(array.strides):  # stands for a large parameter
        return FileTensor(array.shape, BFLOAT16, Fill("normal", _spread(name, array.shape[-1])))
    if np.issubdtype(array.dtype, np.integer):
        return FileTensor(array.shape, np.dtype(np.int64), array.astype(np.int64))
    dtype = np.dtype(np.float32) if SINGLE.fullmatch(name) else BFLOAT16
    return FileTensor(array.shape, dtype, array.astype(dtype))


# ---------------------------------------------------------------------------------------------- files


@dataclass
class _Shard:
    """One safetensors file in the making: its tensors, and where each begins in the data."""

    tensors: dict[str, FileTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def header(self) -> bytes:
        entries, at = {"__metadata__": {"format": "pt"}}, 0
        for name, tensor in self.tensors.items():
            offsets = [at, at := at + tensor.nbytes]
            dtype = NAME_IN_FILE[tensor.dtype]
            entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
        return len(text).to_bytes(8, "little") + text


def _shards(tensors: dict[str, FileTensor], limit: int) -> list[_Shard]:
    shards, size = [_Shard({})], 0
    for name, tensor in tensors.items():
        if shards[-1].tensors and size + tensor.nbytes > limit:
            shards.append(_Shard({}))
            size = 0
        shards[-1].tensors[name] = tensor
        size += tensor.nbytes
    return shards


def _write(file: int, position: int, data: np.ndarray) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(file, rest, position)
        rest, position = rest[done:], position + done


def _write_tensor(file: int, position: int, name: str, tensor: FileTensor, first: int) -> int:
    for data in pieces(name, tensor, first, JOB_PIECES):
        _write(file, position, data)
        position += data.nbytes
    return min(JOB_PIECES * PIECE, tensor.size - first * PIECE) * tensor.dtype.itemsize


def write_checkpoint(
    directory: Path,
    name: str,
    layers: int | None = None,
    *,
    tiny: bool = False,
    threads: int = THREADS,
    progress: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Writes the model `name` into `directory`, which must be new or empty; returns the bytes of its tensors.

    Args:
        layers: decoder layers, from the first; None: all.
        tiny: the shrunken configuration of the family's tiny recipe.
        progress: shows a bar on stderr; None: only when stderr is a terminal.
        shard_bytes: a new file begins before this many bytes.

    What was written is removed if writing fails or is interrupted.
    Raises ValueError (see `config_of`), FileExistsError for a directory with content, and OSError without room for it.
    """
    config = config_of(name, layers, tiny)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: name another directory, or remove it")
    tensors = file_tensors(name, config)
    total = sum(tensor.nbytes for tensor in tensors.values())
    parent = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(parent).free) < 1.01 * total:
        raise OSError(
            f"{directory}: {free / 1e9:.1f} GB are free, the checkpoint takes {total / 1e9:.1f} GB: "
            "free space, name a directory on another disk, or ask for fewer layers"
        )
    directory.mkdir(parents=True, exist_ok=True)
    try:
        _write_files(directory, config, _shards(tensors, shard_bytes), threads, progress)
    except BaseException:
        shutil.rmtree(directory)
        raise
    return total


def _write_files(directory: Path, config: dict, shards: list[_Shard], threads: int, progress: bool | None) -> None:
    text = config.get("text_config", config)
    special = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in text}
    total = sum(shard.nbytes for shard in shards)
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard.tensors}
    for file, content in (
        ("config.json", config),
        ("generation_config.json", special),
        ("model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}),
    ):
        (directory / file).write_text(json.dumps(content, indent=2) + "\n")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = sys.stderr.isatty() if progress is None else progress
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("writing", total=total)
        for file, shard in zip(files, shards, strict=True):
            _write_shard(directory / file, shard, threads, lambda done: bar.advance(task, done))


def _write_shard(path: Path, shard: _Shard, threads: int, advance: Callable[[int], None]) -> None:
    header = shard.header()
    with open(path, "wb") as out, ThreadPoolExecutor(threads, thread_name_prefix="write") as workers:
        out.write(header)
        out.truncate(len(header) + shard.nbytes)
        out.flush()
        position, jobs = len(header), []
        for name, tensor in shard.tensors.items():
            for first in range(0, -(-tensor.size // PIECE), JOB_PIECES):
                at = position + first * PIECE * tensor.dtype.itemsize
                jobs.append(workers.submit(_write_tensor, out.fileno(), at, name, tensor, first))
            position += tensor.nbytes
        try:
            for job in as_completed(jobs):
                advance(job.result())
        except BaseException:
            workers.shutdown(wait=True, cancel_futures=True)
            raise


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(MODELS)}")],
    directory: Annotated[Path, typer.Argument(help="where to write it; must be new or empty")],
    layers: Annotated[int | None, typer.Option(help="decoder layers, from the first (default: all)")] = None,
    tiny: Annotated[bool, typer.Option(help="the shrunken shapes of the family's tiny checkpoint")] = False,
    threads: Annotated[int, typer.Option(min=1, help="threads that write")] = THREADS,
):
    """Writes a checkpoint of real layer shapes with random weights."""
    try:
        total = write_checkpoint(directory, name, layers, tiny=tiny, threads=threads)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    print(f"{name}: {total / 1e9:.2f} GB in {directory}")


if __name__ == "__main__":
    typer.run(main)
