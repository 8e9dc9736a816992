"""Formats of other systems: files written by hand from their description, round trips, and damage that is named."""

import base64
import io
import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.trace import Trace, TraceError, concatenate, load_trace
from host_offload.trace_formats import FORMATS, export_trace, import_trace, recognise
from host_offload.trace_formats.json_text import json_objects

# Two prompt tokens and one generated token through MoE layers 1 and 2 of a model whose layer 0 is dense.
ROUTES = [[[3, 1], [0, 2]], [[1, 0], [2, 3]], [[2, 3], [1, 0]]]
WEIGHTS = [[[0.75, 0.25], [0.5, 0.25]], [[0.5, 0.5], [1, 0]], [[0.75, 0.125], [0.625, 0.375]]]
BY_WEIGHT = [[[3, 1], [0, 2]], [[0, 1], [2, 3]], [[2, 3], [1, 0]]]  # a tie puts the lower id first
BY_ID = np.sort(ROUTES).tolist()


def check(trace, experts, phase=(0, 0, 1), layers=(1, 2), step=(0, 0, 1)):
    assert trace.experts.tolist() == experts
    assert trace.phase.tolist() == list(phase) and trace.step.tolist() == list(step)
    assert trace.header["moe_layers"] == list(layers) and trace.header["E"] == 4 and trace.header["K"] == 2


def put(path, *objects):
    path.write_text("\n".join(json.dumps(o) for o in objects) + "\n")
    return path


def encoded_npy(array):
    file = io.BytesIO()
    np.save(file, np.array(array, np.int16))
    return base64.b64encode(file.getvalue()).decode()


def with_dense(routes):
    """The layer axis of a server that counts the dense layer 0 too."""
    return [[[0, 0], *token] for token in routes]


# ---------------------------------------------------------------------------------------------------------------- vLLM


def vllm_response(**choice):
    return {"id": "cmpl-1", "model": "m", "choices": [{"index": 0, "text": "secret", **choice}]}


def test_vllm_nested_lists(tmp_path):
    response = vllm_response(routed_experts=with_dense(ROUTES[2:])) | {"prompt_routed_experts": with_dense(ROUTES[:2])}
    path = put(tmp_path / "r.json", response)
    trace = load_trace(path, E=4, moe_layers=[1, 2])
    check(trace, BY_ID)
    assert trace.header["model"] == "m" and trace.header["weights"] == "unknown"
    assert (trace.weights == 0.5).all() and "secret" not in json.dumps(trace.header)


