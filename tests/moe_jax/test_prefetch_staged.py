"""Prefetch in the `device` transport, in whole models: it changes no token and no hit, and its books are right."""

import gc

import jax
import numpy as np
import pytest

from host_offload.predictor import Predictor
from host_offload.prefetch import StagingSettings
from host_offload.prefetch.staging import ISSUED, USEFUL, StagingBooks, StagingShutOff
from host_offload.prefetch.time_trial import TimeTrial
from moe_jax import MoE
from moe_jax.engine.loading import CacheBuilder
from moe_jax.errors import ConfigError

CONFIG = {
    "transport": "device",
    "cache_rate": 0.3,
    "progress": False,
    "max_batch": 4,
    "max_sequence_length": 64,
    "page_size": 16,
    "decode_chunk": 4,
    "dtype": "float32",
}
PROMPT = np.random.default_rng(2).integers(3, 256, 10)
NEW = 24
PREDICTORS = ("previous-token", "request-counts", "static-frequency", "temporal", "cross-layer",
              "cross-layer+temporal", "gate-1")  # fmt: skip
ALWAYS = {"prefetch_shutoff": False}


def generate(moe, batch=1):
    prompts = np.stack([np.roll(PROMPT, row) for row in range(batch)])
    return moe.generate(prompts, NEW, eos_token_id=[]).tolist()


def balanced(moe):
    ahead = moe.stats()["prefetch"]
    rows = ahead["rows"]
    assert rows["issued"] == rows["useful"] + rows["wasted"] + rows["waiting"] and rows["wasted"] >= 0, rows
    assert all(min(counts) >= 0 for counts in ahead["per_layer"].values())
    assert ahead["bytes"]["issued"] == rows["issued"] * ahead["prefix"]["bytes"]
    moe.verify_slots()
    return rows


def interpreted(monkeypatch):
    """The GPU's kernels in Pallas' interpreter."""
    init = CacheBuilder.__init__

    def with_kernels(self, *args):
        init(self, *args)
        self.implementation = "interpret"

    monkeypatch.setattr(CacheBuilder, "__init__", with_kernels)


@pytest.fixture
def no_trial(monkeypatch):
    """Every call stages: the program without, which a trial runs in turn, has a test of its own."""
    monkeypatch.setattr(TimeTrial, "choose", lambda self: True)


def figures(moe, batch):
    """Tokens of two calls from an empty cache, and the counters of their decode events."""
    moe.reset_stats()
    return [generate(moe, batch) for _ in range(2)], moe.stats()["total"]["decode"]["per_layer"]


@pytest.fixture(scope="module")
def plain(tiny):
    """(model, what two calls of each batch give without prefetch)."""
    with MoE(tiny("mixtral"), CONFIG) as moe:
        wanted = {}
        for batch in (1, 3):
            moe.set_cache()
            wanted[batch] = figures(moe, batch)
        assert moe.stats()["prefetch"] is None
        yield moe, wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "share"),
    (
        ("previous-token", 1, None),
        ("request-counts", 1, None),
        ("static-frequency", 1, None),
        ("temporal", 1, None),
        ("cross-layer", 1, 0.5),
        ("cross-layer+temporal", 3, None),
        ("gate-1", 1, 1 / 12),  # a block of 16 of the 64 output rows of down, which is a third of the row
        ("gate-1", 3, 1.0),
    ),
)
def test_tokens_and_hits_are_those_without_it(name, batch, share, plain, no_trial):
    """share: the budget in rows; None: auto. One model, its cache set anew."""
    moe, wanted = plain
    budget = "auto" if share is None else int(share * moe.stats()["experts"]["bytes_each"])
    moe.set_cache(prefetch=name, prefetch_budget=budget)
    assert figures(moe, batch) == wanted[batch]
    rows = balanced(moe)
    # What the token before needed is cached, and of others this predictor knows too little.
    assert rows["useful"] or name == "previous-token"
    ahead = moe.stats()["prefetch"]
    assert (ahead["predictor"], ahead["budget"]) == (name, budget)
    assert share is None or ahead["prefix"]["bytes"] * ahead["staging_rows"] <= budget
    assert bool(ahead["prefix"]["gate_up_rows"]) == (share is None or share > 1 / 3)
    moe.set_cache(prefetch="none")
    assert moe.stats()["prefetch"] is None and moe.config.prefetch is None


