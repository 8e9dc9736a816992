"""The gpt-oss routes extract: an `.npz` of many decode-only generations, ids and probabilities.

`experts` int8 [T, 24, 4], `probs` float16 of the same shape, `offsets` int64 [R + 1] (generation r is the rows
offsets[r]..offsets[r + 1]), and for each generation `start` (position of its first row), `dataset` and `category`.
"""

from pathlib import Path

import numpy as np

from ..trace import DECODE, Trace, TraceError, read_npz_arrays, write_whole
from .base import Facts, Format, Peek, Request, assemble, losses, split_requests
from .gptoss_fingerprint import MODELS

NAMES = {"experts", "probs", "offsets", "start", "dataset", "category"}


def recognise(peek: Peek) -> bool:
    return {"experts", "probs", "offsets"} <= peek.names


def read(path: Path, facts: Facts) -> Trace:
    arrays = read_npz_arrays(path)
    if set(arrays) != NAMES:
        raise TraceError(f"{path}: holds {sorted(arrays)}, expected {sorted(NAMES)}")
    experts, probs, offsets = arrays["experts"], arrays["probs"], arrays["offsets"]
    if experts.ndim != 3 or experts.dtype.kind not in "iu" or probs.shape != experts.shape or probs.dtype.kind != "f":
        raise TraceError(
            f"{path}: experts {experts.dtype} {experts.shape}, probs {probs.dtype} {probs.shape}: expected integers "
            "and floats [T, L, K]"
        )
    bad = offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(experts)
    if bad or (np.diff(offsets) <= 0).any():
        raise TraceError(
            f"{path}: offsets: expected rising numbers from 0 to {len(experts)} rows, got {offsets.tolist()}"
        )
    R = len(offsets) - 1
    for name in ("start", "dataset", "category"):
        if arrays[name].shape != (R,):
            raise TraceError(f"{path}: {name}: shape {arrays[name].shape}, expected ({R},) as offsets say")
    cuts = offsets[1:-1]
    parts = zip(np.split(experts, cuts), np.split(probs, cuts), strict=True)
    requests = [Request(ids, weights, None, 0) for ids, weights in parts]
    L, K = experts.shape[1:]
    model, E = MODELS.get(L, (None, None))
    E, _ = facts.resolve(E=facts.given.get("E", E), K=K)
    return assemble(
        requests,
        facts,
        E=E,
        K=K,
        moe_layers=facts.moe_layers(list(range(L))),
        model=model,
        start=arrays["start"].tolist(),
        datasets=arrays["dataset"].tolist(),
        domains=arrays["category"].tolist(),
    )


def write(trace: Trace, path: Path) -> list[str]:
    requests, header = split_requests(trace), trace.header
    numbers = sorted(set(trace.request.tolist()))
    if header["E"] > 128:
        raise TraceError(f"export: format gptoss-routes holds ids as int8, and E is {header['E']}")
    if not requests:
        raise TraceError("export: format gptoss-routes holds at least one request, the trace none")
    kept, labels = [], {}
    for number, request in zip(numbers, requests, strict=True):
        if request.weights is None:
            raise TraceError("export: format gptoss-routes holds weights, and those of this trace are unknown")
        if request.prompt_tokens == len(request.experts):
            raise TraceError(f"export: request {number}: format gptoss-routes holds decoded rows, and it has none")
        kept.append((request.experts[request.prompt_tokens :], request.weights[request.prompt_tokens :]))
    # What the header does not hold per request is empty; `start` is then the number of prompt rows.
    defaults = {
        "start": ("start", int, [request.prompt_tokens for request in requests]),
        "dataset": ("datasets", str, [""] * len(requests)),
        "category": ("domains", str, [""] * len(requests)),
    }
    told = []
    for name, (key, kind, default) in defaults.items():
        values = header.get(key)
        whole = isinstance(values, list) and len(values) > numbers[-1] and all(isinstance(v, kind) for v in values)
        labels[name] = [values[number] for number in numbers] if whole else default
        told += [key] * whole
    arrays = {
        "experts": np.concatenate([ids for ids, _ in kept]).astype(np.int8),
        "probs": np.concatenate([weights for _, weights in kept]),
        "offsets": np.cumsum([0, *(len(ids) for ids, _ in kept)]),
        **{name: np.array(values) for name, values in labels.items()},
    }
    write_whole(path, lambda file: np.savez_compressed(file, **arrays))
    holds = ["weights", "phase", "K", "chunk", *told]
    if MODELS.get(arrays["experts"].shape[1]) == (header["model"], header["E"]):
        holds += ["model", "E"]
    if header["moe_layers"] == list(range(len(header["moe_layers"]))):
        holds += ["moe_layers"]
    prompt_rows = int((trace.phase != DECODE).sum())
    return losses(trace, holds) + [f"{prompt_rows} prompt rows"] * bool(prompt_rows)


FORMAT = Format("gptoss-routes", (".npz",), ("E", "moe_layers"), recognise, read, write)