def test_vllm_base64_of_all_rows(tmp_path):
    usage = {"usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    path = put(tmp_path / "r.json", vllm_response(routed_experts=encoded_npy(ROUTES)) | usage)
    check(load_trace(path, E=4, moe_layers=[1, 2]), BY_ID)
    usage["usage"]["completion_tokens"] = 3
    put(path, vllm_response(routed_experts=encoded_npy(ROUTES)) | usage)
    with pytest.raises(TraceError, match=r"r\.json: byte 0: choices\[0\]\.routed_experts: 3 rows, .*- 1 = 4"):
        load_trace(path, E=4, moe_layers=[1, 2])


def test_vllm_choices_share_the_prompt(tmp_path):
    response = {"prompt_routed_experts": ROUTES[:2], "choices": [{"routed_experts": ROUTES[2:]}] * 2}
    trace = load_trace(put(tmp_path / "r.json", response), E=4, moe_layers=[1, 2])
    assert trace.request.tolist() == [0, 0, 0, 1] and trace.phase.tolist() == [0, 0, 1, 1]


def test_vllm_arrays(tmp_path):
    np.savez(tmp_path / "r.npz", prompt_routed_experts=np.int16(ROUTES[:2]), routed_experts=np.int16(ROUTES[2:]))
    check(load_trace(tmp_path / "r.npz", E=4, moe_layers=[1, 2]), BY_ID)
    np.save(tmp_path / "r.npy", np.int16(ROUTES))
    check(load_trace(tmp_path / "r.npy", E=4, moe_layers=[1, 2], prompt_tokens=2), BY_ID)
    with pytest.raises(
        TraceError, match=r"r\.npy: .* does not hold E \(experts a layer\); moe_layers .* pass E=\.\.\."
    ):
        load_trace(tmp_path / "r.npy")
    with pytest.raises(TraceError, match=r"does not hold prompt_tokens .*decode only\): pass prompt_tokens=\.\.\."):
        load_trace(tmp_path / "r.npy", E=4, moe_layers=[1, 2])
    with pytest.raises(TraceError, match=r"layer axis has 2 entries: neither the 3 of moe_layers nor all"):
        load_trace(tmp_path / "r.npy", E=4, moe_layers=[1, 2, 3], prompt_tokens=0)
    with pytest.raises(TraceError, match=r"experts: row 0 layer 0: expert 3 is outside 0\.\.2"):
        load_trace(tmp_path / "r.npy", E=3, moe_layers=[1, 2], prompt_tokens=0)
    (tmp_path / "r.npy").write_bytes((tmp_path / "r.npy").read_bytes()[:-3])
    with pytest.raises(TraceError, match=r"r\.npy: not an \.npy array, perhaps torn"):
        load_trace(tmp_path / "r.npy", E=4, moe_layers=[1, 2], prompt_tokens=0)


# -------------------------------------------------------------------------------------------------------------- SGLang


def test_sglang(tmp_path):
    text = base64.b64encode(np.array(ROUTES, "<i4").tobytes()).decode()
    native = {"text": "secret", "meta_info": {"prompt_tokens": 2, "completion_tokens": 2, "routed_experts": text}}
    facts = dict(E=4, K=2, moe_layers=[1, 2])
    check(load_trace(put(tmp_path / "r.json", native), **facts), BY_ID)
    openai = {"model": "m", "choices": [{"sgl_ext": {"routed_experts": text}}], "usage": {"prompt_tokens": 2}}
    check(load_trace(put(tmp_path / "r.json", openai), **facts), BY_ID)
    dense = base64.b64encode(np.array(with_dense(ROUTES), "<i4").tobytes()).decode()
    native["meta_info"]["routed_experts"] = dense
    check(load_trace(put(tmp_path / "r.json", native), layers=3, **facts), BY_ID)
    native["meta_info"]["routed_experts"] = text[:-8]
    with pytest.raises(
        TraceError, match=r"byte 0: routed_experts: 42 bytes are no multiple of 16 = 4 bytes x 2 layers"
    ):
        load_trace(put(tmp_path / "r.json", native), **facts)
    native["meta_info"]["routed_experts"] = text[:-1]
    with pytest.raises(TraceError, match="not base64, perhaps torn"):
        load_trace(put(tmp_path / "r.json", native), **facts)
    with pytest.raises(TraceError, match="does not hold K"):
        load_trace(tmp_path / "r.json", E=4, moe_layers=[1, 2])


# ------------------------------------------------------------------------------------------------------- moe-cache-lab


def cache_lab(version, weights=True):
    meta = {"record_type": "metadata", "format": "moe-cache-lab.routing-jsonl", "format_version": version}
    meta |= {"model_id": "m", "model_revision": "abc", "source_text": "secret"}
    phases = ("prompt", "generated")
    extra = {}
    if version == 1:
        meta |= {"num_experts": 4, "experts_per_token": 2}
    else:
        profile = {"num_experts": 4, "assigned_experts_per_token": 2, "allows_unassigned": True}
        meta["routing_stages"] = [profile | {"routing_stage": stage} for stage in ("encoder", "decoder")]
        phases = ("decoder_prompt", "decoder_generated")
        extra = {"routing_stage": "decoder", "assignment_state": "assigned"}
    lines = [meta]
    if version == 2:
        lines.append(event("source", 0, 0, [3], [1.0]) | {"routing_stage": "encoder", "assignment_state": "assigned"})
        lines[1]["selected_experts"], lines[1]["selected_probabilities"] = [3, 0], [0.5, 0.25]
    for token, layer in ((5, 1), (6, 1), (5, 2), (6, 2), (7, 1), (7, 2)):
        phase, row = phases[token == 7], token - 5
        chosen = ROUTES[row][layer - 1], WEIGHTS[row][layer - 1] if weights else []
        lines.append(event(phase, token, layer, *chosen) | extra)
    return lines


def event(phase, token, layer, experts, weights):
    return {
        "record_type": "routing_selection",
        "phase": phase,
        "token_position": token,
        "layer": layer,
        "selected_experts": experts,
        "selected_probabilities": weights,
    }


@pytest.mark.parametrize("version", [1, 2])
def test_moe_cache_lab(tmp_path, version):
    facts = {"stage": "decoder"} if version == 2 else {}
    path = put(tmp_path / "r.jsonl", *cache_lab(version))
    trace = load_trace(path, **facts)
    check(trace, BY_WEIGHT)
    assert sorted(trace.weights[0].ravel().tolist()) == sorted(np.ravel(WEIGHTS[0]).tolist())
    assert trace.header["model"] == "m" and trace.header["revision"] == "abc"
    assert "secret" not in json.dumps(trace.header)
    check(load_trace(put(path, *cache_lab(version, weights=False)), **facts), BY_ID)


def test_moe_cache_lab_stages(tmp_path):
    path = put(tmp_path / "r.jsonl", *cache_lab(2))
    with pytest.raises(TraceError, match=r"does not hold stage \('encoder' or 'decoder'"):
        load_trace(path)
    encoder = load_trace(path, stage="encoder")
    assert encoder.experts.tolist() == [[[3, 0]]] and encoder.phase.tolist() == [0]
    lines = cache_lab(2)
    lines[4] |= {"assignment_state": "unassigned", "selected_experts": [], "selected_probabilities": []}
    lines[4] |= {"unassigned_reason": "capacity"}
    with pytest.raises(TraceError, match="line 5: an unassigned record"):
        load_trace(put(path, *lines), stage="decoder")


BROKEN_LINES = [
    (lambda lines: lines[3].update(layer=-1), "line 4: layer is -1"),
    (lambda lines: lines[3].update(selected_experts=[1, 1]), r"line 4: an expert occurs twice in \[1, 1\]"),
    (lambda lines: lines[3].update(selected_experts=[1, 4]), r"line 4: expert 4 is outside 0\.\.3"),
    (lambda lines: lines[3].update(selected_experts=[1]), "line 4: 1 experts, expected 2"),
    (lambda lines: lines[3].update(selected_probabilities=[0.5, 1.5]), r"line 4: selected_probabilities .* 0\.\.1"),
    (
        lambda lines: lines[3].update(selected_probabilities=[0.5]),
        "line 4: weights: expected a list of 2 finite numbers",
    ),
    (lambda lines: lines[3].update(selected_probabilities=[]), "line 4: weights: there in some records"),
    (lambda lines: lines[3].update(phase="decode"), "line 4: phase is 'decode', expected one of prompt, generated"),
    (lambda lines: lines[3].update(colour=1), r"line 4: missing fields \[\], unknown fields \['colour'\]"),
    (lambda lines: lines[3].pop("layer"), r"line 4: missing fields \['layer'\]"),
    (lambda lines: lines.insert(3, lines[1]), "line 4: prompt token 5 layer 1 is out of the format's order"),
    (
        lambda lines: lines[5].update(token_position=6),
        "line 6: generated token 6 is not after the prompt, which ends at 6",
    ),
    (lambda lines: lines.pop(), r"line 6: request 0 token 7 lacks layers \[2\], perhaps torn"),
    (lambda lines: lines.pop(0), "line 1: expected the metadata"),
    (lambda lines: lines[0].update(format_version=3), "line 1: expected the metadata"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_LINES)
def test_moe_cache_lab_names_the_line(tmp_path, change, message):
    lines = cache_lab(1)
    change(lines)
    with pytest.raises(TraceError, match=r"r\.jsonl: " + message):
        import_trace(put(tmp_path / "r.jsonl", *lines), "moe-cache-lab-v1")


# ------------------------------------------------------------------------------------------------------------ RTRACE01


def rtrace(scores, E=4, version=1, order=None):
    """Records of scores [n, L, E], layers 1.."""
    records = [(t, i + 1, scores[t][i]) for t in range(len(scores)) for i in range(len(scores[0]))]
    body = b"".join(struct.pack(f"<ii{E}f", t, layer, *row) for t, layer, row in (order(records) if order else records))
    return b"RTRACE01" + struct.pack("<ii", E, version) + body


SCORES = [[[0.0, 0.25, 0.125, 0.625], [0.5, 0.125, 0.25, 0.125]], [[0.25, 0.25, 0.5, 0], [0.25] * 4]]


def test_rtrace(tmp_path):
    path = tmp_path / "r.rtrace"
    for order in (None, lambda records: sorted(records, key=lambda r: r[1])):  # by token; by layer, as a prefill
        path.write_bytes(rtrace(SCORES, order=order))
        trace = load_trace(path, K=2, prompt_tokens=1)
        check(trace, [[[3, 1], [0, 2]], [[2, 0], [0, 1]]], phase=(0, 1), step=(0, 1))
        assert trace.scores.tolist() == SCORES
        assert trace.weights[0].tolist() == [[0.625, 0.25], [0.5, 0.25]]
    with pytest.raises(TraceError, match="does not hold K"):
        load_trace(path, prompt_tokens=0)
    with pytest.raises(TraceError, match="E=8 contradicts the file, which holds 4"):
        load_trace(path, K=2, E=8, prompt_tokens=0)
    size = 8 + 4 * 4
    whole = rtrace(SCORES)
    path.write_bytes(whole[:-5])
    with pytest.raises(
        TraceError, match=rf"byte {16 + 3 * size}: record 3 has {size - 5} of {size} bytes, perhaps torn"
    ):
        load_trace(path, K=2, prompt_tokens=0)
    path.write_bytes(whole[:-size])
    with pytest.raises(TraceError, match=rf"byte {16 + 2 * size}: record 2: token 1 has 1 of 2 layers"):
        load_trace(path, K=2, prompt_tokens=0)
    path.write_bytes(whole + whole[-size:])
    with pytest.raises(TraceError, match="record 4: token 1 layer 2 occurs twice"):
        load_trace(path, K=2, prompt_tokens=0)
    path.write_bytes(rtrace(SCORES, version=2))
    with pytest.raises(TraceError, match="byte 12: version 2"):
        load_trace(path, K=2, prompt_tokens=0)
    path.write_bytes(rtrace([[[1, 2, 3, 4]]]))
    with pytest.raises(TraceError, match=r"record 0: the scores are no softmax: their sum is 10"):
        load_trace(path, K=2, prompt_tokens=0)


# ------------------------------------------------------------------------------------------------------ moe-policylang


def policylang(**more):
    header = {"model_name": "m", "num_layers": 2, "num_experts": 4, "top_k": 2, "num_entries": 6}
    lines = [header]
    for layer in (1, 2):
        for t in range(3):
            entry = {"p": 7, "t": t, "l": layer, "e": ROUTES[t][layer - 1], "s": WEIGHTS[t][layer - 1], "ti": 99}
            lines.append(entry | {name: value(t) for name, value in more.items()})
    return lines


def test_moe_policylang(tmp_path):
    path = put(tmp_path / "r.jsonl", *policylang(ph=lambda t: "decode" if t == 2 else "prefill", dm=lambda t: "math"))
    trace = load_trace(path)
    check(trace, BY_WEIGHT)
    assert trace.header["domains"] == ["math"] and trace.request.tolist() == [0, 0, 0]
    put(path, *policylang(sm=lambda t: [0.25] * 4))
    with pytest.raises(TraceError, match="does not hold prompt_tokens"):
        load_trace(path)
    trace = load_trace(path, prompt_tokens=[2], chunk=1)
    check(trace, BY_WEIGHT, step=(0, 1, 2))
    assert (trace.scores == 0.25).all() and trace.header["chunk"] == 1
    lines = policylang()
    with pytest.raises(TraceError, match=r"line 6: the file ends after 5 of 6 entries, perhaps torn"):
        load_trace(put(path, *lines[:-1]), prompt_tokens=0)
    path.write_text(path.read_text()[:-10])
    with pytest.raises(TraceError, match=r"line 6: not JSON: .*; the file ends here, perhaps torn"):
        load_trace(path, prompt_tokens=0)


def test_layers_counted_from_0_can_be_given_their_place(tmp_path):
    lines = policylang()
    for line in lines[1:]:
        line["l"] -= 1
    path = put(tmp_path / "r.jsonl", *lines)
    check(load_trace(path, prompt_tokens=2), BY_WEIGHT, layers=(0, 1))
    check(load_trace(path, prompt_tokens=2, moe_layers=range(1, 3)), BY_WEIGHT)
    with pytest.raises(TraceError, match=r"moe_layers=\[1, 2, 3\] contradicts the file, which holds \[0, 1\]"):
        load_trace(path, prompt_tokens=2, moe_layers=[1, 2, 3])


# ------------------------------------------------------------------------------------------------- gpt-oss, two layouts


def fingerprint(rows, start=40, name="a"):
    tokens = {
        f"token_{start + i}": {
            f"layer_{layer}": {"selected_experts": ROUTES[row][layer], "selected_probs": WEIGHTS[row][layer]}
            for layer in (0, 1)
        }
        for i, row in enumerate(rows)
    }
    texts = {"original_prompt": "secret é", "full_text": ["secret"], "generated_only": ["}{]["]}
    labels = {
        "row_index": 3,
        "dataset": "mmlu",
        "category": name,
        "finished_successfully": True,
        "has_repetition": False,
    }
    return labels | texts | {"router_data": [tokens]}


def test_gptoss_fingerprint(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([fingerprint([0, 1], name="algebra"), fingerprint([2], start=7)], ensure_ascii=False))
    trace = load_trace(path, E=4)
    check(trace, BY_WEIGHT, phase=(1, 1, 1), layers=(0, 1), step=(0, 1, 2))
    assert trace.request.tolist() == [0, 0, 1] and trace.header["domains"] == ["algebra", "a"]
    assert trace.header["start"] == [40, 7] and "secret" not in json.dumps(trace.header)
    with pytest.raises(TraceError, match="does not hold E"):
        load_trace(path)
    broken = fingerprint([0, 1])
    broken["router_data"][0]["token_42"] = broken["router_data"][0].pop("token_41")
    path.write_text(json.dumps([fingerprint([2]), broken]))
    at = len(json.dumps([fingerprint([2])])) + 1
    with pytest.raises(TraceError, match=rf"record 1 \(byte {at}\): router_data: token_42 follows token_40"):
        load_trace(path, E=4)
    broken = fingerprint([0, 1])
    broken["router_data"][0]["token_41"].pop("layer_1")
    path.write_text(json.dumps([broken]))
    with pytest.raises(TraceError, match=r"record 0 \(byte 1\), position 41: request 0 token 41 lacks layers \[1\]"):
        load_trace(path, E=4)


def test_gptoss_routes(tmp_path):
    arrays = {
        "experts": np.int8(ROUTES),
        "probs": np.float16(WEIGHTS),
        "offsets": np.array([0, 2, 3]),
        "start": np.array([40, 7]),
        "dataset": np.array(["mmlu", "mmlu"]),
        "category": np.array(["algebra", "a"]),
    }
    path = tmp_path / "r.npz"
    np.savez(path, **arrays)
    trace = load_trace(path, E=4, moe_layers=[1, 2])
    check(trace, BY_WEIGHT, phase=(1, 1, 1), step=(0, 1, 2))
    assert trace.request.tolist() == [0, 0, 1] and trace.header["domains"] == ["algebra", "a"]
    np.savez(path, **(arrays | {"offsets": np.array([0, 2, 4])}))
    with pytest.raises(TraceError, match=r"offsets: expected rising numbers from 0 to 3 rows, got \[0, 2, 4\]"):
        load_trace(path, E=4)
    np.savez(path, **(arrays | {"start": np.array([1])}))
    with pytest.raises(TraceError, match=r"start: shape \(1,\), expected \(2,\)"):
        load_trace(path, E=4)


@pytest.mark.skipif("MOE_JAX_TRACES" not in os.environ, reason="MOE_JAX_TRACES names no directory of traces")
def test_real_gptoss_routes():
    path = os.path.join(os.environ["MOE_JAX_TRACES"], "gptoss20b_routes_mmlu60.npz")
    trace = load_trace(path)
    with np.load(path) as z:
        np.testing.assert_array_equal(np.sort(trace.experts), np.sort(z["experts"]))
        np.testing.assert_array_equal(trace.weights, z["probs"])
        assert np.bincount(trace.request).tolist() == np.diff(z["offsets"]).tolist()
    assert trace.experts.shape == (16520, 24, 4) and trace.header["model"] == "gpt-oss-20b" and trace.header["E"] == 32


# --------------------------------------------------------------------------------------------------------- round trips

HOLDS_ONE = {"moe-cache-lab-v1", "moe-cache-lab-v2", "rtrace01"}
FILES = [(form, suffix) for form in FORMATS.values() for suffix in form.suffixes]


def make(seed, requests, single, no_prompt, scores=False):
    """Requests one after the other, each prompt one step; layers 0..1 of 6 experts, softmax scores."""
    rng = np.random.default_rng(seed)
    columns = {name: [] for name in ("phase", "request", "step")}
    step = 0
    for r in range(1 if single else requests):
        prompt, decoded = 0 if no_prompt else int(rng.integers(0, 4)), int(rng.integers(1, 4))
        columns["phase"] += [0] * prompt + [1] * decoded
        columns["request"] += [r] * (prompt + decoded)
        step += prompt > 0
        columns["step"] += [step - 1] * prompt + list(range(step, step + decoded))
        step += decoded
    columns["step"] = np.array(columns["step"]) - columns["step"][0]
    T = len(columns["phase"])
    raw = rng.random((T, 2, 6)) + 0.01
    full = (raw / raw.sum(-1, keepdims=True)).astype(np.float16)
    experts = np.argsort(-full, -1, kind="stable")[..., :3]
    header = {
        "moe_layers": [0, 1], "E": 6, "K": 3, "chunk": 8, "scope": "layer", "slots": 12, "contract": "atomic-bypass",
        "policy": "lru", "model": "tiny", "dtype": "float32", "domains": [f"d{r}" for r in range(requests)],
    }  # fmt: skip
    weights = np.take_along_axis(full, experts, -1)
    return Trace.from_rows(experts, weights, header=header, scores=full if scores else None, **columns)


@pytest.mark.parametrize(("form", "suffix"), FILES, ids=[f"{form.name}{suffix}" for form, suffix in FILES])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), requests=st.integers(1, 3), scores=st.booleans())
def test_round_trip(tmp_path_factory, form, suffix, seed, requests, scores):
    single = form.name in HOLDS_ONE or suffix in (".npy", ".npz") and form.name == "vllm"
    scores = scores or form.name == "rtrace01"
    trace = make(seed, requests, single, form.name.startswith("gptoss"), scores)
    path = tmp_path_factory.mktemp("t") / f"run{suffix}"
    lost = export_trace(trace, path, form.name)
    assert recognise(path) == form.name and os.listdir(path.parent) == [path.name]
    facts = {}
    for _ in range(5):  # pass what is asked for, and nothing else
        try:
            again = import_trace(path, **facts)
            break
        except TraceError as error:
            asked = str(error).partition(": pass ")[2]
            prompts = np.bincount(trace.request, trace.phase == 0).astype(int).tolist()
            values = {"E": 6, "K": 3, "moe_layers": [0, 1], "prompt_tokens": prompts}
            facts |= {word.removesuffix("=..."): values[word.removesuffix("=...")] for word in asked.split(", ")}
    assert set(facts) <= {"E", "K", "moe_layers", "prompt_tokens"}
    for name in facts:  # what had to be asked for was declared lost
        assert f"header: {name}" in lost or name == "prompt_tokens" and "phase" in lost
    for name in ("phase", "request", "step"):
        assert getattr(again, name).tolist() == getattr(trace, name).tolist(), name
    if any(phrase.startswith("weights") for phrase in lost):
        assert again.experts.tolist() == np.sort(trace.experts).tolist() and again.header["weights"] == "unknown"
    else:
        assert again.experts.tolist() == trace.experts.tolist() and again.weights.tolist() == trace.weights.tolist()
    assert ("scores" in lost) == (scores and again.scores is None)
    if again.scores is not None:
        assert again.scores.tolist() == trace.scores.tolist()
    for name in ("model", "domains", "moe_layers", "E", "K"):
        if f"header: {name}" not in lost:
            assert again.header[name] == trace.header[name]


