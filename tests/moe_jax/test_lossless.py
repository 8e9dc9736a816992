"""Losslessness: tokens and logits do not depend on policy, slots, scope, contract or transport.

The reference is `resident`, every expert on the device. At one batch shape the logits of every step are equal to the
last bit. What the cache did is checked too: each run's routing is replayed in NumPy and must give the same hits,
misses, bypasses, evictions and the same experts in the slots, so the transports agree with each other by agreeing with
it.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from host_offload.plan import apply, plan_event
from host_offload.policy import get_policy
from moe_jax import MoE
from moe_jax.engine import programs

POLICIES = ("lru", "lfu", "lfru", "static")
SCOPES = ("layer", "global")
CONTRACTS = ("atomic-bypass", "atomic-forced-admit")
BATCHES = (1, 3)
NEW_TOKENS = 6
COUNTERS = ("hits", "misses", "bypasses", "evictions")
SMALL = {"progress": False, "max_batch": 4, "max_sequence_length": 64, "page_size": 16, "decode_chunk": 4}


def prompts_of(expected, batch: int) -> np.ndarray:
    """[batch, T]: the oracle's prompt, shifted copies of it beside it so that the rows need different experts."""
    ids = expected["input_ids"]
    return np.concatenate([np.roll(ids, 5 * row, axis=1) for row in range(batch)])


class Bench:
    """A model under one transport, with the logits of every step recorded as they are drawn from."""

    def __init__(self, directory, transport: str, logits: list, **config):
        self.logits = logits
        self.moe = MoE(directory, SMALL | {"transport": transport, "trace": True} | config)

    def generate(self, prompts, **options):
        """(ids, logits of every step)."""
        self.logits.clear()
        ids = self.moe.generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[], **options)
        return ids, list(self.logits)


