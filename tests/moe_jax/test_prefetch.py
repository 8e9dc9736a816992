"""Prefetch in whole models: the tokens are what they are without it, and what cannot be is said before loading."""

import json
import random
import re
import time

import numpy as np
import pytest

import host_offload.transport.prefetching as prefetching
from host_offload.disk_tier import tier_bytes
from host_offload.prefetch.lanes import NumpyLane
from host_offload.prefetch.time_trial import TimeTrial
from moe_jax import MoE, OffloadConfig
from moe_jax.errors import CheckpointError, ConfigError, TransportError

CONFIG = {
    "transport": "callback",
    "cache_rate": 0.3,
    "progress": False,
    "max_batch": 2,
    "max_sequence_length": 64,
    "page_size": 16,
    "decode_chunk": 4,
    "dtype": "float32",
}
PROMPT = np.random.default_rng(2).integers(3, 256, 10)
NEW = 20
PREDICTORS = ("previous-token", "static-frequency", "cross-layer+temporal", "eamc-nearest", "gate-1", "gate-2")


class StallingLane(NumpyLane):
    """Copies that take a while now and then."""

    def __init__(self, pool):
        super().__init__(pool)
        self.draw = random.Random(0)

    def _move(self, copy):
        if self.draw.random() < 0.1:
            time.sleep(self.draw.random() * 2e-3)
        super()._move(copy)


@pytest.fixture(autouse=True)
def stalls(monkeypatch):
    monkeypatch.setattr(prefetching, "make_lane", lambda mover, pool, early: StallingLane(pool))


@pytest.fixture
def no_trial(monkeypatch):
    """Every call prefetches: the program without, which a trial runs in turn, has tests of its own."""
    monkeypatch.setattr(TimeTrial, "choose", lambda self: True)


def generate(moe, batch=1):
    return moe.generate(np.stack([PROMPT] * batch), NEW, eos_token_id=[]).tolist()


def balanced(stats):
    rows = stats["prefetch"]["rows"]
    assert rows["issued"] == rows["on_time"] + rows["late"] + rows["wasted"] + rows["waiting"], rows
    return rows


@pytest.mark.slow
def test_tokens_are_the_same_with_any_predictor_and_budget(tiny, no_trial):
    """And so are the cache's hits; one model, its cache set anew."""
    with MoE(tiny("mixtral"), CONFIG) as moe:
        wanted = {}
        for batch in (1, 2):
            moe.set_cache()
            wanted[batch] = [generate(moe, batch) for _ in range(2)], moe.stats()["total"]["decode"]["per_layer"]
            moe.reset_stats()
        assert moe.stats()["prefetch"] is None
        row_bytes = moe.stats()["experts"]["bytes_each"]
        used = 0
        for name, budget in [*((name, "auto") for name in PREDICTORS), ("gate-1", row_bytes), ("cross-layer", 10**9)]:
            for batch in (1, 2):
                moe.set_cache(prefetch=name, prefetch_budget=budget)
                moe.reset_stats()
                ids = [generate(moe, batch) for _ in range(2)]
                moe.verify_slots()
                stats = moe.stats()
                assert (ids, stats["total"]["decode"]["per_layer"]) == wanted[batch], (name, budget, batch)
                used += balanced(stats)["useful"]
                assert (stats["prefetch"]["predictor"], stats["prefetch"]["budget"]) == (name, budget)
        assert used
        moe.set_cache(prefetch="none")
        assert moe.stats()["prefetch"] is None and moe.config.prefetch is None
        assert generate(moe) == wanted[1][0][0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "predictor"), (("gpt_oss_mxfp4", "gate-1"), ("deepseek_v4", "gate-1"),
                                                  ("nllb_moe", "cross-layer+temporal")))  # fmt: skip
