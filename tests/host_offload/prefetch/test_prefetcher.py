"""The prefetcher over a played link: it does what the simulator says, and stops where it does harm."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_link import ROW, PlayedRun

from host_offload.cost_model import LinkCurve
from host_offload.predictor import Predictor, get_predictor
from host_offload.prefetch import Experience, reserve_rows
from host_offload.prefetch_sim import simulate_prefetch
from host_offload.trace import Trace


def make_trace(experts, E):
    experts = np.asarray(experts)
    T, L, K = experts.shape
    header = dict(moe_layers=list(range(L)), E=E, K=K, chunk=1, scope="layer", slots=L, contract="atomic-bypass")
    header |= dict(policy="none", model="made up", dtype="float32")
    weights = np.broadcast_to(np.linspace(1, 0.5, K), experts.shape)
    return Trace.from_rows(experts, weights, np.ones(T, int), np.zeros(T, int), np.arange(T), header)


def random_trace(seed, T=12, L=3, E=6, K=2):
    return make_trace(np.random.default_rng(seed).random((T, L, E)).argsort(-1)[..., :K], E)


class Guess(Predictor):
    """Draws experts, whatever happened."""

    name = "guess"

    def init(self, xp, L, E, seed):
        self._draw = np.random.default_rng(seed)
        return {"E": E}

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        return state

    def predict(self, xp, state, layer_now, target_layer):
        return self._draw.random(state["E"]).astype(np.float32)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from(("oracle", "previous-token", "request-counts")),
    st.integers(1, 2),
    st.sampled_from((0.25, 0.5, 1.0, 3.0)),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from((ROW - 1, ROW, 2 * ROW, 10**9)),
)
def test_it_does_what_the_simulator_says(seed, name, lead, copy_seconds, reserve, slots, budget):
    """Every count, and every second: two implementations of one timeline."""
    trace = random_trace(seed)
    made = lambda: get_predictor(name, lead_layers=lead, cost_us=0.0)  # noqa: E731
    wanted = simulate_prefetch(
        trace,
        "lru",
        made(),
        link=LinkCurve(ROW / copy_seconds),
        row_bytes=ROW,
        layer_seconds=1.0,
        slots_per_layer=slots,
        reserve=reserve,
        budget_bytes=budget,
        lead=lead,
    )
    run = PlayedRun(trace, made(), copy_seconds=copy_seconds, slots=slots, reserve=reserve, budget=budget)
    seconds = run.run(run.prefetcher.reads)
    rows = run.prefetcher.stats()["rows"]
    assert {name: rows[name] for name in ("issued", "on_time", "late", "harmful")} == {
        name: getattr(wanted, name) for name in ("issued", "on_time", "late", "harmful")
    }
    assert (run.misses, run.demanded) == (wanted.misses, wanted.demand)
    assert rows["wasted"] + rows["waiting"] == wanted.wasted
    assert seconds.sum() == pytest.approx(wanted.seconds)


def test_auto_budget_issues_what_begins_before_it_is_needed():
    """Of four wrong guesses a layer, two copies fit into its time, and one more begins within it."""
    trace = random_trace(0, T=40, E=12, K=4)
    run = PlayedRun(trace, Guess(), copy_seconds=0.4, slots=12, budget=None, reserve=12)
    run.run()
    nothing = PlayedRun(trace, Guess(), copy_seconds=0.4, slots=12, budget=ROW - 1, reserve=12)
    nothing.run()
    assert not any(nothing.prefetcher.stats()["rows"].values())
    events = 40 * 3
    few = PlayedRun(trace, Guess(), copy_seconds=0.4, slots=1, budget=None, reserve=12)
    few.run()
    rows = few.prefetcher.stats()["rows"]
    assert 0 < rows["issued"] + rows["cancelled"] <= 5 * events
    slow = PlayedRun(trace, Guess(), copy_seconds=40.0, slots=1, budget=None, reserve=12)
    slow.run()
    assert slow.prefetcher.stats()["rows"]["issued"] < rows["issued"]


@pytest.mark.parametrize("copy_seconds", (0.7, 1.5))
def test_shutoff_stops_what_harms_and_keeps_the_truth(copy_seconds):
    trace = random_trace(1, T=400, L=3, E=48, K=2)
    options = dict(copy_seconds=copy_seconds, slots=8, reserve=8, budget=None)
    none = PlayedRun(trace, None, **options).run()
    harmful = PlayedRun(trace, Guess(), **options).run()
    assert harmful.sum() > 1.02 * none.sum(), "the guess must do harm, or this test shows nothing"

    stopped = PlayedRun(trace, Guess(), shutoff=True, **options)
    seconds = stopped.run()
    layers = stopped.prefetcher.stats()["layers"]
    assert not any(layer["on"] for layer in layers) and all("costs" in layer["reason"] for layer in layers)
    assert seconds[200:].sum() < 1.01 * none[200:].sum()

    oracle = PlayedRun(trace, get_predictor("oracle"), shutoff=True, **options)
    seconds = oracle.run(("experts",))
    layers = oracle.prefetcher.stats()["layers"]
    assert all(layer["on"] and "saves" in layer["reason"] for layer in layers)
    truth = PlayedRun(trace, get_predictor("oracle"), **options).run(("experts",))
    assert truth.sum() < none.sum() and seconds[200:].sum() < 0.5 * (none + truth)[200:].sum()


def test_it_takes_up_again_after_steps_that_it_rested_through():
    """They cost what they cost without it, and a script is read on where the run is by then."""
    trace = random_trace(1, T=60, L=3, E=48, K=2)
    options = dict(copy_seconds=0.7, slots=8, reserve=8, budget=None)
    none = PlayedRun(trace, None, **options).run()
    seen = Experience(3, 48)
    run = PlayedRun(trace, get_predictor("oracle"), experience=seen, **options)
    resting = np.arange(60) // 7 % 2 == 1
    run.rests = resting.__getitem__
    seconds = run.run(("experts",))
    run.prefetcher.end()
    np.testing.assert_allclose(seconds[resting], none[resting])
    assert seconds[~resting].sum() < 0.9 * none[~resting].sum()
    rows = run.prefetcher.stats()["rows"]
    assert rows["useful"] > 60 and seen.counts.tokens == (~resting).sum()
    # The last rows of a stretch are for the layer that it rests through.
    assert rows["wasted"] <= 2 * np.count_nonzero(np.diff(resting))


def test_it_sleeps_where_no_layer_gains_and_wakes_to_try_again():
    """Asleep, a step costs what it costs without prefetch; all that passes is learned from; a truth is found out."""
    trace = random_trace(1, T=1500, L=3, E=48, K=2)
    options = dict(copy_seconds=0.7, slots=8, reserve=8, budget=None)
    none = PlayedRun(trace, None, **options).run()
    seen = Experience(3, 48)
    run = PlayedRun(trace, Guess(), shutoff=True, experience=seen, **options)
    asleep = []
    wakes = run.prefetcher.wakes
    run.prefetcher.wakes = lambda: asleep.append(not wakes()) or not asleep[-1]
    seconds = run.run()
    run.prefetcher.end()
    asleep = np.array(asleep)
    assert asleep.sum() == run.prefetcher.stats()["steps_asleep"] > 0.9 * len(asleep)
    np.testing.assert_allclose(seconds[asleep], none[asleep])
    naps = np.diff(np.flatnonzero(np.diff(np.concatenate([[False], asleep, [False]]).astype(int))))[::2]
    assert naps.tolist()[:2] == [256, 512]
    awake = np.flatnonzero(~asleep)
    assert len(awake) < 24 + 60 + 8 * 4, "awake for the trial, then some steps between naps"
    assert seen.counts.tokens == 1500 and seen.counts.total.sum() == 1500 * 3 * 2

    # What was found harmful is tried again after each nap, and stays once it has gained for long enough.
    run = PlayedRun(trace, get_predictor("oracle"), shutoff=True, **options)
    for shutoff in run.prefetcher.shutoffs:
        shutoff._gains, shutoff.state = [-1e-9] * 12, False
    run.run(("experts",))
    assert run.prefetcher.stats()["steps_asleep"] > 0 and all(s["on"] for s in run.prefetcher.stats()["layers"])


@pytest.mark.parametrize("copying", (0.0, 0.1, 0.5))
def test_it_tries_again_and_sleeps_however_seldom_events_copy(copying):
    """Only events that copy ask: woken, it waits for them, but not for ever, and a layer without any is no hope."""
    trace = random_trace(2, T=3000, L=3, E=48, K=2)
    run = PlayedRun(trace, Guess(), copy_seconds=0.7, slots=8, reserve=8, budget=None, shutoff=True)
    draw, compared = np.random.default_rng(0), []
    run.asks = lambda: draw.random() < copying
    for shutoff in run.prefetcher.shutoffs:
        judge = shutoff._compare
        shutoff._compare = lambda off, on, judge=judge: compared.append(run.prefetcher._steps) or judge(off, on)
    run.run()
    slept = run.prefetcher.stats()["steps_asleep"]
    assert slept > 1500, "some hundred steps of trial, and at most 64 between naps"
    late = [step for step in compared if step > 1000]
    assert bool(late) == (copying > 0), "tried again after the first sleep"


def test_gates_do_not_watch_layers_that_they_cannot_tell():
    run = PlayedRun(random_trace(0), get_predictor("gate-2"), budget=None, shutoff=True)
    assert [run.prefetcher._target(layer) for layer in range(3)] == [2, None, None]
    assert run.prefetcher.shutoffs[run.prefetcher._watched] == run.prefetcher.shutoffs[2:]
    plain = PlayedRun(random_trace(0), Guess(), shutoff=True).prefetcher
    assert [plain._target(layer) for layer in range(3)] == [1, 2, 0] and len(plain.shutoffs[plain._watched]) == 3


def test_without_shutoff_it_never_sleeps():
    run = PlayedRun(random_trace(1, T=400, E=48), Guess(), copy_seconds=0.7, slots=8, reserve=8)
    run.run()
    assert run.prefetcher.stats()["steps_asleep"] == 0


def test_a_moved_bank_loses_what_was_prefetched():
    run = PlayedRun(random_trace(3), Guess(), slots=1)
    run.prefetcher.place((1, 2))
    run.run()
    run.prefetcher.place((1, 2))
    waiting = run.prefetcher.stats()["rows"]["waiting"]
    assert waiting and run.prefetcher.taken.any()
    run.prefetcher.place((3, 2))
    after = run.prefetcher.stats()["rows"]
    assert after["waiting"] == 0 and not run.prefetcher.taken.any()
    run.check_balance()


def test_a_scripted_predictor_needs_its_script():
    run = PlayedRun(random_trace(3), get_predictor("oracle"))
    with pytest.raises(ValueError, match="prefetch='oracle' reads experts from a recorded run: use it with MoE.replay"):
        run.prefetcher.begin()
    run.prefetcher.begin([])
    with pytest.raises(ValueError, match="the recorded run has 0 steps, and this is one more"):
        run.prefetcher.ahead(0, np.array([1]), np.zeros(6), {}, run.cache._slot_of, lambda: ~run.prefetcher.taken)


def test_lead_beyond_a_step_is_refused():
    with pytest.raises(ValueError, match="lead_layers: 4, but a step has 3 MoE layers"):
        PlayedRun(random_trace(3), get_predictor("oracle", lead_layers=4))


def test_reserve_is_bounded_by_all_experts():
    assert reserve_rows(L=24, E=32, K=4) == 16 and reserve_rows(L=2, E=3, K=2) == 6
