"""RTRACE01: the router's softmax of every token and layer, as binary records.

8 bytes `RTRACE01`, int32 E, int32 version (1), then records of int32 token, int32 layer and E float32, all
little-endian. A file holds one sequence; `token` counts its tokens, in whatever order the records come. It has all
scores, and so neither K nor the weights: the K highest scores are the experts, and their scores the weights.
"""

from pathlib import Path

import numpy as np

from ..trace import Trace, TraceError, write_whole
from .base import Facts, Format, Peek, Request, assemble, losses, single_request

MAGIC, VERSION, HEAD = b"RTRACE01", 1, 16


def recognise(peek: Peek) -> bool:
    return peek.magic == MAGIC


def _record(E):
    return np.dtype([("token", "<i4"), ("layer", "<i4"), ("scores", "<f4", (E,))])


def read(path: Path, facts: Facts) -> Trace:
    raw = path.read_bytes()
    if raw[:8] != MAGIC or len(raw) < HEAD:
        raise TraceError(f"{path}: byte 0: expected RTRACE01 and two int32, got {len(raw)} bytes {raw[:8]!r}")
    E, version = np.frombuffer(raw, "<i4", 2, 8).tolist()
    if version != VERSION:
        raise TraceError(f"{path}: byte 12: version {version}, expected {VERSION}")
    if not 1 <= E <= 2**15:
        raise TraceError(f"{path}: byte 8: {E} experts, expected 1..32768")
    record = _record(E)
    count, rest = divmod(len(raw) - HEAD, record.itemsize)
    if rest:
        at = HEAD + count * record.itemsize
        raise TraceError(f"{path}: byte {at}: record {count} has {rest} of {record.itemsize} bytes, perhaps torn")
    if not count:
        raise TraceError(f"{path}: byte {HEAD}: holds no record")
    records = np.frombuffer(raw, record, count, HEAD)

    def check(bad, problem):
        for index in np.flatnonzero(bad)[:1].tolist():
            raise TraceError(
                f"{path}: byte {HEAD + index * record.itemsize}: record {index}: {problem(records[index])}"
            )

    check(records["token"] < 0, lambda r: f"token {r['token']} is negative")
    check(records["layer"] < 0, lambda r: f"layer {r['layer']} is negative")
    sums = records["scores"].sum(1, dtype=np.float64)
    wrong = ~(np.abs(sums - 1) < 0.01) | (records["scores"] < 0).any(1)
    check(wrong, lambda r: f"the scores are no softmax: their sum is {r['scores'].sum():.6g}")
    order = np.lexsort((records["layer"], records["token"]))
    token, layer = records["token"][order], records["layer"][order]
    layers = np.unique(layer)
    L = len(layers)
    twice = np.zeros(count, bool)
    twice[order[1:]] = (np.diff(token) == 0) & (np.diff(layer) == 0)
    check(twice, lambda r: f"token {r['token']} layer {r['layer']} occurs twice")
    _, first, found = np.unique(token, return_index=True, return_counts=True)
    short = np.zeros(count, bool)
    short[order[first]] = found != L
    check(short, lambda r: f"token {r['token']} has {(token == r['token']).sum()} of {L} layers, perhaps torn")

    K, _ = facts.resolve(K=None, E=E)
    moe_layers = facts.moe_layers(layers.tolist())
    if K > E:
        raise TraceError(f"{path}: K={K}: the file has {E} experts a layer")
    scores = records["scores"][order].reshape(-1, L, E)
    experts = _highest(scores.astype(np.float16), K)
    (prompt,) = facts.prompt_tokens([len(scores)])
    request = Request(experts, np.take_along_axis(scores, experts, -1), scores, prompt)
    return assemble([request], facts, E=E, K=K, moe_layers=moe_layers)


def _highest(scores, K):
    """The K highest of the last axis, ties by rising id."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :K]


def write(trace: Trace, path: Path) -> list[str]:
    request = single_request(trace, "rtrace01")
    if request.scores is None:
        raise TraceError("export: format rtrace01 holds the scores of all experts, and the trace has none")
    K, E = trace.header["K"], trace.header["E"]
    scores = request.scores.astype(np.float32)
    wrong = ~(np.abs(scores.sum(-1) - 1) < 0.01) | (scores < 0).any(-1)
    if wrong.any():
        row, layer = np.argwhere(wrong)[0].tolist()
        raise TraceError(f"export: scores: row {row} layer {layer}: format rtrace01 holds a softmax, these are none")
    differ = (np.sort(_highest(request.scores, K), -1) != np.sort(request.experts, -1)).any(-1)
    if differ.any():
        row, layer = np.argwhere(differ)[0].tolist()
        raise TraceError(
            f"export: row {row} layer {layer}: the experts {request.experts[row, layer].tolist()} are not the {K} of "
            "highest score, so format rtrace01 would tell another routing"
        )
    n, L = scores.shape[:2]
    records = np.zeros(n * L, _record(E))
    records["token"], records["layer"] = np.repeat(np.arange(n), L), np.tile(trace.header["moe_layers"], n)
    records["scores"] = scores.reshape(-1, E)
    head = MAGIC + np.array([E, VERSION], "<i4").tobytes()
    write_whole(path, lambda file: file.write(head + records.tobytes()))
    chosen = np.take_along_axis(request.scores, request.experts.astype(np.int64), -1)
    same = request.weights is None or bool((chosen == request.weights).all())
    holds = ["scores", "moe_layers", "E"] + ["weights"] * same
    return losses(trace, holds)


FORMAT = Format("rtrace01", (".rtrace", ".bin"), ("E", "K", "moe_layers", "prompt_tokens"), recognise, read, write)