@pytest.mark.slow
def test_hits_are_those_without_it_for_any_policy_and_size(tiny, no_trial):
    settings = (
        {"policy": "lru", "contract": "atomic-forced-admit", "cache_rate": 0.5},
        {"policy": "lfru", "scope": "global", "contract": "atomic-bypass", "cache_rate": 0.3},
        {"policy": "lfu", "scope": "layer", "cache_rate": 0.2},
    )
    config = CONFIG | {"cache_rate": 0.5}  # the largest first: nothing is compiled for the others
    with MoE(tiny("mixtral"), config) as moe, MoE(tiny("mixtral"), config | {"prefetch": "gate-1"}) as other:
        for changes in settings:
            for model in (moe, other):
                model.set_cache(**changes)
            assert figures(other, 1) == figures(moe, 1), changes
            assert balanced(other)["useful"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels", "batch", "predictor", "share"),
    (
        ("mixtral", True, 3, "cross-layer+temporal", 0.3),
        ("gpt_oss_mxfp4", True, 1, "gate-1", 0.3),
        ("qwen3_moe_fp8", True, 1, "cross-layer", 1.0),
        ("qwen3_moe_fp8", True, 3, "gate-1", 0.5),
        ("deepseek_v4", False, 1, "gate-1", 0.3),
        ("nllb_moe", False, 1, "temporal", 1.0),
    ),
)
def test_through_the_kernels_of_a_gpu_and_in_other_families(
    name, kernels, batch, predictor, share, tiny, expected, monkeypatch, no_trial
):
    """Experts of other formats; hash routers, an encoder-decoder."""
    if kernels:
        interpreted(monkeypatch)
    forced = {"forced_bos_token_id": 7} if name == "nllb_moe" else {}
    ids = expected(name)["input_ids"][:batch]
    with MoE(tiny(name), CONFIG | {"cache_rate": 0.4}) as moe:
        wanted = [moe.generate(ids, 8, eos_token_id=[], **forced).tolist() for _ in range(2)]
        counted = moe.stats()["total"]["decode"]["per_layer"]
        assert ("interpret" in moe.stats()["kernel"][0]) == kernels
        budget = int(share * moe.stats()["experts"]["bytes_each"])
        moe.set_cache(prefetch=predictor, prefetch_budget=budget)
        moe.reset_stats()
        assert [moe.generate(ids, 8, eos_token_id=[], **forced).tolist() for _ in range(2)] == wanted
        assert moe.stats()["total"]["decode"]["per_layer"] == counted
        assert balanced(moe)["useful"]
        prefix = moe.stats()["prefetch"]["prefix"]
        assert bool(prefix["gate_up_rows"]) == (share == 1.0)


@pytest.mark.slow
def test_the_truth_comes_from_a_replayed_trace(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "cross-layer"} | ALWAYS) as moe:
        ids = moe.generate(PROMPT, NEW, eos_token_id=[], trace=True)
        trace = moe.trace()
        moe.set_cache(prefetch="oracle")
        again = moe.replay(trace, prompts=[PROMPT])
        assert again[0].tolist() == ids[len(PROMPT) :].tolist()
        rows = balanced(moe)
        assert rows["useful"] and not rows["wasted"] and not rows["waiting"], rows
        with pytest.raises(ConfigError, match=r"prefetch='oracle' reads what a recorded run did: use it with replay"):
            moe.generate(PROMPT, 3)


@pytest.mark.slow
def test_what_was_learned_comes_as_values_and_outlives_the_run(tiny, tmp_path):
    """Tables and switches change between the calls of one program."""
    path = tmp_path / "warm.npz"
    config = CONFIG | {"prefetch": "cross-layer+temporal", "warm_start": str(path), **ALWAYS}
    with MoE(tiny("mixtral"), config) as moe:
        assert not moe.stats()["prefetch"]["ready"]
        first = generate(moe)
        assert moe.stats()["prefetch"]["ready"], "16 tokens are enough for tables in the middle of a request"
        assert moe.stats()["prefetch"]["rows"]["issued"]
        compiled = moe.stats()["total"]["compilations"]
        assert generate(moe) == first
        moe._engine.transport.shutoff.on[:] = False
        moe._engine.transport.changed = True
        issued = balanced(moe)["issued"]
        assert generate(moe) == first and balanced(moe)["issued"] == issued
        moe.set_cache("lfu", cache_rate=0.2)
        assert generate(moe) == first
        assert moe.stats()["total"]["compilations"] == compiled
    with MoE(tiny("mixtral"), config) as moe:
        stats = moe.stats()["prefetch"]
        assert stats["ready"] and stats["learned_tokens"] == 4 * (NEW - 1) and stats["learned_requests"] == 4
        assert generate(moe) == first and balanced(moe)["issued"]


