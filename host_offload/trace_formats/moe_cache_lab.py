"""moe-cache-lab: `moe-cache-lab.routing-jsonl`, versions 1 and 2.

The first line is the metadata, each other line the experts of one (token, layer). A file holds one sequence; the order
of the lines is part of the format: prompts by (layer, token), then generated tokens by (token, layer). Version 2 tells
encoder and decoder apart; a trace here is one stack of layers, so one of the two is read (`stage` says which). Its
*unassigned* records (tokens that no expert had room for) have no place in a trace, which holds K experts a token.
"""

import json
from pathlib import Path

from ..trace import DECODE, PREFILL, Trace, TraceError, write_whole
from .base import Facts, Format, Grid, Peek, assemble, losses, single_request
from .json_text import json_lines

FAMILY = "moe-cache-lab.routing-jsonl"
_META = {
    "record_type", "format", "format_version", "model_id", "source_text", "generated_text", "capture_method",
    "created_at", "transformers_version", "model_revision",
}  # fmt: skip
_EVENT = {"record_type", "phase", "token_position", "layer", "selected_experts", "token_id", "selected_probabilities"}
_METADATA = {1: _META | {"num_experts", "experts_per_token"}, 2: _META | {"routing_stages"}}
_EVENTS = {1: _EVENT, 2: _EVENT | {"routing_stage", "assignment_state", "unassigned_reason"}}
# Phases of a version and stage in their order, each with the phase of a trace row.
_PHASES = {
    (1, None): {"prompt": PREFILL, "generated": DECODE},
    (2, "encoder"): {"source": PREFILL},
    (2, "decoder"): {"decoder_prompt": PREFILL, "decoder_generated": DECODE},
}


def recognise(peek: Peek) -> bool:
    return peek.first.get("format") == FAMILY


def read(path: Path, facts: Facts) -> Trace:
    lines = json_lines(path)
    number, meta = next(lines, (1, {}))
    version = meta.get("format_version")
    if meta.get("record_type") != "metadata" or meta.get("format") != FAMILY or version not in _METADATA:
        raise TraceError(f"{path}: line {number}: expected the metadata of {FAMILY} version 1 or 2")
    _closed(path, number, meta, _METADATA[version], {"model_id"})
    stage = _stage(path, number, meta, facts) if version == 2 else None
    profile = {} if stage is None else stage
    name = profile.get("routing_stage")
    num_experts = profile.get("num_experts", meta.get("num_experts"))
    width = profile.get("assigned_experts_per_token", meta.get("experts_per_token"))

    grid, before = Grid(path), {}
    for number, event in lines:
        if event.get("record_type") != "routing_selection":
            grid.fail(number, f"record_type is {event.get('record_type')!r}, expected 'routing_selection'")
        required = {"phase", "token_position", "layer", "selected_experts"}
        if version == 2:
            required |= {"routing_stage", "assignment_state", "selected_probabilities"}
        _closed(path, number, event, _EVENTS[version], required)
        if event.get("routing_stage") != name:
            if event["routing_stage"] not in ("encoder", "decoder"):
                grid.fail(number, f"routing_stage is {event['routing_stage']!r}, expected 'encoder' or 'decoder'")
            continue
        phases = _PHASES[version, name]
        if event["phase"] not in phases:
            grid.fail(number, f"phase is {event['phase']!r}, expected one of {', '.join(phases)}")
        if event.get("assignment_state", "assigned") != "assigned":
            grid.fail(number, "an unassigned record: a trace holds K experts for every token and layer")
        token, layer, experts = event["token_position"], event["layer"], event["selected_experts"]
        phase = phases[event["phase"]]
        weights = event.get("selected_probabilities") or None
        grid.add(number, 0, token, layer, experts, weights, phase=phase)
        if width is not None and len(experts) != width:
            grid.fail(number, f"{len(experts)} experts, the metadata says {width}")
        if num_experts is not None and max(experts) >= num_experts:
            grid.fail(number, f"expert {max(experts)} is outside 0..{num_experts - 1}")
        if weights and not all(0 <= weight <= 1 for weight in weights):
            grid.fail(number, f"selected_probabilities {weights} are not all within 0..1")
        place = (phase, layer, token) if phase == PREFILL else (phase, token, layer)
        if before and place <= before["place"]:
            grid.fail(number, f"{event['phase']} token {token} layer {layer} is out of the format's order")
        if phase == PREFILL:
            before["prompt"] = max(token, before.get("prompt", -1))
        elif token <= before.get("prompt", -1):
            grid.fail(number, f"generated token {token} is not after the prompt, which ends at {before['prompt']}")
        before["place"] = place
    ((_, request, _),) = grid.requests()
    E, K = facts.resolve(E=num_experts, K=grid.K)
    header = {"revision": meta["model_revision"]} if meta.get("model_revision") else {}
    return assemble(
        [request], facts, E=E, K=K, moe_layers=facts.moe_layers(grid.layers()), model=meta["model_id"], **header
    )


