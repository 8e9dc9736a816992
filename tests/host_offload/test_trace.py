"""The native trace format: what is written is read back, and nothing malformed gets in or out."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host_offload.policy import StaticPin
from host_offload.trace import HEADER_FIELDS, Trace, TraceError, concatenate

L, E, K = 2, 6, 3
HEADER = {
    "moe_layers": [1, 3],
    "E": E,
    "K": K,
    "chunk": 4,
    "scope": "layer",
    "slots": [3, 2],
    "contract": "atomic-bypass",
    "policy": "lru",
    "model": "tiny/größe",
    "dtype": "float32",
    "seed": 7,
}


def make(T=6, seed=0, scores=False):
    """Two requests: a prompt of three tokens and one of one token as step 0, decoded together afterwards."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((T, L, E)), -1)[..., :K]
    return Trace.from_rows(
        experts=experts,
        weights=rng.random((T, L, K)),
        phase=np.array([0, 0, 0, 0, 1, 1])[:T],
        request=np.array([0, 0, 0, 1, 0, 1])[:T],
        step=np.array([0, 0, 0, 0, 1, 1])[:T],
        header=HEADER,
        scores=rng.random((T, L, E)) if scores else None,
    )


def assert_equal(a, b):
    assert a.header == b.header
    for name in ("experts", "weights", "phase", "request", "step", "scores"):
        mine, other = getattr(a, name), getattr(b, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype, name
            np.testing.assert_array_equal(mine, other, err_msg=name)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(T=st.integers(0, 6), seed=st.integers(0, 99), scores=st.booleans())
def test_round_trip(tmp_path, T, seed, scores):
    trace = make(T, seed, scores)
    trace.save(tmp_path / "run.npz")
    assert_equal(Trace.load(str(tmp_path / "run.npz")), trace)
    assert os.listdir(tmp_path) == ["run.npz"]


def test_file_reads_with_numpy_alone(tmp_path):
    make().save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz", allow_pickle=False) as z:
        header = json.loads(z["header"].tobytes())
        assert z["experts"].shape == (6, len(header["moe_layers"]), header["K"]) and z["experts"].dtype == np.int16
        assert z["weights"].dtype == np.float16 and "scores" not in z
    assert header == HEADER


def test_from_rows_orders_by_falling_weight_then_id():
    # 0.50001 and 0.5 are equal in float16, so their ids decide.
    trace = Trace.from_rows(
        [[[5, 2, 4]]], [[[0.50001, 0.5, 0.75]]], [1], [0], [0], HEADER | {"moe_layers": [0], "slots": 1}
    )
    assert trace.experts.tolist() == [[[4, 2, 5]]]
    assert trace.weights.tolist() == [[[0.75, 0.5, 0.5]]]


def test_from_rows_refuses_what_a_cast_would_change():
    with pytest.raises(TraceError, match="experts: values 0..70000 do not fit int16"):
        Trace.from_rows([[[0, 1, 70000]]], [[[1, 1, 1]]], [1], [0], [0], HEADER)
    with pytest.raises(TraceError, match="step: expected integers, got float64"):
        Trace.from_rows([[[0, 1, 2]]], [[[1, 1, 1]]], [1], [0], [0.5], HEADER)
    with pytest.raises(TraceError, match=r"weights: shape \(1, 1, 2\) differs from experts \(1, 1, 3\)"):
        Trace.from_rows([[[0, 1, 2]]], [[[1, 1]]], [1], [0], [0], HEADER)


def test_events_take_the_union_of_the_batch():
    trace = make()
    events = list(trace.events())
    assert [(step, layer) for step, layer, _ in events] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for step, layer, need in events:
        assert need.tolist() == sorted(set(trace.experts[trace.step == step, layer].ravel().tolist()))
    assert [step for step, _, _ in trace.events("decode")] == [1, 1]
    assert [step for step, _, _ in trace.events("prefill")] == [0, 0]
    assert list(make(T=0).events()) == []
    with pytest.raises(ValueError, match="phase: expected None, 'prefill' or 'decode', got 'decoding'"):
        next(trace.events("decoding"))


def test_events_are_ordered_by_step_even_if_rows_are_grouped_by_request():
    trace = make()
    grouped = np.argsort(trace.request, kind="stable")
    parts = {name: getattr(trace, name)[grouped] for name in ("experts", "weights", "phase", "request", "step")}
    regrouped = Trace(header=trace.header, **parts)
    regrouped.validate()
    for a, b in zip(trace.events(), regrouped.events(), strict=True):
        assert a[:2] == b[:2] and a[2].tolist() == b[2].tolist()


def test_frequency_counts_events_and_feeds_static_pin(tmp_path):
    trace = make()
    expected = np.zeros((L, E), int)
    for _, layer, need in trace.events():
        expected[layer, need] += 1
    assert trace.frequency().tolist() == expected.tolist()
    assert trace.frequency("decode").max() == 1
    trace.save(tmp_path / "run.npz")
    for source in (trace, tmp_path / "run.npz"):
        assert StaticPin(source).init(np, L, E, 0)["rank"].tolist() == expected.tolist()


def test_concatenate_keeps_requests_and_steps_apart():
    whole = concatenate([make(seed=0), make(seed=1), make(T=0), make(seed=2)])
    assert whole.request.tolist() == [0, 0, 0, 1, 0, 1, 2, 2, 2, 3, 2, 3, 4, 4, 4, 5, 4, 5]
    assert whole.step.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5]
    assert len(list(whole.events())) == 3 * len(list(make().events()))
    assert concatenate([make(scores=True)] * 2).scores.shape == (12, L, E)