def test_what_a_format_cannot_tell_is_refused_or_returned(tmp_path):
    trace = make(1, 2, False, False)
    with pytest.raises(TraceError, match=r"holds one request, the trace 2: export trace\.select"):
        export_trace(trace, tmp_path / "r.jsonl", "moe-cache-lab-v1")
    with pytest.raises(TraceError, match="holds the scores of all experts, and the trace has none"):
        export_trace(trace.select([1]), tmp_path / "r.rtrace", "rtrace01")
    with pytest.raises(ValueError, match=r"r\.txt': format sglang is written as \.json"):
        export_trace(trace, tmp_path / "r.txt", "sglang")
    with pytest.raises(TraceError, match="format 'vlm' is not known: use native, "):
        export_trace(trace, tmp_path / "r.json", "vlm")
    one = make(1, 1, True, True, scores=True)
    one.scores = one.scores[..., ::-1].copy()
    with pytest.raises(TraceError, match="are not the 3 of highest score"):
        export_trace(one, tmp_path / "r.rtrace", "rtrace01")
    assert os.listdir(tmp_path) == []

    trace.pred["gate"] = np.zeros((len(trace.step), 2, 3), np.int16)
    together = concatenate([trace, trace])
    together.step[:] = 0
    lost = export_trace(together.select([1, 2]), tmp_path / "r.jsonl", "moe-policylang")
    assert {"pred/gate", "step: which rows were served together", "header: policy"} <= set(lost)
    assert any(phrase.startswith("the numbers of the requests") for phrase in lost)
    assert export_trace(together, tmp_path / "r.npz", "native") == []
    grouped = make(2, 3, False, True)
    grouped.step[:] = 0  # decoded rows of a request in one step
    assert "step: which rows were served together" in export_trace(grouped, tmp_path / "g.json", "sglang")
    prompts = make(3, 1, True, False)
    prompts.phase[:], prompts.request[:], prompts.step[:] = 0, np.arange(len(prompts.step)), 0  # prompts in one step
    assert "step: which rows were served together" in export_trace(prompts, tmp_path / "p.json", "sglang")
    prompts.experts[0, 0] = 0
    with pytest.raises(TraceError, match="export: experts: row 0 layer 0: an expert occurs twice"):
        export_trace(prompts, tmp_path / "q.json", "sglang")


