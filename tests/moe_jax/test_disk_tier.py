"""Models larger than host memory: their tokens are those of a resident model, and faults of the disk end a call."""

import logging
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from tiny_recipes_nllb import FORCED

import host_offload.slots as slots
from host_offload.disk_tier import tier_bytes
from host_offload.store import row_stride
from moe_jax import MoE
from moe_jax.checkpoint import open_checkpoint
from moe_jax.conversion import prepare
from moe_jax.engine.loading import make_host_policy, map_experts, read_model_config
from moe_jax.errors import ConfigError, TransportError
from moe_jax.interrupts import keep_interrupts

pytestmark = pytest.mark.slow

CONFIG = {"progress": False, "max_batch": 4, "page_size": 16, "max_sequence_length": 64, "decode_chunk": 4}
NEW = 6
# Longer than a chunk of one sequence, and of three.
PROMPT = np.random.default_rng(3).integers(3, 100, 40)
BATCH = np.stack([np.roll(PROMPT, 5 * row) for row in range(3)])
SETTINGS = (
    {"policy": "lru", "scope": "layer", "contract": "atomic-bypass", "cache_rate": 0.3},
    {"policy": "lfu", "scope": "global", "contract": "atomic-bypass", "cache_rate": 0.1},
    {"policy": "lfru", "scope": "layer", "contract": "atomic-forced-admit", "cache_rate": 0.5},
    {"policy": "static", "scope": "global", "contract": "atomic-forced-admit", "cache_rate": 0.2},
)


def generate(moe, prompts):
    return moe.generate(prompts, NEW, eos_token_id=[])


@pytest.fixture(scope="module")
def wanted(tiny):
    """What a resident model makes of one and of three sequences."""
    with MoE(tiny("mixtral"), CONFIG | {"transport": "resident"}) as moe:
        moe._engine.prefill_chunk = 32
        return [generate(moe, prompts).tolist() for prompts in (PROMPT, BATCH)]


@pytest.fixture(scope="module")
def rows_of(tiny):
    """`rows_of(name)`: the `RowSpec` of a tiny checkpoint."""

    def get(name):
        with open_checkpoint(tiny(name)) as files:
            return map_experts(files, read_model_config(files), np.dtype(np.float32))[1].spec

    return get


def load(directory, spec, rows, **config):
    """A model that holds `rows` experts in host memory."""
    moe = MoE(directory, CONFIG | {"host_memory_bytes": tier_bytes(spec, rows), "cache_rate": 0.5} | config)
    moe._engine.prefill_chunk = 32
    return moe


def at(source, directory, folder):
    """(directory, configuration) of a tiny checkpoint as it is, as a prepared one, or with packed rows beside it."""
    if source == "prepared":
        return prepare(directory, folder / "prepared", progress=False)[0], {}
    return directory, {"offload_path": str(folder / "rows")} if source == "packed" else {}


# Of 24 experts in 3 layers. The fewest are two rounds of 4 experts, or the pairs of 4 sequences.
@pytest.mark.parametrize(
    ("source", "rows", "host_policy"),
    (("checkpoint", 8, "lru"), ("packed", 12, "lfu"), ("prepared", 18, "lfru"), ("packed", 8, "static")),
)
def test_tokens_do_not_depend_on_host_memory(source, rows, host_policy, tiny, wanted, rows_of, tmp_path):
    spec = rows_of("mixtral")
    directory, config = at(source, tiny("mixtral"), tmp_path)
    with load(directory, spec, rows, host_policy=host_policy, **config) as moe:
        stats = moe.stats()
        assert stats["transport"]["name"] == "callback"
        assert (stats["disk"]["rows"], stats["disk"]["experts"]) == (rows, 24)
        assert stats["memory"]["pool_bytes"] == tier_bytes(spec, rows) == moe._builder.pool.nbytes
        for setting in SETTINGS:
            moe.set_cache(**setting)
            for prompts, want in zip((PROMPT, BATCH), wanted, strict=True):
                assert generate(moe, prompts).tolist() == want, setting
            moe.verify_slots()
        disk, last = moe.stats()["disk"], moe.stats()["last"]
        assert disk["policy"] == host_policy and disk["hits"] and disk["misses"]
        for phase in (last["prefill"], last["decode"]):  # the device's misses are what host memory is asked for
            assert phase["disk"]["hits"] + phase["disk"]["misses"] == phase["misses"] > 0
        assert last["decode"]["disk"]["bytes_per_token"] == last["decode"]["disk"]["bytes_read"] / (3 * (NEW - 1))
        assert disk["occupied_rows"] == rows and disk["bytes_read"] >= disk["misses"] * spec.row_bytes


