"""GPT-OSS-MoE-ExpertFingerprinting: JSON with the decode routing of gpt-oss beside the text it generated.

An array of `{row_index, dataset, category, finished_successfully, has_repetition, original_prompt, full_text,
generated_only, router_data}`; `router_data` is a list of objects
`{"token_<position>": {"layer_<i>": {"selected_experts": [K], "selected_probs": [K]}}}` with consecutive positions.
Files run to gigabytes: one generation is in memory at a time, and of each only ids, probabilities and labels are kept,
never text.
"""

import json
from pathlib import Path

from ..trace import DECODE, Trace, TraceError, write_whole
from .base import Facts, Format, Grid, Peek, assemble, losses, split_requests
from .json_text import json_objects

# Layers -> experts of the two gpt-oss models; every layer is a MoE layer.
MODELS = {24: ("gpt-oss-20b", 32), 36: ("gpt-oss-120b", 128)}
# Labels of a generation, and the header's list of them, by the number of the request.
LABELS = {
    "category": "domains",
    "dataset": "datasets",
    "row_index": "row_index",
    "finished_successfully": "finished",
    "has_repetition": "has_repetition",
}


def recognise(peek: Peek) -> bool:
    return "router_data" in peek.first


def read(path: Path, facts: Facts) -> Trace:
    labels, starts, requests, layers = {name: [] for name in LABELS.values()}, [], [], None
    for record, (offset, generation) in enumerate(json_objects(path)):
        where = f"{path}: record {record} (byte {offset})"
        tokens = _tokens(generation, where)
        grid = Grid(path, f"record {record} (byte {offset}), position")
        for position, by_layer in tokens:
            if not isinstance(by_layer, dict) or not by_layer:
                grid.fail(position, f"expected an object of layers, got {str(by_layer)[:40]}")
            for name, chosen in by_layer.items():
                layer = _number(name, "layer_")
                if layer is None or not isinstance(chosen, dict):
                    grid.fail(position, f"{name!r}: expected layer_<i> with an object")
                experts, weights = chosen.get("selected_experts"), chosen.get("selected_probs")
                if weights is None:
                    grid.fail(position, f"{name}: no selected_probs")
                grid.add(position, 0, position, layer, experts, weights, phase=DECODE)
        if layers is not None and grid.layers() != layers:
            raise TraceError(f"{where}: layers {grid.layers()}, the records before had {layers}")
        layers = grid.layers()
        ((_, request, _),) = grid.requests()
        requests.append(request)
        starts.append(tokens[0][0])
        for name, key in LABELS.items():
            labels[key].append(generation.get(name))
    if not requests:
        raise TraceError(f"{path}: holds no generation")
    model, E = MODELS.get(len(layers), (None, None))
    E, K = facts.resolve(E=facts.given.get("E", E), K=requests[0].experts.shape[2])
    kept = {key: values for key, values in labels.items() if any(value is not None for value in values)}
    return assemble(
        requests, facts, E=E, K=K, moe_layers=facts.moe_layers(layers), model=model, start=starts, **kept
    )  # fmt: skip


def _tokens(generation, where):
    """(position, layers) by rising position, which must be consecutive."""
    data = generation.get("router_data")
    if not isinstance(data, list) or not all(isinstance(part, dict) for part in data):
        raise TraceError(f"{where}: router_data: expected a list of objects, got {str(data)[:40]}")
    tokens = []
    for part in data:
        for name, layers in part.items():
            position = _number(name, "token_")
            if position is None:
                raise TraceError(f"{where}: router_data: {name!r}, expected token_<position>")
            tokens.append((position, layers))
    tokens.sort(key=lambda token: token[0])
    if not tokens:
        raise TraceError(f"{where}: router_data: no token")
    for (before, _), (position, _) in zip(tokens, tokens[1:], strict=False):
        if position != before + 1:
            raise TraceError(f"{where}: router_data: token_{position} follows token_{before}")
    return tokens


def _number(name, prefix):
    digits = name.removeprefix(prefix)
    return int(digits) if name.startswith(prefix) and digits.isascii() and digits.isdigit() else None


def write(trace: Trace, path: Path) -> list[str]:
    requests, header = split_requests(trace), trace.header
    numbers = sorted(set(trace.request.tolist()))
    size = numbers[-1] + 1 if numbers else 0
    held = {n: header[k] for n, k in LABELS.items() if isinstance(header.get(k), list) and len(header[k]) >= size}
    start = header.get("start") if isinstance(header.get("start"), list) and len(header["start"]) >= size else None
    names = [f"layer_{layer}" for layer in header["moe_layers"]]
    for number, request in zip(numbers, requests, strict=True):
        if request.weights is None:
            raise TraceError("export: format gptoss-fingerprint holds weights, and those of this trace are unknown")
        if request.prompt_tokens == len(request.experts):
            raise TraceError(f"export: request {number}: format gptoss-fingerprint holds decoded rows, and it has none")

    def generation(number, request):
        first = request.prompt_tokens if start is None else start[number]
        tokens = {}
        for i, row in enumerate(range(request.prompt_tokens, len(request.experts))):
            tokens[f"token_{first + i}"] = {
                name: {
                    "selected_experts": request.experts[row, layer].tolist(),
                    "selected_probs": request.weights[row, layer].tolist(),
                }
                for layer, name in enumerate(names)
            }
        labels = {"row_index": number} | {name: values[number] for name, values in held.items()}
        return labels | {"router_data": [tokens]}

    def write_array(file):
        file.write(b"[")
        for index, (number, request) in enumerate(zip(numbers, requests, strict=True)):
            file.write((b",\n" if index else b"\n") + json.dumps(generation(number, request)).encode())
        file.write(b"\n]\n")

    write_whole(path, write_array)
    prompts = sum(request.prompt_tokens for request in requests)
    holds = ["weights", "phase", "moe_layers", "K", "chunk", *(LABELS[name] for name in held)]
    holds += ["start"] * (start is not None)
    if MODELS.get(len(names)) == (header["model"], header["E"]):
        holds += ["model", "E"]
    return losses(trace, holds) + [f"{prompts} prompt rows"] * bool(prompts)


FORMAT = Format("gptoss-fingerprint", (".json",), ("E", "moe_layers"), recognise, read, write)