def test_packed_experts_hash_routers_and_encoder_decoders(name, predictor, tiny, expected, no_trial):
    want = expected(name)
    forced = {"forced_bos_token_id": 7} if name == "nllb_moe" else {}
    config = CONFIG | {"max_batch": 1, "cache_rate": 0.4, "prefetch": predictor, "prefetch_shutoff": False}
    config["prefetch_budget"] = "1GB"  # not what a busy machine has time for
    with MoE(tiny(name), config) as moe:
        ids = [moe.generate(want["input_ids"][:1], 8, eos_token_id=[], **forced).tolist() for _ in range(2)]
        moe.verify_slots()
        balanced(moe.stats())
        rows = moe.stats()["prefetch"]["rows"]
        assert rows["issued"]
        moe.set_cache(prefetch="none")
        assert moe.generate(want["input_ids"][:1], 8, eos_token_id=[], **forced).tolist() == ids[0] == ids[1]


@pytest.mark.slow
@pytest.mark.parametrize("predictor", ["gate-1", "cross-layer+temporal"])
def test_calls_with_and_without_take_turns_until_the_clock_has_judged(predictor, tiny, monkeypatch):
    """A call without prefetch leaves no trace in its books, and the tokens and hits are the same."""
    monkeypatch.setattr(TimeTrial, "CALLS", 3)
    with MoE(tiny("mixtral"), CONFIG | {"max_batch": 1}) as moe:
        wanted = generate(moe)
        moe.set_cache(prefetch=predictor, prefetch_budget=10**9)
        transport = moe._engine.transport
        while not moe.stats()["prefetch"]["ready"]:
            generate(moe)
        told, tell = [], transport.trial.tell
        # The clock is made up: what prefetches takes twice as long.
        monkeypatch.setattr(
            transport.trial,
            "tell",
            lambda on, seconds, steps, *rest: (told.append(on), tell(on, (1.0 + on) * steps, steps, *rest)),
        )
        transport.trial.__init__()
        while not transport.trial.decided:
            assert generate(moe) == wanted
            moe.verify_slots()
        assert balanced(moe.stats())["issued"] and told[:6] == [True, False] * 3
        trial = moe.stats()["prefetch"]["trial"]
        assert trial["state"] == "off" and trial["net_us"] == pytest.approx(1e6, rel=0.1)
        monkeypatch.setattr(transport._prefetcher, "note", pytest.fail)
        generate(moe)  # the request before ends, whose last steps count now
        before, learned = balanced(moe.stats()), moe.stats()["prefetch"]["learned_tokens"]
        for _ in range(2):
            assert generate(moe) == wanted
        assert balanced(moe.stats()) == before and moe.stats()["prefetch"]["learned_tokens"] == learned
        assert len([text for name, text in moe._engine.programs.texts() if name == "decode"]) == (
            2 if predictor == "gate-1" else 1
        )
        transport.trial.__init__(enabled=False)
        assert generate(moe) == wanted and balanced(moe.stats())["issued"] > before["issued"]


@pytest.mark.slow
def test_behind_a_disk_tier(tiny):
    with MoE(tiny("mixtral"), CONFIG) as moe:
        wanted = [generate(moe, batch) for batch in (1, 2)]
        spec = moe._engine.transport.spec
    config = CONFIG | {"host_memory_bytes": tier_bytes(spec, 12), "prefetch": "gate-1", "prefetch_shutoff": False}
    with MoE(tiny("mixtral"), config) as moe:
        reader = moe._builder.pool._reader
        read, draw = reader.read, random.Random(1)

        def slow(*arguments):
            if draw.random() < 0.1:
                time.sleep(draw.random() * 2e-3)
            read(*arguments)

        reader.read = slow
        for _ in range(2):
            assert [generate(moe, batch) for batch in (1, 2)] == wanted
            moe.verify_slots()
        assert balanced(moe.stats())["useful"] and moe.stats()["disk"]["bytes_read"]


@pytest.mark.slow
def test_the_truth_comes_from_a_replayed_trace(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "cross-layer", "prefetch_shutoff": False}) as moe:
        ids = moe.generate(PROMPT, NEW, eos_token_id=[], trace=True)
        trace = moe.trace()
        moe.set_cache(prefetch="oracle")
        again = moe.replay(trace, prompts=[PROMPT])
        assert again[0].tolist() == ids[len(PROMPT) :].tolist()
        rows = balanced(moe.stats())
        assert rows["useful"] and not rows["wasted"]
        moe.verify_slots()
        with pytest.raises(
            ConfigError, match=r"prefetch='oracle' reads what a recorded run did: use it with replay\(\)"
        ):
            moe.generate(PROMPT, 3)
        moe.set_cache(prefetch="cross-layer")
        moe.generate(PROMPT, 3)