@pytest.mark.parametrize(("name", "source"), (("gpt_oss_mxfp4", "packed"), ("nllb_moe", "checkpoint")))
def test_packed_experts_and_encoder_decoders(name, source, tiny, expected, rows_of, tmp_path):
    """Against transformers, with as few rows in host memory as two rounds need."""
    want, spec = expected(name), rows_of(name)
    directory, config = at(source, tiny(name), tmp_path)
    forced = {"forced_bos_token_id": FORCED} if name == "nllb_moe" else {}
    with load(directory, spec, spec.E // 2 * 2, max_batch=1, dtype="float32", **config) as moe:
        got = moe.generate(want["input_ids"], 8, eos_token_id=[], **forced)
        assert got[0, -8:].tolist() == want["gen_ids"].ravel()[-8:].tolist()
        moe.verify_slots()
        assert moe.stats()["disk"]["hits"] and moe.stats()["disk"]["misses"]


def test_host_memory_for_a_handful_of_rows(tiny, wanted, rows_of, monkeypatch):
    """One expert a round, one sequence: two rows serve everything, in 24 rounds of a prompt as in decode."""
    spec = rows_of("mixtral")
    monkeypatch.setattr(slots, "ROUND_BYTES", spec.row_bytes)
    with load(tiny("mixtral"), spec, 2, max_batch=1, policy="lfu", scope="global", cache_rate=0.2) as moe:
        assert generate(moe, PROMPT).tolist() == wanted[0]
        assert moe.stats()["disk"]["rows"] == 2
        moe.verify_slots()
    with pytest.raises(
        ConfigError, match=r"bytes too small: host_memory_bytes=.* hold 1 experts.* may need 2 at a time"
    ):
        load(tiny("mixtral"), spec, 1, max_batch=1)


def test_all_that_fits_needs_no_disk(tiny, rows_of):
    spec = rows_of("mixtral")
    with MoE(
        tiny("mixtral"), CONFIG | {"host_memory_bytes": spec.L * spec.E * spec.row_bytes, "cache_rate": 0.5}
    ) as moe:
        stats = moe.stats()
        assert stats["disk"] is None and stats["transport"]["name"] == "device"
        assert stats["last"] is None and stats["total"]["decode"]["disk"] is None


def test_what_needs_all_experts_says_what_to_do(tiny, rows_of):
    directory, spec = tiny("mixtral"), rows_of("mixtral")
    with pytest.raises(ConfigError, match="transport='callback', which reads from disk what host memory does not hold"):
        load(directory, spec, 12, transport="device")
    with load(directory, spec, 12) as moe:
        for transport in ("device", "resident"):
            with pytest.raises(
                ConfigError, match=f"transport='{transport}' needs every expert in host memory, but 12 of 24"
            ):
                moe.set_cache(transport=transport)


def test_host_policies_are_checked_before_anything_is_read(tiny):
    with pytest.raises(ConfigError, match="host_policy: .*'lruu'.*lru"):
        MoE(tiny("mixtral"), {"host_policy": "lruu"})
    with pytest.raises(ConfigError, match="uses the router's scores"):
        make_host_policy(policy_with_scores())


def policy_with_scores() -> str:
    from host_offload.policy import get_policy, list_policies

    return next(name for name in list_policies() if get_policy(name).uses_scores)


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def loaded(tiny, rows_of, tmp_path_factory):
    """A model over packed rows, half of them in host memory, and the directory of the rows."""
    directory = tmp_path_factory.mktemp("packed") / "rows"
    with load(tiny("mixtral"), rows_of("mixtral"), 12, offload_path=str(directory), policy="lfu") as moe:
        yield moe, directory


@pytest.fixture
def moe(loaded, wanted):
    """That model. However a test ends, the model then works as before, and its engine is free."""
    moe, _ = loaded
    yield moe
    for prompts, want in zip((PROMPT, BATCH), wanted, strict=True):
        assert generate(moe, prompts).tolist() == want
    moe.verify_slots()
    assert moe._engine.running is None and moe._engine._pages.num_free == moe._engine.kv_pages - 1


@pytest.fixture
def disturb(moe, monkeypatch):
    """`disturb(before)`: calls `before(layer, experts)` in the reading thread before each read."""
    reader = moe._builder.pool._reader
    read = reader.read

    def install(before):
        def disturbed(layer, experts, rows):
            before(layer, experts)
            read(layer, experts, rows)

        monkeypatch.setattr(reader, "read", disturbed)

    return install


def forget(moe):
    """Empties slots and tier, so that the next call reads everything."""
    moe.set_cache()
    tier = moe._builder.pool
    tier._slot_of.fill(-1)
    tier._owner.fill(-1)


@pytest.mark.parametrize("phase", ("prefilling", "decoding"))
def test_a_read_error_keeps_what_was_generated(phase, moe, disturb, wanted):
    forget(moe)
    moe.set_cache(slots=3, contract="atomic-forced-admit")  # the slot of a layer seldom has what the next step needs
    broken = threading.Event()

    def fail(layer, experts):
        if broken.is_set():
            raise OSError(5, "Input/output error")

    disturb(fail)
    if phase == "prefilling":
        broken.set()
        with pytest.raises(TransportError, match="failed while prefilling: .*Input/output error") as caught:
            generate(moe, PROMPT)
        assert caught.value.partial.tolist() == PROMPT.tolist()
        return
    got = PROMPT.tolist()
    with pytest.raises(TransportError, match="failed while decoding: .*Input/output error"):
        for pieces in moe.stream_ids(PROMPT, NEW, eos_token_id=[]):
            got += pieces[0]
            broken.set()
    assert len(PROMPT) < len(got) < len(wanted[0]) and got == wanted[0][: len(got)]


def test_a_truncated_file_stops_the_call_until_it_is_whole(moe, loaded):
    forget(moe)
    path = sorted(loaded[1].glob("layer-0001-*.rows"))[0]
    content = path.read_bytes()
    os.truncate(path, row_stride(moe._builder.parts.spec))
    try:
        with pytest.raises(TransportError, match=f"{path.name}: .* at byte .*put the file back as it was, or load"):
            generate(moe, PROMPT)
    finally:
        with open(path, "r+b") as file:
            file.write(content)


def test_stalls_and_read_errors_at_random_never_change_a_token(moe, disturb, wanted):
    rng, lock, outcomes = np.random.default_rng(1), threading.Lock(), []

    def trouble(layer, experts):
        with lock:
            stall, fault = rng.random() < 0.2, rng.random() < 0.01
        time.sleep(0.003 * stall)
        if fault:
            raise OSError(5, "Input/output error")

    disturb(trouble)
    for turn in range(16):
        moe.set_cache(**SETTINGS[turn % 4])
        prompts, want = (PROMPT, BATCH)[turn % 2], wanted[turn % 2]
        try:
            assert generate(moe, prompts).tolist() == want
            outcomes.append("whole")
        except TransportError as error:
            got = np.asarray(error.partial)
            assert got.tolist() == np.asarray(want)[..., : got.shape[-1]].tolist()
            outcomes.append("cut")
    assert {"whole", "cut"} <= set(outcomes)


def test_ctrl_c_during_a_read_that_takes_long(moe, disturb, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    keep_interrupts()  # as commands do: jax' hook of the garbage collector may get it first
    forget(moe)
    held, began = threading.Event(), threading.Event()

    def hold(layer, experts):
        began.set()
        held.wait(60)

    disturb(hold)

    def press():
        began.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        held.set()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(moe, PROMPT)
            time.sleep(1)  # where the hook had it, it comes again
    finally:
        held.set()
        thread.join()


def test_closing_leaves_no_thread_and_no_file(tiny, rows_of, tmp_path, caplog):
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.INFO, logger="host_offload"):
        moe = load(tiny("mixtral"), rows_of("mixtral"), 12, offload_path=str(tmp_path), load_threads=3)
    assert "disk tier: 12 of 24 experts" in caplog.text and "host_memory_bytes=" in caplog.text
    assert threading.active_count() == threads + 3
    moe.close()
    moe.close()
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == files