def test_concatenate_refuses_to_mix():
    other = make()
    other.header = HEADER | {"policy": "lfu"}
    with pytest.raises(TraceError, match="trace 1: policy is 'lfu', expected 'lru'; .*header="):
        concatenate([make(), other])
    assert concatenate([make(), other], header=HEADER | {"policy": "lru+lfu"}).header["policy"] == "lru+lfu"
    with pytest.raises(TraceError, match="trace 0: E is 6, expected 8"):
        concatenate([make()], header=HEADER | {"E": 8})
    with pytest.raises(TraceError, match="trace 1: either all traces hold scores or none"):
        concatenate([make(), make(scores=True)])
    with pytest.raises(TraceError, match="no traces"):
        concatenate([])


def put(name, at, value):
    def change(trace):
        array = getattr(trace, name).copy()
        array[at] = value
        setattr(trace, name, array)

    return change


def replace(name, value):
    return lambda trace: setattr(trace, name, value)


MALFORMED = [
    (put("experts", (4, 1, 0), E), "experts: row 4 layer 1: expert 6 is outside 0..5"),
    (put("experts", (4, 1, 0), -1), "experts: row 4 layer 1: expert -1 is outside"),
    (put("experts", (2, 0), [1, 3, 1]), r"experts: row 2 layer 0: an expert occurs twice in \[1, 3, 1\]"),
    (put("weights", (5, 1, 2), 9), r"experts: row 5 layer 1: .* are not by falling weight .*Trace.from_rows"),
    (put("weights", (5, 1, 2), np.nan), "weights: row 5 layer 1: nan is not finite"),
    (put("phase", 3, 2), "phase: row 3: 2 is neither 0"),
    (put("request", 0, -1), "request: row 0: -1 is negative"),
    (put("step", 0, -1), "step: row 0: -1 is negative"),
    (put("step", 2, 5), "step: row 4: step 1 of request 0 is below its step before"),
    (replace("experts", np.zeros((6, L, K), np.int32)), r"experts: expected int16 \[T,L,K\] = \(6, 2, 3\), got int32"),
    (replace("weights", np.zeros((6, L), np.float16)), r"weights: expected float16 .* got float16 \(6, 2\)"),
    (replace("scores", np.zeros((6, L, K), np.float16)), r"scores: expected float16 \[T,L,E\] = \(6, 2, 6\)"),
    (replace("step", np.zeros(5, np.int32)), r"step: expected int32 \[T\] = \(6,\), got int32 \(5,\)"),
    (replace("phase", [0] * 6), "phase: expected uint8 .* got list"),
    (replace("header", []), "header: expected a JSON object, got list"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_malformed_traces_are_refused_by_save(tmp_path, change, message):
    trace = make()
    change(trace)
    with pytest.raises(TraceError, match=r"run\.npz: " + message):
        trace.save(tmp_path / "run.npz")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_layers", 2),
        ("moe_layers", [3, 1]),
        ("moe_layers", []),
        ("E", 0),
        ("E", 2**15 + 1),
        ("K", E + 1),
        ("K", True),
        ("chunk", 0),
        ("scope", "model"),
        ("slots", [3]),
        ("slots", -1),
        ("slots", 2.5),
        ("contract", "bypass"),
        ("policy", None),
        ("model", 3),
        ("seed", {1, 2}),
    ],
)
def test_bad_header_values_are_named(field, value):
    trace = make()
    trace.header = HEADER | {field: value}
    message = f"header: {field} is " if field in HEADER_FIELDS else "header: cannot be written as JSON"
    with pytest.raises(TraceError, match=message):
        trace.validate()


