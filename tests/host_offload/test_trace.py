"""The native trace format: what is written is read back, and nothing malformed gets in or out."""

import errno
import json
import os
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host_offload.policy import StaticPin
from host_offload.trace import HEADER_FIELDS, Trace, TraceError, bundled_trace, concatenate, load_trace, write_whole

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


def make(T=6, seed=0, scores=False, pred=False):
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
        pred={
            "gate-1": rng.integers(0, E, (T, L, 2)).astype(np.int16),
            "heads": rng.random((T, L, E)).astype(np.float16),
            "depth": np.ones((T, L), np.int16),
        }
        if pred
        else None,
    )


def assert_equal(a, b):
    assert a.header == b.header
    for name in ("experts", "weights", "phase", "request", "step", "scores"):
        mine, other = getattr(a, name), getattr(b, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert mine.dtype == other.dtype, name
            np.testing.assert_array_equal(mine, other, err_msg=name)
    assert list(a.pred) == list(b.pred)
    for name in a.pred:
        assert a.pred[name].dtype == b.pred[name].dtype, name
        np.testing.assert_array_equal(a.pred[name], b.pred[name], err_msg=name)


@pytest.mark.parametrize("name", ["run.npz", "run.parquet"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(T=st.integers(0, 6), seed=st.integers(0, 99), scores=st.booleans(), pred=st.booleans())
def test_round_trip(tmp_path, name, T, seed, scores, pred):
    trace = make(T, seed, scores, pred)
    trace.save(tmp_path / name)
    assert_equal(Trace.load(str(tmp_path / name)), trace)
    assert_equal(load_trace(tmp_path / name), trace)
    assert os.listdir(tmp_path) == [name]
    (tmp_path / name).unlink()


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


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_torn_files_never_load_as_something_else(tmp_path, suffix, data):
    trace = make()
    whole, torn = tmp_path / f"run{suffix}", tmp_path / f"torn{suffix}"
    trace.save(whole)
    content = bytearray(whole.read_bytes())
    cut = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:cut]
    else:
        content[cut] ^= data.draw(st.integers(1, 255))
    torn.write_bytes(content)
    try:
        loaded = Trace.load(torn)
    except TraceError as error:
        assert torn.name in str(error)
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
    make().save(tmp_path / "run.npz")
    with pytest.raises(TraceError, match=r"run\.npz: a native trace holds everything: leave out E"):
        load_trace(tmp_path / "run.npz", E=6)


def test_parquet_is_a_table_that_others_can_query(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    trace = make(scores=True, pred=True)
    trace.save(tmp_path / "run.parquet")
    table = pq.read_table(tmp_path / "run.parquet")
    assert table.column("step").to_pylist() == trace.step.tolist()
    assert table.column("experts").to_pylist() == trace.experts.reshape(6, -1).tolist()
    assert table.column("pred/heads").to_pylist() == trace.pred["heads"].reshape(6, -1).tolist()
    assert json.loads(table.schema.metadata[b"moe_jax.trace"]) == HEADER


def test_parquet_damage_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "run.parquet"
    make().save(path)
    table = pq.read_table(path)
    shapes = json.loads(table.schema.metadata[b"moe_jax.shapes"])

    def put(table, **metadata):
        held = {key.encode(): json.dumps(value).encode() for key, value in metadata.items()}
        pq.write_table(table.replace_schema_metadata(table.schema.metadata | held), path)

    put(table.drop_columns(["step"]))
    with pytest.raises(TraceError, match="names other columns than the file holds"):
        Trace.load(path)
    put(table, **{"moe_jax.shapes": shapes | {"experts": [L, K + 1]}})
    with pytest.raises(TraceError, match=r"experts: .* has not the shape \[2, 4\]"):
        Trace.load(path)
    empty = pa.array([None, 1, 2, 3, 4, 5], pa.int32())
    put(table.set_column(table.column_names.index("step"), "step", empty))
    with pytest.raises(TraceError, match="step: holds empty cells"):
        Trace.load(path)
    put(table, **{"moe_jax.trace": HEADER | {"seed": 8}})
    with pytest.raises(TraceError, match=r"run\.parquet: damaged: the content does not have the checksum"):
        Trace.load(path)
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(TraceError, match=r"no metadata 'moe_jax\.trace': not a native trace"):
        Trace.load(path)


def test_parquet_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"parquet traces need pyarrow: install it .* or use an \.npz file"):
        make().save(tmp_path / "run.parquet")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("a/b", np.zeros((6, L), np.int16), "pred: name 'a/b': use letters"),
        ("a", np.zeros((6, L), np.int32), r"pred/a: expected int16 or float16 \[T,L,...\] = \(6, 2, ...\), got int32"),
        ("a", np.zeros((6, 3, 1), np.int16), r"pred/a: .* got int16 \(6, 3, 1\)"),
        ("a", np.zeros((6, L, 0), np.int16), r"pred/a: .* got int16 \(6, 2, 0\)"),
        ("a", [[0, 0]] * 6, "pred/a: .* got list"),
        ("a", np.full((6, L), np.nan, np.float16), "pred/a: row 0: holds a value that is not a number"),
    ],
)
def test_malformed_predictions_are_refused(tmp_path, name, array, message):
    trace = make()
    trace.pred[name] = array
    with pytest.raises(TraceError, match=message):
        trace.save(tmp_path / "run.npz")