@pytest.mark.slow
def test_tables_are_those_that_the_callback_transport_learns(tiny):
    counted = {}
    for transport in ("device", "callback"):
        config = CONFIG | {"transport": transport, "prefetch": "cross-layer+temporal", **ALWAYS}
        with MoE(tiny("mixtral"), config) as moe:
            for batch in (1, 3):
                generate(moe, batch)
            moe._engine.transport.reset_policy(moe._engine.cache)
            counts = moe._builder.experience.counts
            counted[transport] = {name: getattr(counts, name).tolist() for name in counts.ARRAYS}
    assert counted["device"] == counted["callback"]


@pytest.mark.slow
def test_a_layer_that_gains_nothing_leaves_off_and_tries_again(tiny, monkeypatch):
    """A predictor that is always wrong: experts that the router never chooses after it was asked not to."""

    class Wrong(Predictor):
        """The experts that the last token did not need, as far as the layer is concerned; most of them are wrong."""

        name = "wrong"

        def init(self, xp, L, E, seed):
            return {"last": xp.zeros((L, E), bool)}

        def observe(self, xp, state, layer, need, scores, t, recorded=None):
            return {"last": state["last"].at[layer].set(need)}

        def predict(self, xp, state, layer_now, target_layer):
            return xp.where(state["last"][target_layer], -xp.inf, 0.0).astype(xp.float32)

    monkeypatch.setattr(StagingShutOff, "LEAST_USEFUL", 2.0)  # no share of useful rows is enough
    monkeypatch.setattr(StagingShutOff, "LEAST", 8)
    monkeypatch.setattr(StagingShutOff, "PAUSE", 24)
    monkeypatch.setattr(TimeTrial, "choose", lambda self: True)
    with MoE(tiny("mixtral"), CONFIG) as moe:
        wanted = generate(moe)
        builder, config = moe._builder, moe.config
        monkeypatch.setattr(
            builder, "prefetch",
            lambda config: StagingSettings(Wrong(), 1000, True, 1, builder_prefix(builder, config), True,
                                           builder.experience),
        )  # fmt: skip
        moe._replace_transport(config.replace(prefetch="temporal"), moe._chosen)
        transport = moe._engine.transport
        assert generate(moe) == wanted
        layers = moe.stats()["prefetch"]["layers"]
        assert any("tried again in" in layer["reason"] and not layer["on"] for layer in layers), layers
        issued = transport.books.counts[:, ISSUED].copy()
        on = transport.shutoff.on.copy()
        moe.generate(PROMPT, 5, eos_token_id=[])
        assert (transport.books.counts[~on, ISSUED] == issued[~on]).all()
        for _ in range(3):
            assert generate(moe) == wanted
        assert (transport.books.counts[~on, ISSUED] > issued[~on]).any(), "nobody tried again"


@pytest.mark.slow
def test_a_time_trial_runs_both_programs_and_leaves_off_what_does_not_pay(tiny, plain, monkeypatch):
    """One program stages, the other does not: same tokens and counts in any order of the two."""
    wanted = plain[1][1]
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "request-counts"}) as moe:
        assert figures(moe, 1) == wanted
        transport = moe._engine.transport
        told, tell = [], transport.trial.tell
        monkeypatch.setattr(transport.trial, "tell", lambda *call: (told.append(call), tell(*call)))
        texts = [text for name, text in moe._engine.programs.texts() if name == "decode"]
        assert len(texts) == 2 and figures(moe, 1) == wanted
        assert {staged for staged, *_ in told} == {True, False}
        # One call of a run is not timed as it begins with no other under way, and one as it has fewer steps.
        assert [timed for *_, timed in told[:6]] == [False, True, True, True, True, False]
        assert [steps for _, _, steps, _, _ in told[:6]] == [4, 4, 4, 4, 4, 3]
        counted = moe.stats()["last"]["decode"]
        assert sum(call[3] for call in told[6:]) == counted["misses"]
        cache = moe._engine.cache
        assert int(cache.step - cache.ahead.began) == NEW - 1
        balanced(moe)
        monkeypatch.setattr(TimeTrial, "CALLS", 4)
        monkeypatch.setattr(transport.trial, "tell", lambda staged, *rest: tell(staged, 1.0 + staged, *rest[1:]))
        transport.trial.__init__()  # from the start, with times that are made up
        while not transport.trial.decided:
            assert generate(moe) == wanted[0][0]
        trial = moe.stats()["prefetch"]["trial"]
        assert trial["state"] == "off" and "tried again in" in trial["reason"] and trial["net_us"] > 0
        issued = balanced(moe)["issued"]
        assert issued and generate(moe) == wanted[0][0] and balanced(moe)["issued"] == issued