@pytest.fixture(scope="module")
def drawn_logits():
    """Everything that the sampler was given, [B, V] a step; programs compiled meanwhile report to it."""
    seen: list[np.ndarray] = []
    draw = programs._draw

    def report(logits, *rest):
        jax.debug.callback(lambda values: seen.append(np.array(values)), logits)
        return draw(logits, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_draw", report)
        yield seen


@pytest.fixture(scope="module")
def bench(tiny, drawn_logits):
    """`bench(name, transport)`: loaded once a module, with room for every expert so that no setting recompiles."""
    made: dict[tuple, Bench] = {}

    def get(name, transport, **config) -> Bench:
        key = (name, transport, *sorted(config.items()))
        if key not in made:
            made[key] = Bench(tiny(name), transport, drawn_logits, **config)
        return made[key]

    yield get
    for one in made.values():
        one.moe.close()


@pytest.fixture(scope="module")
def reference(bench, expected):
    """`reference(name, batch)`: (prompts, ids, logits of every step, forward logits) with all experts resident.

    `forward=False` leaves the last one None and spares a compilation.
    """

    @functools.cache
    def get(name, batch, forward=True, **config):
        prompts = prompts_of(expected(name), batch)
        one = bench(name, "resident", **config)
        ids, logits = one.generate(prompts)
        assert len(logits) == NEW_TOKENS
        return prompts, ids, logits, one.moe.forward(prompts) if forward else None

    return get


class Replay:
    """The cache of a run, from its routing alone: the events through `plan_event` in plain NumPy."""

    def __init__(self, moe):
        stats = moe.stats()
        self.E = stats["experts"]["per_layer"]
        self.L = stats["experts"]["layers"]
        self.capacity = stats["slots"]["per_layer"] or [stats["slots"]["total"]] * self.L
        self.settings = {
            "global_scope": stats["scope"] == "global",
            "forced_admit": stats["contract"] == "atomic-forced-admit",
        }
        self.policy = get_policy(stats["policy"])
        self.state = self.policy.init(np, self.L, self.E, 0)
        self.slot_of = np.full((self.L, self.E), -1, np.int32)
        self.owner = np.full((self.L + 1) * self.E, -1, np.int32)
        self.first_step = None

    def run(self, trace, new_request=True) -> dict[str, dict[str, list[int]]]:
        """Serves a call's events; counters of each phase as `stats()` gives them."""
        if new_request:
            self.state = self.policy.reset(np, self.state)
        counts = {phase: np.zeros((4, self.L), int) for phase in ("prefill", "decode")}
        decode_steps = set(trace.step[trace.phase == 1].tolist())
        for step, layer, experts in trace.events():
            if self.first_step is None:
                self.first_step = step
            need = np.zeros(self.E, bool)
            need[experts] = True
            t = np.int32((step - self.first_step) * self.L + layer)
            self.state = self.policy.observe(np, self.state, layer, need, np.zeros(self.E, np.float32), t)
            plan = plan_event(
                np,
                need=need,
                slot_of=self.slot_of,
                owner=self.owner,
                priority=functools.partial(self.policy.priority, np, self.state),
                layer=layer,
                capacity=self.capacity[layer],
                t=t,
                **self.settings,
            )
            phase = "decode" if step in decode_steps else "prefill"
            counts[phase][:, layer] += (plan.hit.sum(), plan.miss.sum(), plan.bypass.sum(), plan.n_evicted)
            apply(np, plan, self.slot_of, self.owner)
        return {phase: dict(zip(COUNTERS, table.tolist(), strict=True)) for phase, table in counts.items()}

    @property
    def resident(self):
        return {layer: np.flatnonzero(self.slot_of[layer] >= 0).tolist() for layer in range(self.L)}


def check_run(one: Bench, replay: Replay, reference, what: str) -> None:
    """One call: ids and logits equal the reference's, slots hold the right bytes, the cache did as the replay."""
    prompts, ids, logits, _ = reference
    got, got_logits = one.generate(prompts)
    np.testing.assert_array_equal(got, ids, err_msg=what)
    assert len(got_logits) == len(logits), what
    for step, (mine, wanted) in enumerate(zip(got_logits, logits, strict=True)):
        assert mine[: len(prompts)].tobytes() == wanted[: len(prompts)].tobytes(), f"{what}: logits of step {step}"
    one.moe.verify_slots()
    stats, counted = one.moe.stats(), replay.run(one.moe.trace())
    for phase, counters in counted.items():
        assert {name: stats["last"][phase]["per_layer"][name] for name in COUNTERS} == counters, f"{what}: {phase}"
    assert stats["resident_experts"] == replay.resident, what


def check_setting(one: Bench, references, what: str, **setting) -> None:
    """Runs a setting from an empty cache and again from a warm one, and a forward pass, at each batch size."""
    for reference in references:
        one.moe.set_cache(**setting)
        replay = Replay(one.moe)
        assert replay.policy.name == setting["policy"]
        for turn in ("empty", "warm"):
            check_run(one, replay, reference, f"{what}, {len(reference[0])} rows, {turn} cache")
        if reference[3] is not None:
            assert one.moe.forward(reference[0]).tobytes() == reference[3].tobytes(), f"{what}: forward"
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


# ---------------------------------------------------------------------------------------------- the others, pairwise

# Every pair of (transport, policy, slots, scope, contract, batch) values occurs; checked below.
SHARES = ("least", "quarter", "half", "all")
PAIRWISE = (
    ("device", "lru", "least", "layer", "atomic-bypass", 1),
    ("device", "lfu", "quarter", "global", "atomic-forced-admit", 3),
    ("device", "lfru", "half", "layer", "atomic-forced-admit", 3),
    ("device", "static", "all", "global", "atomic-bypass", 1),
    ("callback", "lru", "quarter", "global", "atomic-forced-admit", 1),
    ("callback", "lfu", "least", "layer", "atomic-bypass", 3),
    ("callback", "lfru", "all", "global", "atomic-bypass", 3),
    ("callback", "static", "half", "layer", "atomic-forced-admit", 1),
    ("callback", "lru", "half", "global", "atomic-bypass", 3),
    ("callback", "lfu", "all", "layer", "atomic-forced-admit", 1),
    ("callback", "lfru", "least", "global", "atomic-forced-admit", 1),
    ("device", "static", "quarter", "layer", "atomic-bypass", 3),
    ("device", "lru", "all", "layer", "atomic-forced-admit", 3),
    ("device", "lfu", "half", "global", "atomic-bypass", 1),
    ("device", "lfru", "quarter", "layer", "atomic-bypass", 1),
    ("callback", "static", "least", "global", "atomic-forced-admit", 3),
)


def test_the_subset_covers_all_pairs():
    values = (("device", "callback"), POLICIES, SHARES, SCOPES, CONTRACTS, BATCHES)
    for a, b in itertools.combinations(range(len(values)), 2):
        seen = {(case[a], case[b]) for case in PAIRWISE}
        assert seen == set(itertools.product(values[a], values[b]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype", (("qwen3_moe", "float32"), ("olmoe", "float32"), ("mixtral_bf16_sharded", "bfloat16"))
)
def test_pairwise_subset(name, dtype, bench, reference):
    for transport, policy, share, scope, contract, batch in PAIRWISE:
        one = bench(name, transport, dtype=dtype)
        experts = one.moe.stats()["experts"]
        L, total = experts["layers"], experts["layers"] * experts["per_layer"]
        slots = {"least": L if scope == "layer" else 1, "quarter": total // 4, "half": total // 2, "all": total}[share]
        what = f"{name} {transport} {policy} {slots} {scope} {contract}"
        setting = {"policy": policy, "slots": slots, "scope": scope, "contract": contract}
        check_setting(one, [reference(name, batch, forward=batch == 1, dtype=dtype)], what, **setting)


# ---------------------------------------------------------------------------------------------- step by step


@pytest.mark.parametrize("transport", ("device", "callback"))
def test_every_step_leaves_the_experts_that_the_replay_leaves(transport, tiny, expected):
    """One step a jitted call, so the tables can be looked at after each."""
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


# ---------------------------------------------------------------------------------------------- the GPU's kernels


@pytest.mark.slow
def test_gpu_kernels_in_the_interpreter(tiny, expected, monkeypatch):
    from moe_jax.engine.loading import CacheBuilder

    want = expected("mixtral_swa_tied")
    config = SMALL | {"transport": "device", "cache_rate": 0.5}
    build = CacheBuilder.__init__

    def interpreted(self, *args):
        build(self, *args)
        self.implementation = "interpret"

    monkeypatch.setattr(CacheBuilder, "__init__", interpreted)
    with MoE(tiny("mixtral_swa_tied"), config) as moe:
        assert set(moe.stats()["kernel"]) == {"device/pallas-interpret"}
        for batch in BATCHES:
            prompts = prompts_of(want, batch)
            got = moe.generate(prompts, max_new_tokens=4, eos_token_id=[])
            moe.verify_slots()
            assert moe.stats()["last"]["decode"]["misses"] > 0
            np.testing.assert_array_equal(got[0, prompts.shape[1] :], want["gen_ids"].ravel()[:4])
