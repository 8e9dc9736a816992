"""vLLM: the routing that a server started with `--enable-return-routed-experts` returns.

* `.json`: a completion or chat response, or an array of them. `choices[i].routed_experts` holds the generated rows and
  `prompt_routed_experts` the prompt's, as nested lists [n, layers, K] or as base64 of an `.npy` file; newer versions
  put all rows, prompt first, into `routed_experts`.
* `.npz` with the arrays `prompt_routed_experts` and `routed_experts`, `.npy` with all rows: what the offline API gives.

The layer axis counts all layers of the model, in some versions the MoE layers only: `moe_layers` tells which are read.
"""

import base64
import binascii
import io
import json
from pathlib import Path

import numpy as np

from ..trace import Trace, TraceError, read_npz_arrays, write_whole
from .base import Facts, Format, Peek, Request, assemble, losses, single_request, split_requests, take_layers
from .json_text import json_objects

PROMPT, ROUTED = "prompt_routed_experts", "routed_experts"


def recognise(peek: Peek) -> bool:
    if peek.magic.startswith(b"\x93NUMPY") or ROUTED in peek.names:
        return True
    choices = peek.first.get("choices")
    return PROMPT in peek.first or (
        isinstance(choices, list) and any(isinstance(choice, dict) and choice.get(ROUTED) for choice in choices)
    )


def read(path: Path, facts: Facts) -> Trace:
    rows, prompts, model = [], [], None
    if path.suffix in (".npy", ".npz"):
        if path.suffix == ".npy":
            routed, prompt = _load_npy(path.read_bytes(), str(path)), None
        else:
            arrays = read_npz_arrays(path)
            if ROUTED not in arrays:
                raise TraceError(f"{path}: no array {ROUTED!r}, only {sorted(arrays)}")
            routed, prompt = arrays[ROUTED], arrays.get(PROMPT)
        routed, prompt = (None if part is None else _checked(part, str(path)) for part in (routed, prompt))
        rows.append(routed if prompt is None else np.concatenate([prompt, routed]))
        prompts.append(None if prompt is None else len(prompt))
    else:
        for offset, response in json_objects(path):
            model = model or response.get("model")
            for choice_rows, prompt in _responses(response, f"{path}: byte {offset}"):
                rows.append(choice_rows)
                prompts.append(prompt)
    E, moe_layers = facts.resolve(E=None, moe_layers=None)
    counts = facts.prompt_tokens([len(part) for part in rows], prompts)
    rows = [take_layers(part, moe_layers, path) for part in rows]
    requests = [Request(part, None, None, count) for part, count in zip(rows, counts, strict=True)]
    K = requests[0].experts.shape[2] if requests else 1
    return assemble(requests, facts, E=E, K=K, moe_layers=moe_layers, model=model)


def _responses(response, where):
    """(rows, prompt rows or None) of each choice; the prompt, run once, belongs to the first."""
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise TraceError(f"{where}: a response without choices")
    prompt = response.get(PROMPT)
    prompt = None if prompt is None else _decode(prompt, f"{where}: {PROMPT}")
    usage = response.get("usage") or {}
    for index, choice in enumerate(choices):
        label = f"{where}: choices[{index}].{ROUTED}"
        if not isinstance(choice, dict) or choice.get(ROUTED) is None:
            raise TraceError(f"{label}: absent; start the server with --enable-return-routed-experts")
        routed = _decode(choice[ROUTED], label)
        if prompt is not None:
            if index == 0 and len(prompt):
                if len(routed) and routed.shape[1:] != prompt.shape[1:]:
                    raise TraceError(f"{label}: shape {routed.shape}, the prompt's is {prompt.shape}")
                yield np.concatenate([prompt, routed]) if len(routed) else prompt, len(prompt)
            else:
                yield routed, 0
            continue
        tokens = usage.get("prompt_tokens")
        if tokens is None:
            yield routed, None
        elif len(choices) == 1 and len(routed) not in (tokens + n - 1 for n in [usage.get("completion_tokens", 0)]):
            raise TraceError(
                f"{label}: {len(routed)} rows, expected prompt_tokens + completion_tokens - 1 = "
                f"{tokens + usage.get('completion_tokens', 0) - 1}"
            )
        else:
            yield (routed, tokens) if index == 0 else (routed[tokens:], 0)


def _decode(value, where):
    if isinstance(value, str):
        try:
            raw = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise TraceError(f"{where}: not base64: {error}") from error
        return _checked(_load_npy(raw, where), where)
    try:
        return _checked(np.array(value), where)
    except ValueError as error:
        raise TraceError(f"{where}: rows differ in layers or experts: {error}") from error


def _load_npy(raw, where):
    try:
        return np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise TraceError(f"{where}: not an .npy array, perhaps torn ({len(raw)} bytes): {error}") from error


def _checked(rows, where):
    if rows.size == 0:
        return rows.reshape(0, *(rows.shape[1:] if rows.ndim == 3 else (0, 0))).astype(np.int16)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise TraceError(f"{where}: expected integers [n, layers, K], got {rows.dtype} {rows.shape}")
    return rows


def write(trace: Trace, path: Path) -> list[str]:
    def parts(request):
        return request.experts[: request.prompt_tokens], request.experts[request.prompt_tokens :]

    if path.suffix == ".json":
        responses = []
        for request in split_requests(trace):
            prompt, routed = parts(request)
            responses.append(
                {
                    "model": trace.header["model"],
                    "choices": [{"index": 0, ROUTED: routed.tolist()}],
                    PROMPT: prompt.tolist(),
                }
            )
        text = json.dumps(responses[0] if len(responses) == 1 else responses)
        write_whole(path, lambda file: file.write(text.encode()))
        return losses(trace, ("phase", "model", "K"))
    request = single_request(trace, f"vllm ({path.suffix})")
    if path.suffix == ".npy":
        write_whole(path, lambda file: np.save(file, request.experts))
        return losses(trace, ("K",))
    prompt, routed = parts(request)
    write_whole(path, lambda file: np.savez_compressed(file, **{PROMPT: prompt, ROUTED: routed}))
    return losses(trace, ("phase", "K"))


FORMAT = Format("vllm", (".json", ".npz", ".npy"), ("E", "moe_layers", "prompt_tokens"), recognise, read, write)