def test_missing_header_fields_are_listed():
    trace = make()
    trace.header = {k: v for k, v in HEADER.items() if k not in ("scope", "dtype")}
    with pytest.raises(TraceError, match="header: missing scope, dtype"):
        trace.validate()


def test_a_file_of_bad_rows_is_refused_with_its_name(tmp_path):
    make().save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as z:
        arrays = dict(z)
    arrays["experts"][1, 0] = E
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(TraceError, match=r"bad\.npz: experts: row 1 layer 0"):
        Trace.load(tmp_path / "bad.npz")
    np.savez(tmp_path / "extra.npz", pred=1, **{k: v for k, v in arrays.items() if k != "step"})
    with pytest.raises(TraceError, match=r"extra\.npz: missing fields \['step'\], unknown fields \['pred'\]"):
        Trace.load(tmp_path / "extra.npz")
    np.savez(tmp_path / "text.npz", **(arrays | {"header": np.frombuffer(b"{oops", np.uint8)}))
    with pytest.raises(TraceError, match=r"text\.npz: header: not UTF-8 JSON"):
        Trace.load(tmp_path / "text.npz")
    np.savez(tmp_path / "objects.npz", **(arrays | {"step": np.array([{}] * 6)}))
    with pytest.raises(TraceError, match=r"objects\.npz: step: damaged"):
        Trace.load(tmp_path / "objects.npz")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_torn_files_never_load_as_something_else(tmp_path, data):
    trace = make()
    trace.save(tmp_path / "run.npz")
    content = bytearray((tmp_path / "run.npz").read_bytes())
    cut = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:cut]
    else:
        content[cut] ^= data.draw(st.integers(1, 255))
    (tmp_path / "torn.npz").write_bytes(content)
    try:
        loaded = Trace.load(tmp_path / "torn.npz")
    except TraceError as error:
        assert "torn.npz" in str(error)
    else:  # a bit that no reader looks at, such as a time stamp
        assert_equal(loaded, trace)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    make(seed=1).save(tmp_path / "run.npz")

    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="no space"):
        make(seed=2).save(tmp_path / "run.npz")
    assert os.listdir(tmp_path) == ["run.npz"]
    assert_equal(Trace.load(tmp_path / "run.npz"), make(seed=1))


def test_paths(tmp_path):
    with pytest.raises(ValueError, match=r"run\.json': the suffix must be \.npz or \.parquet"):
        make().save(tmp_path / "run.json")
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "absent.npz")