def test_unknown_files_and_facts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello, world")
    with pytest.raises(TraceError, match=r"a\.txt: not a known trace format; it begins with b'hello, w'"):
        load_trace(tmp_path / "a.txt")
    with pytest.raises(TraceError, match=r"begins with \['colour'\]"):
        load_trace(put(tmp_path / "a.json", {"colour": 1}))
    np.savez(tmp_path / "a.npz", colour=1)
    with pytest.raises(TraceError, match=r"begins with arrays \['colour'\]"):
        load_trace(tmp_path / "a.npz")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TraceError, match="not a known trace format"):
        load_trace(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "absent.json")
    path = put(tmp_path / "r.jsonl", *policylang(ph=lambda t: "decode"))
    with pytest.raises(TraceError, match="format moe-policylang takes no fact colour, stage; it takes E, K, "):
        load_trace(path, colour=1, stage="decoder")
    with pytest.raises(TraceError, match="moe_layers=.*expected a rising list"):
        load_trace(path, moe_layers=[2, 1])
    with pytest.raises(TraceError, match="chunk=0: expected an integer of at least 1"):
        load_trace(path, chunk=0)
    with pytest.raises(TraceError, match="prompt_tokens=1 contradicts the file, which holds 0"):
        load_trace(path, prompt_tokens=1)
    trace = load_trace(path, policy="lfu", slots=3, scope="global", dtype="bf16", model="mine")
    assert [trace.header[name] for name in ("policy", "slots", "scope", "dtype", "model")] == [
        "lfu", 3, "global", "bf16", "mine",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ streaming


@settings(max_examples=40, deadline=None)
@given(
    objects=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=9) | st.lists(st.integers())), max_size=4),
    in_array=st.booleans(),
    block=st.integers(1, 9),
    indent=st.sampled_from([None, 1]),
)
def test_json_objects_in_small_blocks(tmp_path_factory, objects, in_array, block, indent):
    texts = [json.dumps(o, ensure_ascii=False, indent=indent) for o in objects]
    content = "[ " + " ,\n".join(texts) + "]\n" if in_array else "\n".join(texts)
    try:
        raw = content.encode()
    except UnicodeEncodeError:  # a lone surrogate is no text
        return
    path = tmp_path_factory.mktemp("j") / "a.json"
    path.write_bytes(raw)
    found = list(json_objects(path, block))
    assert [value for _, value in found] == objects
    for offset, value in found:
        assert raw[offset : offset + 1] == b"{" and raw[offset:].startswith(texts[objects.index(value)][:5].encode())
    if in_array:
        path.write_bytes(raw.rstrip()[:-1])
        with pytest.raises(TraceError, match=r"a\.json: byte \d+: .*perhaps torn"):
            list(json_objects(path, block))


def test_json_damage_names_the_byte(tmp_path):
    path = tmp_path / "a.json"
    for raw, message in (
        (b'[{"a": 1}, {"a" 2}]', r"byte 16: not JSON: Expecting ':'"),
        (b'[{"a": 1} {"a": 2}]', r"byte 10: expected ',' or '\]' after an object, got '\{'"),
        (b'[{"a": 1}]]', "byte 10: text after the end of the array"),
        (b'[{"a": 1}, 5]', "byte 11: expected an object, got '5"),
        (b'{"a": "\xc3\xa9"} {"b": "\xff"}', "byte 19: not UTF-8"),
        (b'{"":"\xc3\xff"}', "byte 5: not UTF-8"),
        (b'{"a": [1', "byte 8: not JSON: .*the file has 8 bytes, perhaps torn"),
    ):
        path.write_bytes(raw)
        for block in (3, 1 << 20):
            with pytest.raises(TraceError, match=message):
                list(json_objects(path, block))
