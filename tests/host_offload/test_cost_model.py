"""The cost model: fits give back their curves, predictions add up, files round-trip or say why not."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.cost_model import CostModel, CostModelError, DecodeCost, LinkCurve, predict_ms_per_token
from host_offload.prefetch_sim import simulate_prefetch
from host_offload.simulate import simulate
from host_offload.trace import Trace

L, E, K, ROW = 3, 6, 2, 1_000_000


def make_trace(seed=0, T=20, prefill=4):
    rng = np.random.default_rng(seed)
    header = dict(moe_layers=list(range(L)), E=E, K=K, chunk=1, scope="layer", slots=L, contract="atomic-bypass")
    header |= dict(policy="none", model="made up", dtype="float32")
    experts = rng.random((T, L, E)).argsort(-1)[..., :K]
    phase = (np.arange(T) >= prefill).astype(int)
    return Trace.from_rows(experts, np.ones(experts.shape), phase, np.zeros(T, int), np.arange(T), header)


def make_cost(**changes):
    decode = DecodeCost(all_hit_seconds=2e-3, miss_seconds=30e-6, L=L, K=K, row_bytes=ROW, policy="lru")
    slower = dataclasses.replace(decode, all_hit_seconds=3e-3, miss_seconds=15e-6)
    fields = dict(
        device="made up",
        link=LinkCurve(50e9, 4e-6),
        memory_bytes_per_second=1e12,
        decode={"device": decode, "callback": slower},
        policy_seconds={"lru": 100e-6, "lfu": 80e-6},
        notes={"copies": [[1, 2.0]]},
    )
    return CostModel(**(fields | changes))


@settings(deadline=None, max_examples=30)
@given(rate=st.floats(1e8, 1e12), fixed=st.floats(0, 1e-3))
def test_link_fit_gives_back_the_curve(rate, fixed):
    sizes = np.array([1 << n for n in range(14, 30, 3)])
    curve = LinkCurve.fit(sizes, fixed + sizes / rate)
    np.testing.assert_allclose(curve.seconds(sizes), fixed + sizes / rate, rtol=1e-6)
    np.testing.assert_allclose(curve.rate(sizes), sizes / (fixed + sizes / rate), rtol=1e-6)


def test_link_fit_of_noisy_times_and_no_negative_fixed_cost():
    rng = np.random.default_rng(0)
    sizes = np.repeat([1 << n for n in range(14, 29)], 3)
    noisy = (10e-6 + sizes / 25e9) * rng.normal(1, 0.02, len(sizes))
    curve = LinkCurve.fit(sizes, noisy)
    assert curve.bytes_per_second == pytest.approx(25e9, rel=0.03)
    assert curve.copy_seconds == pytest.approx(10e-6, rel=0.05)
    growing = LinkCurve.fit([1e6, 1e9], [0.9e-4, 0.1])  # small copies are faster than the rate of large ones
    assert growing.copy_seconds == 0 and 0.9e-10 < 1 / growing.bytes_per_second < 1e-10


def test_link_arithmetic():
    link = LinkCurve(1e9, 1e-3)
    assert link.seconds(2e6) == pytest.approx(3e-3) and link.seconds(2e6, copies=2) == pytest.approx(4e-3)
    assert LinkCurve(np.inf).seconds(1e9) == 0


@settings(deadline=None, max_examples=30)
@given(all_hit=st.floats(1e-4, 1), miss=st.floats(1e-6, 1e-2))
def test_decode_fit_gives_back_the_line(all_hit, miss):
    misses = np.array([0, 17.5, 40.0])
    geometry = dict(L=L, K=K, row_bytes=ROW, policy="lru")
    cost = DecodeCost.fit(misses, all_hit + miss * misses, **geometry)
    assert cost.all_hit_seconds == pytest.approx(all_hit, rel=1e-5)
    assert cost.miss_seconds == pytest.approx(miss, rel=1e-3) and cost.fit_error < 1e-6


@settings(deadline=None, max_examples=30)
@given(event=st.floats(-1e-5, 1e-4), miss=st.floats(1e-5, 1e-2))
def test_decode_fit_tells_events_from_their_misses(event, miss):
    misses, events = np.array([0, 20.0, 40.0, 80.0]), np.array([0, 15.0, 22.0, 24.0])
    seconds = 2e-3 + miss * misses + event * events
    cost = DecodeCost.fit(misses, seconds, events, L=L, K=K, row_bytes=ROW, policy="lru")
    assert cost.miss_seconds == pytest.approx(miss, rel=1e-4)
    assert cost.event_seconds == pytest.approx(event, rel=1e-3, abs=1e-8)
    assert cost.all_hit_seconds == pytest.approx(2e-3, rel=1e-5) and cost.fit_error < 1e-6
    # Three levels, or two misses an event at every level: the event's part is in the miss.
    assert DecodeCost.fit(misses[:3], seconds[:3], events[:3], L=L, K=K, row_bytes=ROW, policy="lru").event_seconds == 0
    even = DecodeCost.fit(misses, 2e-3 + (miss + event / 2) * misses, misses / 2, L=L, K=K, row_bytes=ROW, policy="lru")
    assert even.event_seconds == 0 and even.miss_seconds == pytest.approx(miss + event / 2, rel=1e-3)


def test_decode_fit_says_how_far_the_points_are_from_the_line():
    misses = np.array([0, 17.5, 40.0])
    seconds = (1e-3 + 50e-6 * misses) * np.array([1, 1.05, 1])
    bent = DecodeCost.fit(misses, seconds, L=L, K=K, row_bytes=ROW, policy="lru")
    assert 0.01 < bent.fit_error < 0.05


def test_prediction_adds_up():
    cost, trace = make_cost(), make_trace()
    result = simulate(trace, "lru", slots_per_layer=3, backend="numpy")
    decode = result.in_phase("decode")
    assert decode["steps"] == 16 and 0 < decode["misses"] < result.misses  # prefill is left out
    per_step = decode["misses"] / 16
    assert predict_ms_per_token(result, cost) == pytest.approx(2 + per_step * 30e-3)
    assert predict_ms_per_token(result, cost, transport="callback") == pytest.approx(3 + per_step * 15e-3)
    # Rows of twice the size: another 1 MB a miss over 50 GB/s, and 1 MB more of each expert read at 1 TB/s.
    wide = predict_ms_per_token(result, cost, row_bytes=2 * ROW)
    assert wide == pytest.approx(2 + per_step * 50e-3 + L * K * 1e-3)
    # The size in the result counts like the argument.
    sized = simulate(trace, "lru", slots_per_layer=3, backend="numpy", row_bytes=2 * ROW)
    assert predict_ms_per_token(sized, cost) == pytest.approx(wide)


def test_events_with_a_miss_have_their_own_cost():
    result = simulate(make_trace(), "lru", slots_per_layer=3, backend="numpy")
    counts = result.in_phase("decode")
    assert 0 < counts["miss_events"] < counts["misses"]
    plain = make_cost()
    costly = make_cost(decode={"device": dataclasses.replace(plain.of("device"), event_seconds=50e-6)})
    more = predict_ms_per_token(result, costly) - predict_ms_per_token(result, plain)
    assert more == pytest.approx(counts["miss_events"] / 16 * 50e-3)


def test_policy_time_counts_where_the_host_decides():
    """At events that do not wait for a row: else the host decides while it arrives."""
    cost = make_cost()
    result = simulate(make_trace(), "lfu", slots_per_layer=3, backend="numpy")
    counts = result.in_phase("decode")
    per_step, all_hit = counts["misses"] / 16, L - counts["miss_events"] / 16
    assert 0 < all_hit < L
    assert predict_ms_per_token(result, cost) == pytest.approx(2 + per_step * 30e-3)
    ours = predict_ms_per_token(result, cost, transport="callback")
    assert ours == pytest.approx(3 - all_hit * 20e-3 + per_step * 15e-3)
    unknown = simulate(make_trace(), "lfru", slots_per_layer=3, backend="numpy")
    with pytest.raises(CostModelError, match="policy_seconds: 'lfru' was not measured; calibrate with --policies lfru"):
        predict_ms_per_token(unknown, cost, transport="callback")


def test_miss_link_reproduces_the_miss_time():
    cost = make_cost()
    slow = cost.miss_link("device")  # 30 us for 1 MB: 20 us at the copy rate, 10 us fixed
    assert slow.bytes_per_second == 50e9 and slow.copy_seconds == pytest.approx(10e-6)
    fast = cost.miss_link("callback")  # 15 us, faster than a copy alone
    assert fast.copy_seconds == 0 and fast.seconds(ROW) == pytest.approx(15e-6)


def test_prefetch_result_replaces_the_waiting():
    cost, trace = make_cost(), make_trace()
    cost = make_cost(decode={"device": dataclasses.replace(cost.of("device"), event_seconds=20e-6)})
    options = dict(link=cost.miss_link("device"), row_bytes=ROW, layer_seconds=1e-3, slots_per_layer=3)
    result = simulate(trace, "lru", slots_per_layer=3, backend="numpy", phase="decode")
    none = simulate_prefetch(trace, "lru", None, **options)
    plain = predict_ms_per_token(result, cost)
    assert predict_ms_per_token(result, cost, prefetch=none) == pytest.approx(plain)
    oracle = simulate_prefetch(trace, "lru", "oracle", **options)
    events = none.stall_events - oracle.stall_events
    assert none.stall_events == result.miss_events and events >= 0
    gained = (none.stall_seconds - oracle.stall_seconds + 20e-6 * events) / 16 * 1e3
    assert gained > 0
    assert predict_ms_per_token(result, cost, prefetch=oracle) == pytest.approx(plain - gained)
    other = simulate_prefetch(trace, "lru", None, **(options | {"slots_per_layer": 2}))
    with pytest.raises(CostModelError, match="both must replay the same trace"):
        predict_ms_per_token(result, cost, prefetch=other)


def test_refuses_what_was_not_measured():
    cost = make_cost()
    result = simulate(make_trace(), "lru", slots_per_layer=3, backend="numpy")
    with pytest.raises(CostModelError, match="transport: 'resident' was not measured.*callback.*device"):
        predict_ms_per_token(result, cost, transport="resident")
    with pytest.raises(CostModelError, match="phase: 'prefill'"):
        predict_ms_per_token(result, cost, phase="prefill")
    prefill = simulate(make_trace(), "lru", slots_per_layer=3, backend="numpy", phase="prefill")
    with pytest.raises(CostModelError, match="no decode steps"):
        predict_ms_per_token(prefill, cost)
    other = make_cost(decode={"device": dataclasses.replace(cost.of("device"), L=4)})
    with pytest.raises(CostModelError, match="3 MoE layers, calibrated with 4"):
        predict_ms_per_token(result, other)


def test_file_round_trip_and_damage(tmp_path):
    path, cost = tmp_path / "cost.json", make_cost()
    cost.save(path)
    assert CostModel.load(path) == cost
    content = json.loads(path.read_text())
    link, device = content["link"], content["decode"]["device"]
    for change, message in (
        ({"format": "other"}, "not a cost model"),
        ({"version": 9}, "version 9"),
        ({"link": {**link, "bytes_per_second": 0}}, "bytes_per_second: 0"),
        ({"link": {**link, "speed": 1}}, "damaged.*speed"),
        ({"decode": {}}, "no transport was measured"),
        ({"decode": {"device": {**device, "row_bytes": 1.5}}}, "row_bytes: 1.5"),
        ({"decode": {"device": {**device, "event_seconds": "short"}}}, "event_seconds: 'short'"),
        ({"memory_bytes_per_second": "fast"}, "memory_bytes_per_second: 'fast'"),
        ({"policy_seconds": {"lru": -1}}, r"policy_seconds\['lru'\]: -1"),
        ({"decode": [1]}, "damaged"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(CostModelError, match=f"cost.json: .*{message}"):
            CostModel.load(path)
    del content["notes"]
    path.write_text(json.dumps(content))
    with pytest.raises(CostModelError, match="field 'notes' is missing"):
        CostModel.load(path)
    path.write_text("{")
    with pytest.raises(CostModelError, match="not JSON"):
        CostModel.load(path)
    with pytest.raises(FileNotFoundError):
        CostModel.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([1e6], [1.0], "at least two sizes"),
        ([1e6, 1e6], [1.0, 1.0], "at least two sizes"),
        ([1e6, 2e6], [1.0, 0.0], "must be positive"),
        ([1e6, 2e9], [1.0, 1.0e-3], "took no longer"),
    ],
)
def test_link_fit_refuses(sizes, seconds, message):
    with pytest.raises(CostModelError, match=message):
        LinkCurve.fit(sizes, seconds)


@pytest.mark.parametrize(
    ("misses", "seconds", "message"),
    [
        ([0, 0], [1.0, 1.0], "one level without misses and one with"),
        ([1, 2], [1.0, 1.0], "one level without misses and one with"),
        ([0, 2], [1.0, 0.5], "took no longer"),
        ([0, 2], [0.0, 0.5], "must be positive"),
    ],
)
def test_decode_fit_refuses(misses, seconds, message):
    with pytest.raises(CostModelError, match=message):
        DecodeCost.fit(misses, seconds, L=L, K=K, row_bytes=ROW, policy="lru")


@pytest.mark.parametrize("events", ([0.0, 3.0], [0.0, 0.0], [1.0, 1.0], [0.0]))
def test_decode_fit_refuses_events_that_contradict_misses(events):
    with pytest.raises(CostModelError, match="miss_events .* contradict misses"):
        DecodeCost.fit([0, 2], [1.0, 2.0], events, L=L, K=K, row_bytes=ROW, policy="lru")
