"""What live predictors learn from: counts taken piece by piece are those of a fit, and a warm start is of one model."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.predictor import get_predictor, list_predictors
from host_offload.predictors.replay import request_needs
from host_offload.prefetch import Experience, ExperienceError
from host_offload.prefetch.live import GATES, LivePredictor
from host_offload.trace import Trace

L, E, K = 3, 6, 2
LEARNED = ("static-frequency", "cross-layer", "temporal", "cross-layer+temporal", "eamc-nearest", "eamc-mean")


def make_trace(lengths, seed=0):
    rng = np.random.default_rng(seed)
    T = sum(lengths)
    experts = (rng.random((T, L, E)) * np.linspace(1, 2, E)).argsort(-1)[..., :K]
    header = dict(moe_layers=list(range(L)), E=E, K=K, chunk=1, scope="layer", slots=L, contract="atomic-bypass")
    header |= dict(policy="none", model="made up", dtype="float32")
    request = np.repeat(np.arange(len(lengths)), lengths)
    weights = np.broadcast_to(np.linspace(1, 0.5, K), experts.shape)
    return Trace.from_rows(experts, weights, np.ones(T, int), request, np.arange(T), header)


def decode(live, need, start=0):
    """Feeds steps need [T, L, E] to a live predictor."""
    for number, step in enumerate(need, start):
        for layer in range(L):
            t = np.int32(number * L + layer)
            live.observe(layer, step[layer], np.zeros(E, np.float32), t, first=layer == 0, last=layer == L - 1)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 99), st.integers(1, 3), st.integers(1, 4))
def test_counts_taken_piece_by_piece_are_those_of_a_fit(lengths, seed, lead, piece):
    trace = make_trace(lengths, seed)
    seen = Experience(L, E, lead)
    for need in request_needs([trace]):
        for number, step in enumerate(need):
            for layer in range(L):
                seen.observe(layer, step[layer], layer == L - 1)
            if number % piece == 0:
                seen.count()
        seen.end_request()
    for name in LEARNED:
        fitted, taught = get_predictor(name, lead_layers=lead).fit([trace]), get_predictor(name, lead_layers=lead)
        assert taught.learn(seen)
        mine, wanted = taught.init(np, L, E, 0), fitted.init(np, L, E, 0)
        assert mine.keys() == wanted.keys()
        for key, array in mine.items():
            np.testing.assert_array_equal(array, wanted[key], err_msg=f"{name} {key}")
    assert seen.counts.tokens == sum(lengths) and seen.requests == len(lengths)


@pytest.mark.parametrize("name", LEARNED)
def test_nothing_is_predicted_before_something_was_learned(name):
    need = next(request_needs([make_trace([40])]))
    seen = Experience(L, E)
    live = LivePredictor(name, seen)
    live.begin()
    assert not live.ready and not live.predict(0, 1, K).size
    decode(live, need)
    assert live.ready == (not name.startswith("eamc"))  # a request must have ended for those
    live.begin()
    decode(live, need[:1])
    assert live.ready and live.predict(0, 1, K).size == K
    assert seen.requests == 1 and seen.counts.tokens == 40


def test_tables_that_are_made_anew_keep_what_the_request_did():
    need = next(request_needs([make_trace([20])]))
    live = LivePredictor("temporal", Experience(L, E))
    live.begin()
    decode(live, need[:17])
    assert live.ready
    before = live._state["last"].copy()
    live._seen.count()
    decode(live, need[:0])
    live._refresh()
    assert (live._state["last"] == before).all()


@pytest.mark.parametrize("name", GATES)
def test_gates_say_what_the_device_guessed(name):
    ahead = GATES[name]
    live = LivePredictor(name, Experience(5, E))
    live.begin()
    guess = np.array([[4, 2], [2, 5]])
    live.observe(1, np.zeros(E, bool), np.zeros(E, np.float32), np.int32(1), first=False, last=False, guess=guess)
    assert live.predict(1, 1 + ahead, 4).tolist() == [2, 4, 5]  # best rank over the rows, then the lower id
    assert live.predict(1, 1 + ahead, 1).tolist() == [2]
    assert not live.predict(4, ahead - 1, 4).size  # the next token is not known


def test_every_predictor_is_live_or_says_why_not():
    refused = {}
    for name in list_predictors():
        try:
            LivePredictor(name, Experience(L, E))
        except ValueError as error:
            refused[name] = str(error)
    assert set(refused) == {"linear-need", "linear-scores"}
    assert all("is fitted on traces and cannot learn while a model runs" in text for text in refused.values())


def test_experience_goes_to_a_file_and_back(tmp_path):
    path = tmp_path / "warm.npz"
    seen = Experience(L, E)
    seen.learn(make_trace([7, 5]))
    seen.save(path, "abc")
    again = Experience.load(path, L, E, "abc")
    for name in seen.counts.ARRAYS:
        np.testing.assert_array_equal(getattr(again.counts, name), getattr(seen.counts, name))
    assert (again.requests, again.counts.tokens, again.counts.following) == (2, 12, 10)
    np.testing.assert_array_equal(again.eams, seen.eams)
    hot = again.hot()
    uses = again.counts.total[hot[:, 0], hot[:, 1]]
    assert len(hot) == np.count_nonzero(again.counts.total) and (np.diff(uses) <= 0).all()


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "warm.npz"
    Experience(L, E).save(path, "abc")
    with pytest.raises(
        ExperienceError, match=r"warm.npz was learned from another checkpoint .*'abc'.*: name a file of"
    ):
        Experience.load(path, L, E, "other")
    with pytest.raises(ExperienceError, match="another checkpoint"):
        Experience.load(path, L, E + 1, "abc")
    path.write_text("text")
    with pytest.raises(ExperienceError, match="warm.npz is not a file of warm starts"):
        Experience.load(path, L, E, "abc")
    np.savez(path, header=np.frombuffer(json.dumps({"format": 1}).encode(), np.uint8))
    with pytest.raises(ExperienceError, match="is not a file of warm starts"):
        Experience.load(path, L, E, "abc")
    header = {"format": 1, "fingerprint": "abc", "L": L, "E": E, "lead": 1, "tokens": 0, "following": 0, "requests": 0}
    np.savez(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8))
    with pytest.raises(ExperienceError, match="is damaged .*: remove it to start cold"):
        Experience.load(path, L, E, "abc")
    with pytest.raises(FileNotFoundError):
        Experience.load(tmp_path / "none.npz", L, E, "abc")
    with pytest.raises(ValueError, match="is not the model's"):
        Experience(L, E + 1).learn(make_trace([3]))
