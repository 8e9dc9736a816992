"""Losslessness: tokens and logits do not depend on policy, slots, scope, contract or transport.

The reference is `resident`, every expert on the device. At one batch shape the logits of every step are equal to the
last bit. What the cache did is checked too: each run's routing is replayed in NumPy and must give the same hits,
misses, bypasses, evictions and the same experts in the slots, so the transports agree with each other by agreeing with
it.

Here one family runs the whole matrix; the others, in all their formats, are in `test_lossless_families.py`.
"""

import functools
import itertools

import numpy as np
import pytest
from lossless_runs import (
    BATCHES,
    CONTRACTS,
    COUNTERS,
    NEW_TOKENS,
    POLICIES,
    SCOPES,
    SMALL,
    Bench,
    Replay,
    check_run,
    drawn_logits,
)

from moe_jax import MoE
from moe_jax.engine.engine import Run

# Bit for bit in what users run: the last bit of a product depends on how it was compiled.
pytestmark = [pytest.mark.slow, pytest.mark.fully_optimised]


def prompts_of(expected, batch: int) -> np.ndarray:
    """[batch, T]: the oracle's prompt, shifted copies of it beside it so that the rows need different experts."""
    ids = expected["input_ids"]
    return np.concatenate([np.roll(ids, 5 * row, axis=1) for row in range(batch)])


@pytest.fixture(scope="module")
def bench(tiny):
    """`bench(name, transport)`: loaded once a module, with room for every expert so that no setting recompiles."""
    made: dict[tuple[str, str], Bench] = {}

    with drawn_logits() as seen:

        def get(name, transport) -> Bench:
            if (name, transport) not in made:
                made[name, transport] = Bench(tiny(name), transport, seen, max_sequence_length=64)
            return made[name, transport]

        yield get
    for one in made.values():
        one.moe.close()


@pytest.fixture(scope="module")
def reference(bench, expected):
    """`reference(name, batch)`: (prompts, ids, logits of every step, forward logits) with all experts resident."""

    @functools.cache
    def get(name, batch):
        prompts = prompts_of(expected(name), batch)
        one = bench(name, "resident")
        ids, logits = one.generate(prompts)
        assert len(logits) == NEW_TOKENS
        return prompts, ids, logits, one.moe.forward(prompts)

    return get


def check_setting(one: Bench, references, what: str, **setting) -> None:
    """Runs a setting from an empty cache and again from a warm one, and a forward pass, at each batch size."""
    for prompts, ids, logits, forward in references:
        one.moe.set_cache(**setting)
        replay = Replay(one.moe)
        assert replay.policy.name == setting["policy"]
        for turn in ("empty", "warm"):
            check_run(one, prompts, (ids, logits), f"{what}, {len(prompts)} rows, {turn} cache", replay)
        assert one.moe.forward(prompts).tobytes() == forward.tobytes(), f"{what}: forward"
        one.moe.verify_slots()


# ---------------------------------------------------------------------------------------------- one family in full

# Mixtral tiny: L = 3, E = 8, K = 2. Scope `layer` needs a slot a layer; a global pool may be as small as K.
SLOTS = {"layer": (3, 6, 7, 12, 24, [1, 4, 2]), "global": (2, 6, 7, 12, 24)}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("transport", ("device", "callback"))
def test_full_matrix(transport, scope, contract, bench, reference):
    one = bench("mixtral", transport)
    references = [reference("mixtral", batch) for batch in BATCHES]
    for policy, slots in itertools.product(POLICIES, SLOTS[scope]):
        what = f"{transport} {policy} {slots} {scope} {contract}"
        check_setting(one, references, what, policy=policy, slots=slots, scope=scope, contract=contract)


def test_the_matrix_compiled_each_program_once(bench, reference):
    for transport in ("device", "callback"):
        one = bench("mixtral", transport)
        for batch in BATCHES:
            one.generate(reference("mixtral", batch)[0])
            one.moe.forward(reference("mixtral", batch)[0])
        # A prompt and a forward pass, the first token and the decode loop, for each batch size.
        assert one.moe._engine.programs.compilations == 4 * len(BATCHES)


# ---------------------------------------------------------------------------------------------- step by step


@pytest.mark.parametrize("transport", ("device", "callback"))
def test_every_step_leaves_the_experts_that_the_replay_leaves(transport, tiny, expected, monkeypatch):
    """One step a jitted call, and none begun before the last is read, so the tables can be looked at after each."""
    monkeypatch.setattr(Run, "_ahead", False)
    config = SMALL | {"transport": transport, "cache_rate": 0.4, "decode_chunk": 1, "policy": "lfru", "trace": True}
    with MoE(tiny("mixtral"), config) as moe:
        replay, seen = Replay(moe), []
        for _ in moe.stream_ids(expected("mixtral")["input_ids"], 8, eos_token_id=[]):
            seen.append(moe.stats()["resident_experts"])
            moe.verify_slots()
        trace, counts = moe.trace(), moe.stats()["last"]
        steps = np.unique(trace.step)
        assert len(seen) == len(steps) == 8
        total = {phase: np.zeros((4, replay.L), int) for phase in ("prefill", "decode")}
        for step, resident in zip(steps, seen, strict=True):
            rows = trace.step == step
            part = type(trace)(
                **{name: getattr(trace, name)[rows] for name in ("experts", "weights", "phase", "request", "step")},
                header=trace.header,
            )
            for phase, counters in replay.run(part, new_request=step == steps[0]).items():
                total[phase] += np.array([counters[name] for name in COUNTERS])
            assert replay.resident == resident, f"step {step}"
        for phase, table in total.items():
            assert table.tolist() == [counts[phase]["per_layer"][name] for name in COUNTERS]
        assert total["decode"][0].sum() and total["decode"][1].sum()  # both hits and misses happened