def builder_prefix(builder, config):
    from moe_jax.engine.loading import staged_prefix

    settings = config.replace(prefetch="temporal")
    return staged_prefix(settings, builder.parts.experts, builder.parts.spec, builder.parts.dtype)


def test_verdicts_of_the_shut_off():
    shutoff = StagingShutOff(2)

    def tell(useful, steps=16):
        counts = np.zeros((2, 2), int)
        counts[0] = 16, useful
        return shutoff.tell(counts, steps)

    assert not any(tell(3) for _ in range(8)), "one of six is enough"
    assert shutoff.to_dict(0)["reason"] == "24 of the last 128 rows were used"
    assert shutoff.to_dict(1) == {
        "on": True,
        "reason": "being tried: 0 of the last 0 rows were used",
        "staged": 0,
        "useful": 0,
    }
    assert not tell(0) and tell(0) and not shutoff.on[0] and shutoff.on[1]
    assert "only 24 of the last 160 rows were used; tried again in 256 steps" in shutoff.to_dict(0)["reason"]
    assert not tell(0, 255) and tell(0, 1) and shutoff.on[0]
    assert not tell(0) and not tell(0) and not tell(0) and tell(0)
    assert "tried again in 512 steps" in shutoff.to_dict(0)["reason"], "twice as long"
    assert tell(0, 512)
    for _ in range(40):
        tell(3)
    assert shutoff.to_dict(0)["staged"] == StagingShutOff.WINDOW and shutoff.on[0]
    always = StagingShutOff(2, enabled=False)
    assert not any(always.tell(np.array([[64, 0], [64, 0]]), 64) for _ in range(9))
    assert always.to_dict(1)["reason"] == "prefetch_shutoff is off" and always.on.all()


def test_books_add_up():
    books = StagingBooks(3, 10)
    books.add(np.array([[5, 2], [4, 4], [0, 0]]))
    books.add(np.array([[1, 0], [0, 0], [0, 0]]))
    found = books.to_dict(waiting=2, first=0)
    assert found["rows"] == {"issued": 10, "useful": 6, "wasted": 2, "waiting": 2} and found["precision"] == 0.6
    assert found["bytes"]["issued"] == 100 and found["per_layer"]["wasted"] == [2, 0, 0]
    assert books.counts[0, USEFUL] == 2
    assert StagingBooks(1, 10).to_dict(0, 0)["precision"] is None


@pytest.mark.slow
def test_changes_of_the_cache_leave_nothing_behind(tiny):
    with MoE(tiny("mixtral"), CONFIG) as moe:

        def held():
            gc.collect()
            return sorted((array.shape, str(array.dtype)) for array in jax.live_arrays())

        def change(predictor, **more):
            moe.set_cache(prefetch=predictor, **more)
            generate(moe)

        for predictor in ("temporal", "none"):
            change(predictor)
        before = held()
        assert moe.stats()["memory"]["prefetch_bytes"] == 0
        for predictor in ("gate-1", "temporal"):
            change(predictor)
            assert moe.stats()["memory"]["prefetch_bytes"] > 0
        change("gate-1", prefetch_budget=moe.stats()["experts"]["bytes_each"] // 2)
        change("none")
        assert held() == before


@pytest.mark.parametrize(
    ("name", "config", "message"),
    (
        ("mixtral", {"prefetch": "eamc-mean"}, "grows with the requests.*transport='callback', or another predictor"),
        ("mixtral", {"prefetch": "gate-2"}, "further than the next layer.*use 'gate-1', or transport='callback'"),
        (
            "mixtral",
            {"prefetch": "gate-1", "prefetch_budget": 100},
            "prefetch_budget=100: the least that can be staged",
        ),
        ("mixtral", {"prefetch": "linear-need"}, "cannot learn while a model runs"),
        (
            "qwen3_moe_gptq_actorder",
            {"prefetch": "gate-1"},
            "work of its expert kernels, and no kernel undoes the column",
        ),
    ),
)
def test_what_cannot_be_is_said_before_loading(name, config, message, tiny):
    with pytest.raises(ConfigError, match=message):
        MoE(tiny(name), CONFIG | config)


def test_memory_for_staging_is_planned(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "gate-1"}) as moe:
        memory, plan, row_bytes = moe.stats()["memory"], moe._plan, moe.stats()["experts"]["bytes_each"]
        assert memory["prefetch_bytes"] == plan.prefetch_bytes == moe.stats()["prefetch"]["staging_rows"] * row_bytes
        assert memory["spare_bytes"] == plan.spare_bytes
        ahead = moe._engine.cache.ahead.staging
        assert memory["prefetch_bytes"] == sum(row.nbytes for row in ahead.rows.values())