@pytest.mark.slow
def test_warm_start_goes_on_where_the_last_run_ended(tiny, tmp_path):
    path = tmp_path / "warm.npz"
    config = CONFIG | {"prefetch": "cross-layer+temporal", "prefetch_shutoff": False, "warm_start": str(path)}
    config["prefetch_budget"] = "1GB"  # not what a busy machine has time for
    with MoE(tiny("mixtral"), config) as moe:
        assert not moe.stats()["prefetch"]["ready"]
        wanted = generate(moe)
    with MoE(tiny("mixtral"), config) as moe:
        stats = moe.stats()["prefetch"]
        assert stats["ready"] and (stats["learned_tokens"], stats["learned_requests"]) == (NEW - 1, 1)
        assert generate(moe) == wanted
        assert balanced(moe.stats())["issued"]
        spec = moe._engine.transport.spec
    with MoE(tiny("mixtral"), config | {"host_memory_bytes": tier_bytes(spec, 12)}) as moe:
        limit = time.monotonic() + 20
        while moe.stats()["disk"]["bytes_read"] < 12 * spec.row_bytes and time.monotonic() < limit:
            time.sleep(0.01)  # hot experts are read before anybody asks
        assert moe.stats()["disk"]["bytes_read"] == 12 * spec.row_bytes and not moe.stats()["disk"]["misses"]
        assert generate(moe) == wanted
    with pytest.raises(ConfigError, match=r"warm_start: .*warm.npz was learned from another checkpoint"):
        MoE(tiny("olmoe"), config)


@pytest.mark.slow
def test_a_fault_of_a_copy_ends_the_call_and_not_the_model(tiny, monkeypatch):
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "gate-1", "prefetch_shutoff": False}) as moe:
        wanted = generate(moe)
        lane = moe._engine.transport._lane

        def fail(copy):
            raise OSError("the bus is gone")

        with monkeypatch.context() as patch:
            patch.setattr(lane, "_move", fail)
            with pytest.raises(TransportError, match="moving experts failed while decoding.*the bus is gone"):
                generate(moe)
        assert generate(moe) == wanted
        moe.verify_slots()


@pytest.mark.slow
@pytest.mark.fully_optimised
def test_without_prefetch_the_programs_are_what_they_were(tiny):
    """And with one that asks no router: the host alone knows of it."""

    def operations(**config):
        """Those of the decode step in order. Shapes and constants tell the rows of the bank, which has a reserve."""
        with MoE(tiny("mixtral"), CONFIG | config) as moe:
            moe.generate(PROMPT, 3, eos_token_id=[])
            hlo = dict(moe._engine.programs.texts())["decode"]
            return re.findall(r" = (?:\(.*?\)|\S+) ([\w-]+)\(", hlo)

    plain = operations()
    assert len(plain) > 100 and plain == operations(prefetch="cross-layer")
    assert len(operations(prefetch="gate-1")) > len(plain)


