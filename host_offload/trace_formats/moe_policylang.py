"""moe-policylang: the JSON lines of its trace recorder.

The first line is the header (`model_name`, `num_layers`, `num_experts`, `top_k`, `num_entries`), each other line one
(prompt, token, layer): `p`, `t`, `l`, the experts `e`, their scores `s`, and where recorded the softmax of all experts
`sm`, the phase `ph` and the domain `dm`. Token ids, logits and losses, which it may hold too, are not read.
"""

import json
from pathlib import Path

from ..trace import DECODE, PREFILL, Trace, TraceError, write_whole
from .base import Facts, Format, Grid, Peek, assemble, losses, split_requests
from .json_text import json_lines

HEADER = ("model_name", "num_layers", "num_experts", "top_k", "num_entries")
_PHASES = {"prefill": PREFILL, "decode": DECODE}


def recognise(peek: Peek) -> bool:
    return {"model_name", "num_layers", "num_experts", "top_k"} <= set(peek.first)


def read(path: Path, facts: Facts) -> Trace:
    lines = json_lines(path)
    number, header = next(lines, (1, {}))
    missing = [name for name in HEADER if name not in header]
    if missing:
        raise TraceError(f"{path}: line {number}: header: missing {', '.join(missing)}")
    grid, domains, entries = Grid(path), {}, 0
    for number, entry in lines:
        absent = [name for name in "tle" if name not in entry]
        if absent:
            grid.fail(number, f"missing {', '.join(absent)}")
        phase = entry.get("ph")
        if phase is not None and phase not in _PHASES:
            grid.fail(number, f"ph is {phase!r}, expected 'prefill' or 'decode'")
        prompt, layer, experts = entry.get("p", 0), entry["l"], entry["e"]
        grid.add(number, prompt, entry["t"], layer, experts, entry.get("s"), entry.get("sm"), _PHASES.get(phase))
        if max(experts) >= header["num_experts"]:
            grid.fail(number, f"expert {max(experts)} is outside 0..{header['num_experts'] - 1}")
        if len(experts) != header["top_k"]:
            grid.fail(number, f"{len(experts)} experts, the header says top_k {header['top_k']}")
        if grid.E not in (None, header["num_experts"]):
            grid.fail(number, f"sm has {grid.E} numbers, the header says {header['num_experts']} experts")
        domain = entry.get("dm")
        if domains.setdefault(prompt, domain) != domain:
            grid.fail(number, f"dm is {domain!r}, prompt {prompt} had {domains[prompt]!r}")
        entries += 1
    if entries != header["num_entries"]:
        raise TraceError(
            f"{path}: line {number}: the file ends after {entries} of {header['num_entries']} entries, perhaps torn"
        )
    found = grid.requests()
    rows, held = [len(request.experts) for _, request, _ in found], [prompt for _, _, prompt in found]
    counts = facts.prompt_tokens(rows, held)
    requests = [request._replace(prompt_tokens=count) for (_, request, _), count in zip(found, counts, strict=True)]
    E, K = facts.resolve(E=header["num_experts"], K=header["top_k"])
    names = [domains[number] for number, _, _ in found]
    extra = {"domains": names} if any(names) else {}
    return assemble(
        requests, facts, E=E, K=K, moe_layers=facts.moe_layers(grid.layers()), model=header["model_name"], **extra
    )


def write(trace: Trace, path: Path) -> list[str]:
    requests, header = split_requests(trace), trace.header
    layers = header["moe_layers"]
    domains = header.get("domains")
    tagged = isinstance(domains, list) and all(isinstance(d, str) for d in domains)
    numbers = sorted(set(trace.request.tolist()))
    tagged = tagged and bool(numbers) and len(domains) > numbers[-1]
    head = {
        "model_name": header["model"],
        "num_layers": len(layers),
        "num_experts": header["E"],
        "top_k": header["K"],
        "num_entries": len(trace.experts) * len(layers),
        "records_full_softmax": trace.scores is not None,
    }

    def write_lines(file):
        file.write(json.dumps(head).encode() + b"\n")
        for p, request in enumerate(requests):
            for token in range(len(request.experts)):
                for i, layer in enumerate(layers):
                    weights, scores = (
                        None if part is None else part[token, i].tolist() for part in (request.weights, request.scores)
                    )
                    entry = {"p": p, "t": token, "l": layer, "e": request.experts[token, i].tolist(), "s": weights}
                    if scores is not None:
                        entry["sm"] = scores
                    entry["ph"] = "prefill" if token < request.prompt_tokens else "decode"
                    if tagged:
                        entry["dm"] = domains[numbers[p]]
                    file.write(json.dumps(entry).encode() + b"\n")

    write_whole(path, write_lines)
    holds = ["weights", "scores", "phase", "moe_layers", "E", "K", "model"]
    return losses(trace, holds + ["domains"] * tagged)


FORMAT = Format("moe-policylang", (".jsonl",), ("E", "K", "moe_layers", "prompt_tokens"), recognise, read, write)
