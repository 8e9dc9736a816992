"""Harness of the losslessness tests: a model with each step's logits recorded, and a replay of its cache in NumPy."""

import contextlib
import functools
from collections.abc import Iterator

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
SMALL = {"progress": False, "max_batch": 4, "page_size": 16, "decode_chunk": 4}


@contextlib.contextmanager
def drawn_logits() -> Iterator[list[np.ndarray]]:
    """Everything that the sampler is given, [B, V] a step; programs compiled meanwhile report to it."""
    seen: list[np.ndarray] = []
    draw = programs._draw

    def report(logits, *rest):
        jax.debug.callback(lambda values: seen.append(np.array(values)), logits)
        return draw(logits, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_draw", report)
        yield seen


class Bench:
    """A model under one transport, with the logits of every step recorded as they are drawn from."""

    def __init__(self, directory, transport: str, logits: list, **config):
        self.logits = logits
        self.moe = MoE(directory, SMALL | {"transport": transport, "trace": True} | config)

    def generate(self, prompts, **options):
        """(ids, logits of every step)."""
        self.logits.clear()
        ids = self.moe.generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[], **options)
        return ids, self.logits[:NEW_TOKENS]  # past them, idle steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.moe.close()


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


def check_run(one: Bench, prompts, wanted, what: str, replay: Replay | None = None, **options) -> None:
    """One call: `wanted` = (ids, logits of every step), slots hold the right bytes, the cache did as the replay."""
    ids, logits = wanted
    got, got_logits = one.generate(prompts, **options)
    np.testing.assert_array_equal(got, ids, err_msg=what)
    assert len(got_logits) == len(logits), what
    for step, (mine, reference) in enumerate(zip(got_logits, logits, strict=True)):
        assert mine[: len(ids)].tobytes() == reference[: len(ids)].tobytes(), f"{what}: logits of step {step}"
    one.moe.verify_slots()
    if replay is None:
        return
    stats, counted = one.moe.stats(), replay.run(one.moe.trace())
    for phase, counters in counted.items():
        assert {name: stats["last"][phase]["per_layer"][name] for name in COUNTERS} == counters, f"{what}: {phase}"
    assert stats["resident_experts"] == replay.resident, what