def _closed(path, number, record, known, required):
    """The format is closed: fields that it does not define are errors."""
    unknown, missing = sorted(set(record) - known), sorted(required - set(record))
    if unknown or missing:
        raise TraceError(f"{path}: line {number}: missing fields {missing}, unknown fields {unknown}")


def _stage(path, number, meta, facts):
    profiles = meta.get("routing_stages")
    fields = {"routing_stage", "num_experts", "assigned_experts_per_token", "allows_unassigned"}
    if not isinstance(profiles, list) or not all(isinstance(p, dict) and set(p) == fields for p in profiles):
        raise TraceError(f"{path}: line {number}: routing_stages: expected a list of objects with {sorted(fields)}")
    by_name = {profile["routing_stage"]: profile for profile in profiles}
    if not by_name or not set(by_name) <= {"encoder", "decoder"}:
        raise TraceError(f"{path}: line {number}: routing_stages: expected encoder, decoder or both, got {[*by_name]}")
    (stage,) = facts.resolve(stage=next(iter(by_name)) if len(by_name) == 1 else None)
    if stage not in by_name:
        raise TraceError(f"{path}: stage={stage!r}: the file holds {', '.join(by_name)}")
    return by_name[stage]


def write(trace: Trace, path: Path, version: int) -> list[str]:
    request = single_request(trace, f"moe-cache-lab-v{version}")
    header, weights = trace.header, request.weights
    meta = {
        "record_type": "metadata",
        "format": FAMILY,
        "format_version": version,
        "model_id": header["model"],
        "capture_method": "moe_jax trace",
        "model_revision": header.get("revision"),
    }
    phases = {PREFILL: "prompt", DECODE: "generated"}
    if version == 1:
        meta |= {"num_experts": header["E"], "experts_per_token": header["K"]}
    else:
        phases = {phase: f"decoder_{word}" for phase, word in phases.items()}
        profile = {"routing_stage": "decoder", "num_experts": header["E"], "assigned_experts_per_token": header["K"]}
        meta["routing_stages"] = [profile | {"allows_unassigned": False}]
    within = weights is not None and bool(((weights >= 0) & (weights <= 1)).all())
    layers, n, prompt = header["moe_layers"], len(request.experts), request.prompt_tokens
    if not n:
        raise TraceError(f"export: format moe-cache-lab-v{version} holds at least one record, the trace none")
    places = [(token, i) for i in range(len(layers)) for token in range(prompt)]
    places += [(token, i) for token in range(prompt, n) for i in range(len(layers))]

    def write_lines(file):
        file.write(json.dumps(meta).encode() + b"\n")
        for token, i in places:
            event = {
                "record_type": "routing_selection",
                "phase": phases[PREFILL if token < prompt else DECODE],
                "token_position": token,
                "layer": layers[i],
                "selected_experts": request.experts[token, i].tolist(),
                "selected_probabilities": weights[token, i].tolist() if within else [],
            }
            if version == 2:
                event |= {"routing_stage": "decoder", "assignment_state": "assigned"}
            file.write(json.dumps(event).encode() + b"\n")

    write_whole(path, write_lines)
    holds = ["phase", "moe_layers", "E", "K", "model"] + ["weights"] * within
    return losses(trace, holds + ["revision"] * isinstance(header.get("revision"), str))


FORMATS = [
    Format(
        f"moe-cache-lab-v{version}",
        (".jsonl",),
        ("E", "moe_layers") + ("stage",) * (version == 2),
        lambda peek, version=version: recognise(peek) and peek.first.get("format_version") == version,
        read,
        lambda trace, path, version=version: write(trace, path, version),
    )
    for version in (1, 2)
]
