"""SGLang: responses to requests with `return_routed_experts`, one JSON object or an array of them.

`meta_info.routed_experts` (native API), `sgl_ext.routed_experts` or `choices[i].sgl_ext.routed_experts` (OpenAI API) is
base64 of little-endian int32 [rows, layers, K], rows = prompt + generated - 1. The bytes do not say what `layers` and K
are, so both are asked for.
"""

import base64
import binascii
import json
from pathlib import Path

import numpy as np

from ..trace import Trace, TraceError, write_whole
from .base import Facts, Format, Peek, Request, assemble, losses, split_requests, take_layers
from .json_text import json_objects


def recognise(peek: Peek) -> bool:
    return bool(_encoded(peek.first))


def _encoded(response):
    """The holders of `routed_experts` in a response."""
    holders = [response.get("meta_info"), response.get("sgl_ext")]
    choices = response.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            holders += [choice.get("meta_info"), choice.get("sgl_ext")]
    return [h["routed_experts"] for h in holders if isinstance(h, dict) and h.get("routed_experts") is not None]


def read(path: Path, facts: Facts) -> Trace:
    E, K, moe_layers = facts.resolve(E=None, K=None, moe_layers=None)
    layers = facts.given.get("layers", len(moe_layers))
    rows, prompts, model = [], [], None
    for offset, response in json_objects(path):
        where = f"{path}: byte {offset}"
        found = _encoded(response)
        if not found:
            raise TraceError(f"{where}: no routed_experts: ask for them with return_routed_experts")
        model = model or response.get("model")
        counts = response.get("meta_info") or response.get("usage") or {}
        for text in found:
            rows.append(take_layers(_decode(text, layers, K, where), moe_layers, path))
            prompts.append(counts.get("prompt_tokens"))
    counts = facts.prompt_tokens([len(part) for part in rows], prompts)
    requests = [Request(part, None, None, count) for part, count in zip(rows, counts, strict=True)]
    return assemble(requests, facts, E=E, K=K, moe_layers=moe_layers, model=model)


def _decode(text, layers, K, where):
    if not isinstance(text, str):
        raise TraceError(f"{where}: routed_experts: expected a base64 string, got {type(text).__name__}")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise TraceError(f"{where}: routed_experts: not base64, perhaps torn: {error}") from error
    row = 4 * layers * K
    if len(raw) % row:
        raise TraceError(
            f"{where}: routed_experts: {len(raw)} bytes are no multiple of {row} = 4 bytes x {layers} layers x {K} "
            "experts"
        )
    return np.frombuffer(raw, "<i4").reshape(-1, layers, K)


def write(trace: Trace, path: Path) -> list[str]:
    responses = []
    for request in split_requests(trace):
        n, prompt = len(request.experts), request.prompt_tokens
        text = base64.b64encode(request.experts.astype("<i4").tobytes()).decode()
        counts = {"prompt_tokens": prompt, "completion_tokens": n - prompt + 1}
        responses.append({"meta_info": {**counts, "routed_experts": text}, "model": trace.header["model"]})
    text = json.dumps(responses[0] if len(responses) == 1 else responses)
    write_whole(path, lambda file: file.write(text.encode()))
    return losses(trace, ("phase", "model"))


FORMAT = Format("sglang", (".json",), ("E", "K", "moe_layers", "layers", "prompt_tokens"), recognise, read, write)
