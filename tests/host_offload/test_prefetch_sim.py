"""Prefetch over a finite link: hand-worked timelines, and what must hold for any trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.cost_model import LinkCurve
from host_offload.policy import get_policy
from host_offload.predictor import get_predictor
from host_offload.predictors import Recorded
from host_offload.prefetch_sim import simulate_prefetch
from host_offload.simulate import simulate
from host_offload.trace import Trace

ROW = 1000
SECOND_A_ROW = LinkCurve(ROW)  # one copy takes one second


def make_trace(experts, E, request=None, guess=None):
    experts = np.asarray(experts)
    T, L, K = experts.shape
    header = dict(moe_layers=list(range(L)), E=E, K=K, chunk=1, scope="layer", slots=L, contract="atomic-bypass")
    header |= dict(policy="none", model="made up", dtype="float32")
    weights = np.broadcast_to(np.linspace(1, 0.5, K), experts.shape)
    pred = {} if guess is None else {"guess": np.asarray(guess, np.int16)}
    request = np.zeros(T, int) if request is None else request
    return Trace.from_rows(experts, weights, np.ones(T, int), request, np.arange(T), header, pred=pred)


def random_trace(seed, T=10, L=3, E=6, K=2):
    rng = np.random.default_rng(seed)
    experts = rng.random((T, L, E)).argsort(-1)[..., :K]
    guess = np.where(rng.random((T, L, K)) < 0.5, experts, rng.random((T, L, E)).argsort(-1)[..., :K])
    return make_trace(experts, E, np.sort(rng.integers(0, 2, T)), guess)


def run(trace, predictor, policy="static", **changes):
    options = dict(link=SECOND_A_ROW, row_bytes=ROW, layer_seconds=1.0, slots_per_layer=1, width=4)
    return simulate_prefetch(trace, policy, predictor, **(options | changes))


TRACE = [[[1], [2]], [[1], [3]]]


def counts(result):
    return result.issued, result.on_time, result.late, result.wasted, result.harmful, result.demand


def test_on_time_prefetch_hides_the_copy():
    """A copy takes as long as a layer, so what a layer asks for arrives just as the next one needs it.

    t 0..1: expert 1 on demand; layer 0 computes to 2, while expert 2 is copied. Layer 1 computes 2..3; expert 1, its
    next wish, is cached. Layer 0 hits and computes 3..4, while expert 3 is copied for layer 1. Only event 0 waits.
    """
    result = run(make_trace(TRACE, 4), "oracle", "lru")
    assert counts(result) == (2, 2, 0, 0, 0, 1)
    assert result.stall.tolist() == [1.0, 0.0]
    assert (result.precision, result.coverage, result.timeliness) == (1.0, 2 / 3, 1.0)
    assert result.seconds == 5.0 and result.link_seconds == 3.0 and result.bytes_moved == 3 * ROW


def test_late_prefetch_waits_for_the_rest_of_the_copy():
    """Layers of 0.25 s, copies of 1 s, one slot a layer, three events that each need another expert.

    Event 0 (layer 0): demand 0..1, stall 1, next event at 1.25. The prefetch queued at 0 begins when the link is
    free, at 1, and arrives at 2: event 1 waits 0.75, ends at 2.25. The prefetch queued at 1.25 begins at 2, arrives at
    3: event 2 waits 0.75, ends at 3.25; the next one waits 0.75 as well.
    """
    result = run(make_trace([[[1], [2]], [[2], [3]]], 4), "oracle", "lru", layer_seconds=0.25)
    assert counts(result) == (3, 0, 3, 0, 0, 1)
    assert result.stall.tolist() == [1.75, 1.5]
    assert result.timeliness == 0 and result.coverage == 0.75
    assert result.seconds == pytest.approx(3.25 + 4 * 0.25)
    assert result.link_seconds == 4.0


def test_a_prefetch_that_could_not_begin_is_cancelled():
    """Two experts each event: the demand of two copies keeps the link from 0 to 2 s, event 1 begins at 2.0 + 0 s.

    With layers of no length the link is never free between events: nothing is issued, all is demand.
    """
    result = run(make_trace([[[1, 2], [1, 2]], [[3, 0], [3, 0]]], 4), "oracle", "lru", layer_seconds=0.0)
    assert counts(result) == (0, 0, 0, 0, 0, 8)
    assert result.stall_seconds == 8.0 and result.bytes_moved == 8 * ROW


def test_a_wrong_prefetch_in_flight_delays_the_demand():
    """The guess (3) is in flight 1..2 when event 1 begins at 1.5 and needs 2, whose copy runs 2..3: it waits 1.5 s."""
    trace = make_trace([[[1], [2]]], 4, guess=[[[-1], [3]]])
    result = run(trace, Recorded("guess"), "lru", layer_seconds=0.5)
    assert counts(result) == (1, 0, 0, 1, 0, 2)
    assert result.stall.tolist() == [1.0, 1.5]
    assert run(trace, None, "lru", layer_seconds=0.5).stall.tolist() == [1.0, 1.0]


def test_harmful_prefetch_evicts_what_is_needed_first():
    """A reserve of one place; the slot of layer 1 holds 0, which the policy prefers, from step 0 on.

    Step 0 guesses 3 for layer 1, in vain: 3 stays in the reserve. Step 1 guesses 1, in vain, which takes its place.
    Step 2 needs 3: the evicted row would have served it, so the guess of 1 was harmful.
    """
    policy = get_policy("static", frequency=np.tile([4.0, 3.0, 1.0, 1.0], (2, 1)))
    trace = make_trace([[[1], [0]], [[1], [2]], [[1], [3]]], 4, guess=[[[-1], [3]], [[-1], [1]], [[-1], [-1]]])
    result = run(trace, Recorded("guess"), policy, reserve=1, layer_seconds=3.0)
    assert counts(result) == (2, 0, 0, 2, 1, 4)
    roomy = run(trace, Recorded("guess"), policy, reserve=2, layer_seconds=3.0)
    assert counts(roomy) == (2, 1, 0, 1, 0, 3)


def test_a_stale_prefetch_never_begins():
    """The guess for layer 1 waits behind the demand until event 1 begins; the idle time after it is not used for it."""
    trace = make_trace([[[1], [2]], [[1], [2]]], 4, guess=[[[-1], [3]], [[-1], [-1]]])
    result = run(trace, Recorded("guess"), "lru", layer_seconds=[0.0, 5.0])
    assert counts(result) == (0, 0, 0, 0, 0, 2)


def test_a_place_is_free_once_its_event_has_begun():
    """A reserve of one: 3, guessed for layer 1 in vain, gives way at that event to the right guess for layer 2."""
    trace = make_trace([[[1], [2], [1]]], 4, guess=[[[-1], [3], [1]]])
    result = run(trace, Recorded("guess"), "lru", reserve=1, layer_seconds=3.0)
    assert counts(result) == (2, 1, 0, 1, 0, 2)


def test_predictor_time_is_charged():
    trace = make_trace(TRACE, 4)
    free, slow = (run(trace, get_predictor("oracle", cost_us=cost)) for cost in (0, 250_000))
    assert slow.predict_seconds == pytest.approx(4 * 0.25)
    assert slow.seconds == pytest.approx(slow.compute_seconds + slow.stall_seconds + 1.0)
    assert free.predict_seconds == 0


def test_the_reset_empties_the_reserve():
    trace = make_trace([[[1], [2]], [[1], [3]]], 4, request=[0, 1], guess=[[[-1], [3]], [[-1], [-1]]])
    assert run(trace, Recorded("guess"), "lru", layer_seconds=3.0).on_time == 0
    assert run(trace, Recorded("guess"), "lru", layer_seconds=3.0, reset="never").on_time == 1


CONTRACTS = ("atomic-bypass", "atomic-forced-admit")


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 999), policy=st.sampled_from(["lru", "lfu", "lfu-incache"]), contract=st.sampled_from(CONTRACTS)
)
def test_the_cache_is_that_of_the_simulator(seed, policy, contract):
    trace = random_trace(seed)
    for scope in ("layer", "global"):
        for reset in ("request", "never"):
            settings = dict(slots_per_layer=2, scope=scope, contract=contract, reset=reset)
            result = run(trace, Recorded("guess"), policy, **settings)
            expected = simulate(trace, policy, backend="numpy", **settings)
            assert (result.misses, result.accesses) == (expected.misses, expected.accesses)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 999),
    reserve=st.integers(0, 6),
    budget=st.sampled_from([None, 0, ROW, 2 * ROW]),
    layer=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    fixed=st.sampled_from([0.0, 0.5]),
)
def test_bytes_and_times_are_conserved(seed, reserve, budget, layer, fixed):
    trace = random_trace(seed)
    options = dict(link=LinkCurve(ROW, fixed), layer_seconds=layer, slots_per_layer=2)
    none = run(trace, None, "lru", **options)
    copy = 1 + fixed
    # Without prefetch every miss waits for its own copy, one after the other.
    assert none.stall_seconds == pytest.approx(none.misses * copy) and none.issued == 0
    assert none.link_seconds == pytest.approx(none.stall_seconds)
    result = run(trace, Recorded("guess"), "lru", reserve=reserve, budget_bytes=budget, **options)
    assert result.demand + result.useful == result.misses == none.misses
    assert result.useful + result.wasted == result.issued and min(counts(result)) >= 0
    assert result.harmful <= result.wasted + result.useful
    assert result.bytes_moved == (result.misses + result.wasted) * ROW
    assert result.link_seconds == pytest.approx((result.demand + result.issued) * copy)
    assert result.seconds == pytest.approx(result.compute_seconds + result.stall_seconds)
    if reserve == 0 or budget == 0:
        assert counts(result) == counts(none) and result.stall_seconds == pytest.approx(none.stall_seconds)
    values = result.to_dict()
    assert values["wasted_bytes"] == result.wasted * ROW and values["stall_per_layer"] == result.stall.tolist()


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), lead=st.integers(1, 3))
def test_oracle_on_a_fast_link_stalls_only_until_it_is_warm(seed, lead):
    """Copies of all K experts fit into one layer: after the first `lead` events of a request nothing waits."""
    trace = random_trace(seed)
    oracle = get_predictor("oracle", lead_layers=lead)
    result = run(trace, oracle, "lru", link=LinkCurve(2.5 * ROW), lead=lead, reserve=20)
    assert result.late == 0 and result.wasted == 0
    requests = len(np.unique(trace.request))
    assert result.demand <= 2 * lead * requests
    assert result.stall_seconds <= 2 * lead * requests / 2.5 + 1e-9
    infinite = run(trace, oracle, "lru", link=LinkCurve(np.inf), lead=lead, reserve=20)
    assert infinite.stall_seconds == 0


def test_byte_cap_is_a_budget():
    trace = random_trace(1, T=20)
    slow = dict(layer_seconds=5.0)  # time for every copy: only the budget limits
    capped = run(trace, get_predictor("oracle", byte_cap=ROW), "lru", **slow)
    assert counts(capped) == counts(run(trace, "oracle", "lru", budget_bytes=2 * ROW - 1, **slow))
    assert capped.issued < run(trace, "oracle", "lru", **slow).issued


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": 5e9}, "link: expected a host_offload.cost_model.LinkCurve"),
        ({"row_bytes": 0}, "row_bytes: 0"),
        ({"layer_seconds": -1.0}, "layer_seconds: -1.0"),
        ({"layer_seconds": [1.0, 1.0, 1.0]}, "nor 2 of them"),
        ({"lead": 2}, "lead: 2 layers, but predictor 'oracle' has lead_layers 1"),
        ({"reserve": -1}, "reserve: -1"),
        ({"width": 0}, "width: 0"),
        ({"budget_bytes": 1.5}, "budget_bytes: 1.5"),
        ({"contract": "sequential"}, "contract: 'sequential'"),
        ({"scope": "all"}, "scope: 'all'"),
        ({"reset": "no"}, "reset: 'no'"),
        ({"slots_per_layer": 9}, "slots_per_layer: 9"),
    ],
)
def test_errors_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        run(make_trace(TRACE, 4), "oracle", **change)