def test_select_keeps_rows_and_numbers_of_some_requests():
    trace = make(scores=True, pred=True)
    one = trace.select([1])
    assert one.request.tolist() == [1, 1] and one.step.tolist() == [0, 1]
    rows = trace.request == 1
    assert one.experts.tolist() == trace.experts[rows].tolist() and one.scores.tolist() == trace.scores[rows].tolist()
    assert one.pred["heads"].tolist() == trace.pred["heads"][rows].tolist() and one.header == trace.header
    one.validate()
    assert_equal(trace.select([1, 0]), trace)
    assert len(trace.select([]).experts) == 0
    with pytest.raises(TraceError, match=r"select: requests \[2\] are not in the trace"):
        trace.select([0, 2])


def test_concatenate_joins_predictions_of_one_kind():
    whole = concatenate([make(pred=True), make(seed=1, pred=True)])
    assert whole.pred["heads"].shape == (12, L, E) and list(whole.pred) == ["gate-1", "heads", "depth"]
    with pytest.raises(TraceError, match=r"trace 1: pred holds \[\], trace 0 \['depth', 'gate-1', 'heads'\]"):
        concatenate([make(pred=True), make()])


def test_bundled_trace():
    trace = bundled_trace()
    assert trace.experts.shape[1:] == (8, 4) and trace.header["E"] == 32
    domains = trace.header["domains"]
    assert len(set(domains)) == 11 and {domains.count(domain) for domain in domains} == {4}
    assert np.unique(trace.request).tolist() == list(range(44))
    prompts = np.bincount(trace.request, trace.phase == 0)
    assert prompts.tolist() == [64] * 44 and np.bincount(trace.request).max() == 64 + 96 - 1
    # Routing is learned: requests of one domain use the same experts more than those of different ones.
    use = np.zeros((44, 8, 32))
    np.add.at(use, (trace.request[:, None, None], np.arange(8)[None, :, None], trace.experts), 1)
    unit = use.reshape(44, -1) / np.linalg.norm(use.reshape(44, -1), axis=1, keepdims=True)
    alike, same = unit @ unit.T, np.equal.outer(domains, domains) & ~np.eye(44, dtype=bool)
    assert alike[same].mean() > alike[~same & ~np.eye(44, dtype=bool)].mean() + 0.1
    # Ids and weights only: nothing from which text could be read.
    assert set(trace.arrays()) == {"experts", "weights", "phase", "request", "step"}


def test_saving_into_a_missing_directory_names_it(tmp_path):
    trace = concatenate([bundled_trace()])
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: create it"):
        trace.save(tmp_path / "nowhere" / "trace.npz")


def test_a_full_disk_names_the_trace_and_leaves_nothing(tmp_path):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*/run\.npz'"):
        write_whole(tmp_path / "run.npz", full)
    assert not list(tmp_path.iterdir())