@pytest.mark.parametrize(
    ("config", "message"),
    (
        ({"prefetch": "gate-1", "transport": "resident"}, "misses no expert: use transport='device' or 'callback'"),
        ({"prefetch": 3}, "prefetch=3 is not allowed: it must be the name of a predictor"),
        ({"prefetch_budget": "32MB"}, "prefetch_budget=32000000 has no effect without a predictor"),
        ({"prefetch_shutoff": False}, "prefetch_shutoff=False has no effect without a predictor"),
        ({"warm_start": "x.npz"}, "warm_start='x.npz' has no effect without a predictor"),
        ({"prefetch": "gate-1", "prefetch_budget": "much"}, "prefetch_budget='much' is not allowed"),
        ({"prefetch": "gate-1", "prefetch_shutoff": 1}, "prefetch_shutoff=1 is not allowed"),
        ({"prefetch": "gate-1", "warm_start": ""}, "warm_start='' is not allowed"),
    ),
)
def test_settings_that_cannot_be(config, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        OffloadConfig.parse(config)


def test_settings_are_kept(tmp_path):
    config = OffloadConfig.parse({"prefetch": "gate-1", "prefetch_budget": "2MB", "warm_start": tmp_path / "w.npz"})
    assert (config.prefetch_budget, config.warm_start) == (2_000_000, str(tmp_path / "w.npz"))
    assert OffloadConfig.parse(json.loads(json.dumps(config.to_dict()))) == config
    assert OffloadConfig.parse({"prefetch": "none"}).prefetch is None


@pytest.mark.parametrize(
    ("name", "config", "message"),
    (
        ("mixtral", {"prefetch": "gate-11"}, "prefetch='gate-11': predictor: unknown name 'gate-11'. Did you mean"),
        ("mixtral", {"prefetch": "linear-need"}, "prefetch='linear-need': .* cannot learn while a model runs"),
        ("nllb_moe", {"prefetch": "gate-1"}, "an encoder-decoder's do not answer: choose a predictor such as"),
        ("mixtral", {"prefetch": "temporal", "warm_start": "/none/x.npz"}, "there is no directory /none: create it"),
        ("mixtral", {"prefetch": "temporal", "warm_start": "/proc/x.npz"}, "/proc cannot be written to .*name a file"),
        ("mixtral", {"prefetch": "gate-1", "prefetch_budget": 1}, "prefetch_budget=1: an expert takes [0-9]+ bytes"),
    ),
)
def test_what_does_not_go_with_the_model(name, config, message, tiny):
    with pytest.raises(ConfigError, match=message):
        MoE(tiny(name), CONFIG | config)


def test_a_warm_start_that_cannot_be_written_any_more_is_said_and_closes(tiny, tmp_path, caplog):
    directory = tmp_path / "gone"
    directory.mkdir()
    moe = MoE(tiny("mixtral"), CONFIG | {"prefetch": "temporal", "warm_start": directory / "x.npz"})
    directory.rmdir()
    moe.close()
    assert "x.npz could not be written" in caplog.text and "what this run learned is lost" in caplog.text
    moe.close()


def test_a_wrong_predictor_costs_no_loading(tmp_path):
    with pytest.raises(ConfigError, match="unknown name"):
        MoE(tmp_path, {"prefetch": "gate-9x"})
    with pytest.raises(CheckpointError):
        MoE(tmp_path, {"prefetch": "gate-1"})


@pytest.mark.slow
def test_the_cache_can_be_set_to_the_other_transport_that_prefetches(tiny, no_trial):
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "temporal"}) as moe:
        wanted = generate(moe)
        seen = moe.stats()["prefetch"]["learned_tokens"]
        moe.set_cache(transport="device")
        assert generate(moe) == wanted and moe.stats()["prefetch"]["learned_tokens"] > seen
        moe.set_cache(transport="callback")
        assert generate(moe) == wanted
        moe.set_cache(transport="device", prefetch="none")
        assert generate(moe) == wanted and moe.stats()["prefetch"] is None
        moe.set_cache(prefetch="temporal")
        assert moe.config.transport == "device" and generate(moe) == wanted
        with pytest.raises(ConfigError, match="misses no expert: use transport='device' or 'callback'"):
            moe.set_cache(transport="resident")


@pytest.mark.slow
def test_auto_takes_the_transport_that_prefetches(tiny):
    with MoE(tiny("mixtral"), CONFIG | {"prefetch": "temporal", "transport": "auto"}) as moe:
        why = moe.stats()["transport"]
        assert why == {"name": "callback", "why": "prefetch is asked for, and the host does it"}
        stats = moe.stats()
        reserve = stats["prefetch"]["reserve_rows"]
        spec, parts = moe._engine.transport.spec, stats["memory"]
        assert reserve and parts["spare_bytes"] // spec.row_bytes >= reserve
        assert parts["spare_bytes"] == moe._plan.spare_bytes
