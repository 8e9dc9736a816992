"""The time trial: which calls it asks to stage, and what it concludes from their times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.prefetch.time_trial import OFF, ON, TRIAL, TimeTrial, net_cost

STEPS = 8


def decode(trial, calls, effect, noise=0.0, seed=0, timed=True):
    """Runs so many calls of a model whose step takes 2 ms, 0.2 ms a miss and `effect` where it stages; the choices."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(calls):
        staged = trial.choose()
        misses = int(rng.integers(0, 20))
        seconds = STEPS * (2e-3 + 2e-4 * misses / STEPS + effect * staged + noise * rng.standard_normal())
        trial.tell(staged, seconds, STEPS, misses, timed)
        chosen.append(staged)
    return chosen


def test_calls_with_and_without_prefetch_take_turns_until_there_is_a_verdict():
    trial = TimeTrial()
    needed = 2 * (TimeTrial.CALLS + 1)  # the first of each kind is not timed
    chosen = decode(trial, needed - 1, effect=-1e-4, noise=1e-6)
    assert chosen == [turn % 2 == 0 for turn in range(needed - 1)]
    assert trial.state == TRIAL and not trial.decided
    assert trial.to_dict()["reason"] == "being tried: timed so far are 16 calls with prefetch and 15 without"
    decode(trial, 1, effect=-1e-4, noise=1e-6)
    assert trial.state == ON and trial.decided
    assert set(decode(trial, 5, effect=0.0)) == {True}


@given(
    effect=st.floats(-5e-4, 5e-4).filter(lambda effect: abs(effect) > 4e-5),
    noise=st.floats(0, 2e-5),
    seed=st.integers(0, 2**31),
)
def test_a_clear_effect_is_found_through_misses_and_noise(effect, noise, seed):
    trial = TimeTrial()
    decode(trial, 2 * TimeTrial.MOST + 4, effect, noise, seed)
    assert trial.state == (ON if effect < 0 else OFF)
    assert trial.net_seconds == pytest.approx(effect, abs=5 * noise + 1e-9)
    assert trial.to_dict()["net_us"] == pytest.approx(trial.net_seconds * 1e6)


def test_who_has_not_clearly_won_stays_off():
    trial = TimeTrial()
    rng = np.random.default_rng(1)
    while not trial.decided:
        staged = trial.choose()
        trial.tell(staged, STEPS * (2e-3 + 1e-4 * rng.standard_normal()), STEPS, 4, True)
    assert trial.state == OFF
    undecided = TimeTrial()
    while not undecided.decided:  # exactly no effect, and not the least noise: equal is not faster
        staged = undecided.choose()
        undecided.tell(staged, STEPS * 2e-3, STEPS, 4, True)
    assert undecided.state == OFF


def test_a_loser_pauses_longer_each_time_and_a_winner_is_tried_again():
    trial = TimeTrial()
    for pause in (TimeTrial.PAUSE, 2 * TimeTrial.PAUSE):
        while not trial.decided:
            decode(trial, 1, effect=1e-3)
        assert f"tried again in {pause} steps" in trial.to_dict()["reason"]
        assert set(decode(trial, pause // STEPS - 1, effect=1e-3)) == {False} and trial.state == OFF
        assert decode(trial, 1, effect=1e-3) == [False] and trial.state == TRIAL
    while not trial.decided:
        decode(trial, 1, effect=-1e-3)
    assert trial.state == ON and f"tried again in {TimeTrial.HOLD} steps" in trial.to_dict()["reason"]
    assert set(decode(trial, TimeTrial.HOLD // STEPS, effect=-1e-3)) == {True} and trial.state == TRIAL
    while not trial.decided:
        decode(trial, 1, effect=1e-3)
    assert f"tried again in {TimeTrial.PAUSE} steps" in trial.to_dict()["reason"], "having won, it begins anew"


def test_calls_whose_time_holds_other_things_are_not_counted():
    trial = TimeTrial()
    decode(trial, 200, effect=1e-3, timed=False)
    assert trial.state == TRIAL and trial.to_dict()["reason"].startswith("being tried: timed so far are 0 calls")
    trial.tell(True, 1.0, 0, 0, True)  # no step: another row's end was not foreseen
    assert trial.to_dict()["reason"].startswith("being tried: timed so far are 0 calls")


def test_without_a_shut_off_every_call_stages():
    trial = TimeTrial(enabled=False)
    assert set(decode(trial, 200, effect=1e-3)) == {True} and trial.decided
    assert trial.to_dict() == {"state": ON, "reason": "prefetch_shutoff is off", "net_us": None, "error_us": None}


def test_the_cost_and_its_error_are_those_of_least_squares():
    """Against the textbook's formulas, for two kinds of calls without misses: a difference of means."""
    rng = np.random.default_rng(3)
    staged = np.arange(40) % 2 == 0
    seconds = 1.0 + 0.25 * staged + 0.1 * rng.standard_normal(40)
    net, error = net_cost(staged, seconds, np.zeros(40))
    ours, theirs = seconds[staged], seconds[~staged]
    pooled = (ours.var(ddof=1) + theirs.var(ddof=1)) / 2
    assert net == pytest.approx(ours.mean() - theirs.mean())
    assert error == pytest.approx(np.sqrt(pooled * (1 / 20 + 1 / 20)))
