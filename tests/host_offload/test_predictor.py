"""Predictors: hand-worked scores, NumPy against jax.numpy, no look at the future, and errors that say what to do."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload import predictor as predictor_module
from host_offload.predictor import Predictor, get_predictor, list_predictors, register_predictor
from host_offload.predictors import Recorded, evaluate, replay_steps
from host_offload.predictors.replay import recorded_scores, upcoming
from host_offload.predictors.tables import pair_needs
from host_offload.trace import Trace, TraceError

NAMES = (
    "cross-layer",
    "cross-layer+temporal",
    "eamc-mean",
    "eamc-nearest",
    "gate-1",
    "gate-2",
    "gate-3",
    "linear-need",
    "linear-scores",
    "oracle",
    "previous-token",
    "request-counts",
    "static-frequency",
    "temporal",
)


def make_trace(experts, request, E, step=None, phase=None, scores=None, pred=None):
    """A trace of rows [T, L, K], one step each unless told otherwise."""
    experts = np.asarray(experts)
    T, L, K = experts.shape
    header = {
        "moe_layers": list(range(L)),
        "E": E,
        "K": K,
        "chunk": 1,
        "scope": "layer",
        "slots": L,
        "contract": "atomic-bypass",
        "policy": "none",
        "model": "made up",
        "dtype": "float32",
    }
    return Trace.from_rows(
        experts,
        np.broadcast_to(np.linspace(1, 0.5, K), experts.shape),
        np.ones(T, int) if phase is None else phase,
        request,
        np.arange(T) if step is None else step,
        header,
        scores=scores,
        pred=pred,
    )


def random_trace(rng, T=12, L=3, E=6, K=2, requests=3, scores=False, pred=()):
    experts = rng.random((T, L, E)).argsort(-1)[..., :K]
    request = np.sort(rng.integers(0, requests, T))
    values = rng.random((T, L, E)).astype(np.float16) if scores else None
    guesses = {name: rng.random((T, L, E)).argsort(-1)[..., :K].astype(np.int16) for name in pred}
    return make_trace(experts, request, E, scores=values, pred=guesses)


def scores_after(predictor, needs, layer_now, target, xp=np):
    """Scores of `predictor` after the events `needs`: a list of (step, layer, experts)."""
    L, E = 2, 4
    state = predictor.init(xp, L, E, 0)
    for step, layer, experts in needs:
        need = xp.asarray(np.isin(np.arange(E), experts))
        state = predictor.observe(xp, state, layer, need, xp.zeros(E, xp.float32), xp.int32(step * L + layer))
    return np.asarray(predictor.predict(xp, state, layer_now, target)).tolist()


def test_registered_names():
    assert tuple(list_predictors()) == NAMES


@pytest.mark.parametrize("xp", [np, jnp])
def test_previous_token_is_recency_and_counts_count(xp):
    events = [(0, 1, [0, 1]), (1, 1, [1]), (2, 0, [3])]
    # Layer 1 at clock 4: expert 0 last needed at clock 1, expert 1 at clock 3, the others never.
    assert scores_after(get_predictor("previous-token"), events, 0, 1, xp) == [-3, -1, -np.inf, -np.inf]
    assert scores_after(get_predictor("request-counts"), events, 0, 1, xp) == [1, 2, -np.inf, -np.inf]


def test_static_frequency_counts_tokens_of_all_traces():
    experts = np.zeros((4, 2, 1), int)
    experts[:, 1, 0] = [2, 2, 0, 2]
    trace = make_trace(experts, [0, 0, 1, 1], 4)
    fitted = get_predictor("static-frequency").fit([trace.select([0]), trace.select([1])])
    assert scores_after(fitted, [(0, 0, [0])], 0, 1) == [1, -np.inf, 3, -np.inf]


def test_cross_layer_table_learns_a_permutation():
    rng = np.random.default_rng(0)
    first = rng.integers(0, 4, 200)
    experts = np.stack([first, (first + 1) % 4], axis=1)[..., None]
    trace = make_trace(experts, np.zeros(200, int), 4)
    fitted = get_predictor("cross-layer").fit([trace])
    for expert in range(4):
        scores = scores_after(fitted, [(0, 0, [expert])], 0, 1)
        assert np.argmax(scores) == (expert + 1) % 4
    # By the formula: log P(e) + log((N(i, e) + 10 P(i)) / (N(e) + 10) / P(i)), P with one imagined use of each expert.
    i, e = 2, 3
    share = ((first == i).sum() + 1) / (200 + 4)
    count = (first == i).sum()
    expected = np.log((count + 1) / (200 + 4)) + np.log((count + 10 * share) / (count + 10) / share)
    assert scores_after(fitted, [(0, 0, [i])], 0, 1)[e] == pytest.approx(expected, abs=1e-5)


def test_temporal_table_follows_a_cycle_and_stays_in_the_request():
    cycle = np.arange(80) % 4
    experts = np.stack([np.zeros(80, int), cycle], axis=1)[..., None]
    # Requests of two tokens: pairs that cross their border (1 -> 2, 3 -> 0) must not be learned.
    fitted = get_predictor("temporal").fit([make_trace(experts, np.arange(80) // 2, 4)])
    assert np.argmax(scores_after(fitted, [(0, 1, [0]), (1, 0, [0])], 0, 1)) == 1
    assert np.argmax(scores_after(fitted, [(0, 1, [2]), (1, 0, [0])], 0, 1)) == 3
    from_one = scores_after(fitted, [(0, 1, [1]), (1, 0, [0])], 0, 1)
    assert from_one[2] == pytest.approx(from_one[0])  # 1 was never followed: only the prior speaks


def test_pairs_of_one_request_within_and_across_tokens():
    need = np.arange(3 * 2 * 1).reshape(3, 2, 1)  # need[t, l] = 2 t + l
    source, before, target = pair_needs(need, 0, 1)
    assert (source[:, 0].tolist(), before[:, 0].tolist(), target[:, 0].tolist()) == ([0, 2, 4], [0, 1, 3], [1, 3, 5])
    source, before, target = pair_needs(need, 1, 1)  # layer 0 of the next token; its set of this token is known
    assert (source[:, 0].tolist(), before[:, 0].tolist(), target[:, 0].tolist()) == ([1, 3], [0, 2], [2, 4])
    source, before, target = pair_needs(need, 1, 2)
    assert (source[:, 0].tolist(), before[:, 0].tolist(), target[:, 0].tolist()) == ([1, 3], [1, 3], [3, 5])


def test_eamc_takes_the_most_similar_request():
    experts = np.zeros((4, 2, 1), int)
    experts[0:2] = [[0], [1]]  # request 0 uses expert 0, then 1
    experts[2:4] = [[3], [2]]  # request 1 uses 3, then 2
    trace = make_trace(experts, [0, 0, 1, 1], 4)
    nearest = get_predictor("eamc-nearest").fit([trace])
    assert scores_after(nearest, [(0, 0, [3])], 0, 1) == [-np.inf, -np.inf, 1, -np.inf]
    assert scores_after(nearest, [(0, 0, [0])], 0, 1) == [-np.inf, 1, -np.inf, -np.inf]
    mean = get_predictor("eamc-mean").fit([trace])
    assert scores_after(mean, [(0, 0, [3])], 0, 1) == [-np.inf, 0.5, 0.5, -np.inf]


def test_eamc_compares_only_layers_that_have_run():
    # Both requests agree with the running one in layer 0 alike; layer 1 of request 0 is spread and so shorter. Over all
    # layers request 0 would be nearer.
    experts = np.array([[[0], [1]], [[0], [2]], [[0], [3]], [[0], [3]], [[1], [3]]])
    trace = make_trace(experts, [0, 0, 1, 1, 1], 4)
    fitted = get_predictor("eamc-nearest").fit([trace])
    # Layer 0: request 0 has [1, 0, 0, 0], similarity 1; request 1 has [2, 1, 0, 0] / 3, similarity 2 / sqrt(5).
    assert scores_after(fitted, [(0, 0, [0])], 0, 1) == [-np.inf, 0.5, 0.5, -np.inf]
    assert scores_after(fitted, [(0, 0, [0]), (1, 0, [1])], 0, 1) == [-np.inf, -np.inf, -np.inf, 1]


def test_ridge_heads_solve_the_normal_equations():
    rng = np.random.default_rng(1)
    trace = random_trace(rng, T=40, requests=1, scores=True)
    fitted = get_predictor("linear-scores", ridge=2.0).fit([trace])
    E = 6
    need = np.zeros((40, 3, E))
    np.put_along_axis(need, trace.experts.astype(int), 1, -1)
    before = np.concatenate([np.zeros((1, E)), need[:-1, 2]])
    x = np.concatenate([trace.scores[:, 1].astype(float), before, np.ones((40, 1))], axis=1)
    penalty = np.diag([2.0] * (2 * E) + [1e-6])
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ need[:, 2])
    state = fitted.init(np, 3, E, 0)
    np.testing.assert_allclose(state["weights"][0, 1], weights, atol=1e-4)
    state = fitted.observe(np, state, 2, need[6, 2] > 0, np.zeros(E, np.float32), np.int32(0))
    state = fitted.observe(np, state, 1, need[7, 1] > 0, trace.scores[7, 1].astype(np.float32), np.int32(1))
    np.testing.assert_allclose(fitted.predict(np, state, 1, 2), x[7] @ weights, atol=1e-4)


def test_linear_scores_need_recorded_scores():
    with pytest.raises(ValueError, match="the trace holds no scores"):
        get_predictor("linear-scores").fit([random_trace(np.random.default_rng(0))])


@pytest.mark.parametrize("name", NAMES)
def test_numpy_and_jax_agree(name):
    rng = np.random.default_rng(2)
    pred = ("gate-1", "gate-2", "gate-3")
    trace, other = (random_trace(rng, L=4, scores=True, pred=pred) for _ in range(2))
    predictor = get_predictor(name).fit([other])
    L, E = 4, 6
    states = {xp: predictor.init(xp, L, E, 0) for xp in (np, jnp)}
    for step in replay_steps(trace, reads=predictor.reads):
        for layer in range(L):
            recorded = upcoming(step.recorded, None, layer)
            scores = {}
            for xp, state in states.items():
                if step.start and layer == 0:
                    state = predictor.reset(xp, state)
                t = xp.int32(step.number * L + layer)
                arrays = xp.asarray(step.need[layer]), xp.asarray(step.scores[layer])
                states[xp] = predictor.observe(xp, state, layer, *arrays, t, recorded)
                scores[xp] = np.asarray(predictor.predict(xp, states[xp], layer, (layer + 1) % L))
            assert scores[np].dtype == scores[jnp].dtype == np.float32 and scores[np].shape == (E,)
            np.testing.assert_allclose(scores[np], scores[jnp], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "oracle"])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 99))
def test_no_predictor_sees_the_future(name, seed):
    """Two traces that part at step 8 give equal scores before it."""
    rng = np.random.default_rng(seed)
    pred = ("gate-1", "gate-2", "gate-3")
    trace, other = (random_trace(rng, scores=True, pred=pred) for _ in range(2))
    changed = {name: array.copy() for name, array in trace.arrays().items()}
    for field in ("experts", "weights", "scores", *(f"pred/{p}" for p in pred)):
        changed[field][8:] = other.arrays()[field][8:]
    fields = {name: array for name, array in changed.items() if not name.startswith("pred/")}
    guesses = {p: changed[f"pred/{p}"] for p in pred}
    altered = Trace(header=trace.header, pred=guesses, **fields)
    fitted = get_predictor(name).fit([random_trace(rng, scores=True)])
    seen = []
    for one in (trace, altered):
        state, scores = fitted.init(np, 3, 6, 0), []
        steps = list(replay_steps(one, reads=fitted.reads))
        for index, step in enumerate(steps[:8]):
            for layer in range(3):
                after = steps[index + 1].recorded if index + 1 < len(steps) else None
                recorded = upcoming(step.recorded, after, layer)
                t = np.int32(step.number * 3 + layer)
                state = fitted.observe(np, state, layer, step.need[layer], step.scores[layer], t, recorded)
                scores.append(fitted.predict(np, state, layer, (layer + 1) % 3).copy())
        seen.append(scores)
    np.testing.assert_array_equal(*seen)


def test_lead_reaches_further_and_is_kept():
    rng = np.random.default_rng(3)
    trace = random_trace(rng, T=30)
    for name in ("cross-layer", "linear-need"):
        far = get_predictor(name, lead_layers=2).fit([trace])
        assert evaluate(far, trace, lead=2, ks=(2,)).needed.tolist() == [0, 0, 60]
        near = get_predictor(name).fit([trace])
        with pytest.raises(ValueError, match="target_layer: 2 is 2 layers after layer_now 0.*lead_layers 1"):
            evaluate(near, trace, lead=2)
        # Other tables, other scores.
        assert evaluate(far, trace, lead=1, ks=(2,)).recall == evaluate(near, trace, lead=1, ks=(2,)).recall
    with pytest.raises(ValueError, match="lead_layers: 2, but 'gate-1' is made 1 layers ahead"):
        get_predictor("gate-1", lead_layers=2)
    assert get_predictor("gate-3").lead_layers == 3


def test_recorded_ids_and_scores():
    ids = np.array([[[2, 0]], [[1, -1]]], np.int16)  # two rows, one layer
    assert recorded_scores(ids, 4).tolist() == [[1, 2, 2, -np.inf]]
    values = np.array([[[0.5, 0.25]], [[0.125, 1.0]]], np.float16)
    assert recorded_scores(values, 2).tolist() == [[0.5, 1.0]]
    told = {"gate-1": np.ones((3, 2), np.float32), "experts": np.ones((3, 2), np.float32)}
    nxt = {name: 2 * array for name, array in told.items()}
    assert upcoming(told, nxt, 1)["gate-1"][:, 0].tolist() == [-np.inf, -np.inf, 1]
    assert upcoming(told, nxt, 1)["experts"][:, 0].tolist() == [2, 2, 1]


def test_recorded_predictions_are_read_and_checked():
    rng = np.random.default_rng(4)
    trace = random_trace(rng, pred=("gate-1", "mine"))
    perfect = Trace(header=trace.header, pred={"mine": trace.experts}, **fields_of(trace))
    accuracy = evaluate(Recorded("mine"), perfect, ks=(1, 2))
    assert accuracy.recall.tolist() == [0.5, 1.0] and accuracy.precision.tolist() == [1.0, 1.0]
    with pytest.raises(TraceError, match="pred/gate-2 is missing .*gate-1, mine"):
        evaluate("gate-2", trace)
    trace.pred["mine"] = trace.pred["mine"] + np.int16(6)
    with pytest.raises(TraceError, match="pred/mine: row 0: an expert is outside -1..5"):
        evaluate(Recorded("mine"), trace)
    trace.pred["mine"] = np.zeros((12, 3, 5), np.float16)
    with pytest.raises(TraceError, match="float16 scores must be"):
        evaluate(Recorded("mine"), trace)
    with pytest.raises(ValueError, match="array: '' is not the name"):
        Recorded()


def fields_of(trace):
    return {name: getattr(trace, name) for name in ("experts", "weights", "phase", "request", "step", "scores")}


def test_accuracy_by_hand():
    # One request, L 2, E 4, K 1. Layer 1 needs 0, 1, 1, 2; recency predicts nothing, 0, 1 then 0, 1 then 0.
    experts = np.zeros((4, 2, 1), int)
    experts[:, 1, 0] = [0, 1, 1, 2]
    accuracy = evaluate("previous-token", make_trace(experts, [0] * 4, 4), ks=(1, 2))
    assert accuracy.needed.tolist() == [0, 4]
    assert accuracy.found.tolist() == [[0, 1], [0, 1]]
    assert accuracy.predicted.tolist() == [[0, 3], [0, 5]]
    assert accuracy.recall.tolist() == [0.25, 0.25]
    assert accuracy.precision.tolist() == [1 / 3, 0.2]
    assert np.isnan(accuracy.recall_per_layer[:, 0]).all() and accuracy.recall_per_layer[0, 1] == 0.25
    both = accuracy + accuracy
    assert both.recall.tolist() == accuracy.recall.tolist() and both.needed[1] == 8
    with pytest.raises(ValueError, match="cannot add 'request-counts'"):
        accuracy + evaluate("request-counts", make_trace(experts, [0] * 4, 4), ks=(1, 2))


def test_requests_reset_and_batches_are_unions():
    experts = np.zeros((4, 2, 1), int)
    experts[:, 1, 0] = [3, 3, 3, 3]
    apart = make_trace(experts, [0, 0, 1, 1], 4)
    assert evaluate("previous-token", apart, ks=(1,)).found[0, 1] == 2  # each request's first token is unknown
    assert evaluate("previous-token", apart, ks=(1,), reset="never").found[0, 1] == 3
    experts[:, 1, 0] = [0, 1, 2, 1]
    batch = make_trace(experts, [0, 1, 0, 1], 4, step=[0, 0, 1, 1])
    accuracy = evaluate("previous-token", batch, ks=(4,))
    assert (accuracy.needed[1], accuracy.found[0, 1]) == (4, 1)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999))
def test_oracle_bounds_all_and_recall_rises_with_k(seed):
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, scores=True)
    assert evaluate("oracle", trace, ks=(2,)).recall.tolist() == [1.0]
    for name in ("temporal", "eamc-mean", "linear-need", "request-counts"):
        accuracy = evaluate(get_predictor(name).fit([trace]), trace, ks=(1, 2, 6))
        assert (np.diff(accuracy.found, axis=0) >= 0).all() and (accuracy.found <= accuracy.needed).all()
        assert (accuracy.found <= accuracy.predicted).all()


def test_errors_name_the_field(monkeypatch):
    trace = random_trace(np.random.default_rng(0))
    with pytest.raises(ValueError, match="unknown name 'cros-layer'. Did you mean 'cross-layer'"):
        get_predictor("cros-layer")
    with pytest.raises(TypeError, match="expected a name"):
        get_predictor(3)
    built = get_predictor("oracle", byte_cap=5)
    assert get_predictor(built) is built and built.byte_cap == 5
    with pytest.raises(TypeError, match="already built"):
        get_predictor(built, lead_layers=2)
    for parameters, message in (
        ({"lead_layers": 0}, "lead_layers: 0"),
        ({"cost_us": -1.0}, "cost_us: -1.0"),
        ({"byte_cap": -1}, "byte_cap: -1"),
    ):
        with pytest.raises(ValueError, match=message):
            get_predictor("temporal", **parameters)
    with pytest.raises(ValueError, match="ridge: 0"):
        get_predictor("linear-need", ridge=0)
    for name in NAMES:
        if get_predictor(name).needs_fit:
            with pytest.raises(ValueError, match=f"{name.replace('+', '.')}.*call fit"):
                evaluate(name, trace)
    with pytest.raises(ValueError, match="at least one trace"):
        get_predictor("temporal").fit([])
    fitted = get_predictor("temporal").fit([trace])
    with pytest.raises(ValueError, match="fitted on L = 3, E = 6, the model has L = 3, E = 7"):
        fitted.init(np, 3, 7, 0)
    with pytest.raises(ValueError, match="lead_layers: 4 is more than the 3"):
        get_predictor("cross-layer", lead_layers=4).fit([trace])
    for arguments, message in (
        ({"ks": (0,)}, "ks: 0"),
        ({"lead": 3}, "lead: 3 layers ahead leaves no target"),
        ({"reset": "often"}, "reset: expected"),
        ({"phase": "both"}, "phase: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate("request-counts", trace, **arguments)

    monkeypatch.setattr(predictor_module, "_REGISTRY", dict(predictor_module._REGISTRY))
    with pytest.raises(TypeError, match="expected a subclass"):
        register_predictor(object)

    class Nameless(Predictor):
        init = observe = predict = None

    with pytest.raises(ValueError, match="non-empty string"):
        register_predictor(Nameless)
    Nameless.name = "temporal"
    with pytest.raises(ValueError, match="'temporal' is taken by host_offload.predictors.tables.Temporal"):
        register_predictor(Nameless)


@pytest.mark.skipif("MOE_JAX_TRACES" not in os.environ, reason="MOE_JAX_TRACES is not set")
def test_recall_on_real_routing():
    """The figures of docs/predictors.md for the tables, both folds."""
    with np.load(Path(os.environ["MOE_JAX_TRACES"]) / "gptoss20b_routes_mmlu60.npz") as arrays:
        experts, request = arrays["experts"], np.repeat(np.arange(60), np.diff(arrays["offsets"]))
    trace = make_trace(experts, request, 32)
    folds = [trace.select(range(half, 60, 2)) for half in (0, 1)]
    for name, recall in (("cross-layer", [0.612, 0.819, 0.907]), ("cross-layer+temporal", [0.630, 0.835, 0.916])):
        parts = [evaluate(get_predictor(name).fit([a]), b) for a, b in (folds, folds[::-1])]
        np.testing.assert_allclose((parts[0] + parts[1]).recall, recall, atol=6e-4)
