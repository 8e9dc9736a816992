"""The disk tier: rows are right and where the tables say, for every order of events, stalls and faults."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.disk_tier import HOST_HITS, HOST_MISSES, ROWS_READ, DiskTier, rows_within, tier_bytes
from host_offload.pinned import AllocatedMemory, HostMemoryError
from host_offload.plan import check_invariants
from host_offload.policy import LRU, get_policy, list_policies
from host_offload.store import ALIGNMENT, RowSpec, row_stride

L, E = 2, 6
SPEC = RowSpec(L=L, E=E, tensors={"a": ((3,), np.dtype("float32")), "b": ((2, 2), np.dtype("int32"))})
EVERYTHING = L * E


class Source:
    """Rows that say whose they are. Reads may stall, fail, or be held until they are let go."""

    spec = SPEC

    def __init__(self):
        self.read_rows, self.closed = [], False
        self.fails = lambda layer, expert: False
        self.stall = lambda: 0.0
        self.watch = lambda out: None
        self.gate = threading.Event()
        self.gate.set()

    def read(self, layer, expert, name, out):
        self.watch(out)
        if name == "a":
            self.read_rows.append((layer, expert))
            self.gate.wait()
            time.sleep(self.stall())
        if self.fails(layer, expert):
            out[...] = -1
            raise OSError(f"no layer {layer} expert {expert}")
        out[...] = value(layer, expert)

    def close(self):
        self.closed = True


def value(layer, expert):
    return layer * E + expert + 1


def check_rows(tier, layer, experts):
    """These experts are there, and every row that no read is under way for holds the bytes of its owner."""
    check_invariants(tier._slot_of, tier._owner)
    for name in SPEC.tensors:
        for expert in experts:
            row = tier.row(layer, name, expert)
            assert (row == value(layer, expert)).all() and row.ctypes.data == tier.address(layer, name, expert)
        for at in np.flatnonzero(tier._owner >= 0):
            if int(at) not in tier._reads:
                assert (tier._views[at][name] == tier._owner[at] + 1).all()


@pytest.fixture
def make():
    made = []

    def build(rows, policy="lru", source=None, threads=4):
        made.append(DiskTier(SPEC, source or Source(), rows, get_policy(policy), threads=threads, why="test"))
        return made[-1]

    yield build
    for tier in made:
        tier._reader._source.gate.set()
        tier.close()


def serve(tier, layer, experts, rounds=None):
    """An event as the transports make it: at once, or in rounds with reads ahead."""
    tier.event(layer, experts)
    if rounds is None:
        tier.ensure(layer, experts)
        check_rows(tier, layer, experts)
        return
    groups = [experts[i : i + rounds] for i in range(0, len(experts), rounds)]
    tier.read_ahead(layer, experts)
    for turn, group in enumerate(groups):
        tier.ensure(layer, group, lambda _: None)
        check_rows(tier, layer, group)
        tier.moving(layer, group, turn)
        tier.read_ahead(layer, list(itertools.chain(*groups[turn + 1 :])))


# ------------------------------------------------------------------------------------------------------- bookkeeping


def test_rows_are_aligned_pinned_and_disjoint(make):
    tier = make(5)
    addresses = sorted(row.ctypes.data for row in tier._memory)
    assert all(address % ALIGNMENT == 0 for address in addresses)
    assert min(np.diff(addresses)) >= row_stride(SPEC) == 4096
    assert all(slab.sharding.memory_kind == "pinned_host" for slab in tier._pinned._arrays)
    assert tier.nbytes == tier_bytes(SPEC, 5) == sum(slab.nbytes for slab in tier._pinned._arrays)


@given(st.integers(0, 40 * 4096))
def test_the_rows_that_fit_into_a_number_of_bytes(nbytes):
    rows = rows_within(SPEC, nbytes)
    assert (tier_bytes(SPEC, rows) <= nbytes or rows == 0) and tier_bytes(SPEC, rows + 1) > nbytes


def test_several_slabs(make, monkeypatch):
    monkeypatch.setattr("host_offload.disk_tier.SLAB_BYTES", 2 * 4096)
    tier = make(5)
    slabs = tier._pinned._arrays
    assert len(slabs) == 3 and tier.nbytes == tier_bytes(SPEC, 5) == sum(slab.nbytes for slab in slabs)
    serve(tier, 0, [0, 1, 2, 4, 5])


def test_a_tier_that_does_not_fit_leaves_nothing(monkeypatch):
    opened = []

    class Short(AllocatedMemory):
        def take(self, shape, dtype):
            if self._arrays:
                raise HostMemoryError("no more")
            return super().take(shape, dtype)

        def close(self):
            opened.append(self)
            super().close()

    monkeypatch.setattr("host_offload.disk_tier.SLAB_BYTES", 2 * 4096)
    monkeypatch.setattr("host_offload.disk_tier.open_pinned", lambda nbytes, way: Short(nbytes))
    with pytest.raises(HostMemoryError, match="no more"):
        DiskTier(SPEC, Source(), 5, LRU())
    assert len(opened) == 1 and not opened[0]._arrays


def test_an_expert_is_read_once_while_it_stays(make):
    tier = make(3)
    source = tier._reader._source
    serve(tier, 0, [1, 2])
    serve(tier, 0, [1])
    serve(tier, 1, [4])
    assert sorted(source.read_rows) == [(0, 1), (0, 2), (1, 4)]
    serve(tier, 1, [5])  # expert 2 of layer 0 was used longest ago
    assert sorted(np.flatnonzero(tier._slot_of[0] >= 0)) == [1]
    counters = tier.take_counters()
    assert counters[:, HOST_HITS].tolist() == [1, 0]
    assert counters[:, HOST_MISSES].tolist() == counters[:, ROWS_READ].tolist() == [2, 2]
    assert not tier.take_counters().any()
    stats = tier.stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (1, 4, 0.2)
    assert stats["bytes_read"] == 4 * SPEC.row_bytes and stats["reads"] == "buffered"
    assert 0 < stats["read_seconds"] and stats["gb_per_second"] > 0 and stats["wait_seconds"] > 0


def test_more_experts_at_once_than_rows_are_refused(make):
    tier = make(2)
    tier.event(0, [0, 1, 2])
    with pytest.raises(ValueError, match="3 experts at once do not fit into 2 rows"):
        tier.ensure(0, [0, 1, 2])
    serve(tier, 0, [0, 1])
    with pytest.raises(ValueError, match="rows=13"):
        make(EVERYTHING + 1)


def test_a_row_that_is_not_there_has_no_address(make):
    tier = make(2)
    for ask in (tier.row, tier.address):
        with pytest.raises(LookupError, match="expert 3 of MoE layer 1 is not in host memory"):
            ask(1, "a", 3)
    assert (tier.stored(1, "b", 3) == value(1, 3)).all()


EVENT = st.tuples(
    st.integers(0, L - 1), st.lists(st.integers(0, E - 1), unique=True, max_size=E), st.booleans(), st.booleans()
)


@settings(max_examples=40)
@given(
    st.integers(2, EVERYTHING),
    st.sampled_from([name for name in list_policies() if not get_policy(name).uses_scores]),
    st.lists(EVENT, min_size=1, max_size=12),
    st.integers(0, 2**31),
)
def test_events_in_any_order_find_their_rows(rows, policy, events, seed):
    """Decode events and prefill rounds over every size, with stalls and faults; who misses is read, nobody else."""
    rng, source = np.random.default_rng(seed), Source()
    source.stall = lambda: float(rng.choice([0, 0, 1e-3]))
    tier = DiskTier(SPEC, source, rows, get_policy(policy), threads=3)
    try:
        for layer, experts, in_rounds, faulty in events:
            broken = set(experts[:1]) if faulty else set()
            source.fails = lambda at, expert, layer=layer, broken=broken: at == layer and expert in broken
            experts, rounds = (experts, max(1, rows // 2)) if in_rounds else (experts[:rows], None)
            wait_until(lambda: all(job.future.done() for job in tier._reads.values()))
            tier._settle()
            absent = {expert for expert in experts if tier._slot_of[layer, expert] < 0}
            try:
                serve(tier, layer, experts, rounds)
                assert not absent & broken
            except OSError as error:
                assert broken & absent and f"expert {min(broken)}" in str(error)
            check_rows(tier, layer, [])
            if not in_rounds and not faulty:
                assert tier.take_counters()[layer, HOST_MISSES] == len(absent)
            tier.take_counters()
    finally:
        tier.close()


@pytest.mark.slow
def test_ten_thousand_events_of_a_full_tier():
    """With reads that stall and fail at random, threads that come and go between them: no dead-lock, no wrong row."""
    rng, source = np.random.default_rng(5), Source()
    chance = iter(rng.random(200_000).tolist())
    source.stall = lambda: 2e-4 if next(chance) < 0.02 else 0.0
    source.fails = lambda layer, expert: next(chance) < 0.002
    tier, faults = DiskTier(SPEC, source, 4, LRU(), threads=3), 0
    watchdog = threading.Timer(120, os._exit, [3])  # a dead-lock ends the suite rather than stopping it
    watchdog.daemon = True
    watchdog.start()
    try:
        for event in range(10_000):
            experts = rng.permutation(E)[: rng.integers(0, 7)].tolist()
            try:
                if event % 5:
                    serve(tier, event % L, sorted(experts[:4]))
                else:
                    serve(tier, event % L, sorted(experts), 2)
            except OSError:
                faults += 1
        assert faults > 20 and (tier._owner >= 0).sum() >= 2
    finally:
        watchdog.cancel()
        tier.close()


# --------------------------------------------------------------------------------------------------------- read ahead


def wait_until(condition):
    deadline = time.monotonic() + 60  # a busy machine takes seconds to run a thread
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(1e-3)


def test_rows_of_later_rounds_are_read_while_one_is_waited_for(make):
    tier = make(6)
    source = tier._reader._source
    tier.event(0, range(E))
    tier.read_ahead(0, range(E))
    wait_until(lambda: len(source.read_rows) == E)
    tier.ensure(0, [0, 1])
    check_rows(tier, 0, [0, 1])
    assert sorted(source.read_rows) == [(0, e) for e in range(E)]


def test_what_is_waited_for_overtakes_what_is_read_ahead(make):
    tier = make(6, threads=1)
    source = tier._reader._source
    source.gate.clear()
    tier.event(0, range(E))
    tier.read_ahead(0, range(5))
    wait_until(lambda: len(source.read_rows) == 1)
    waiting = threading.Thread(target=tier.ensure, args=(0, [3, 5]))
    waiting.start()
    wait_until(lambda: 5 in {e for job in tier._reads.values() for e in job.experts})
    source.gate.set()
    waiting.join()
    assert [expert for _, expert in source.read_rows[:3]] == [0, 3, 5]
    check_rows(tier, 0, [3, 5])


def test_reads_ahead_of_an_event_that_is_over_are_dropped(make):
    tier = make(6, threads=1)
    source = tier._reader._source
    source.gate.clear()
    tier.event(0, range(E))
    tier.read_ahead(0, range(E))
    wait_until(lambda: len(source.read_rows) == 1)
    tier.event(1, [2])
    source.gate.set()
    tier.ensure(1, [2])
    assert source.read_rows == [(0, 0), (1, 2)]
    check_rows(tier, 1, [2])
    assert (tier._owner >= 0).sum() == 2, "the read that had begun was of use"


def test_reading_ahead_takes_no_row_that_the_event_needs(make):
    tier = make(4)
    serve(tier, 1, [0, 1, 2, 3])
    tier.event(0, range(5))
    tier.read_ahead(0, range(5))  # four rows are of no use any more, the fifth expert must wait
    assert np.flatnonzero(tier._slot_of[0] >= 0).tolist() == [0, 1, 2, 3]
    tier.ensure(0, [0, 1])
    tier.read_ahead(0, [4])
    assert tier._slot_of[0, 4] < 0, "rounds 0 and 1 are not moved yet"
    finished = []
    tier.moving(0, [0, 1], 7)
    tier.read_ahead(0, [4])
    assert tier._slot_of[0, 4] < 0, "their copies may be under way"
    tier.ensure(0, [2, 3], finished.append)
    tier.moving(0, [2, 3], 8)
    assert finished == []
    tier.ensure(0, [4], finished.append)
    assert finished == [7], "the older of the two rounds, whose copy is likely to have ended"
    check_rows(tier, 0, [2, 3, 4])


def test_a_read_ahead_that_failed_is_tried_again_when_it_is_waited_for(make):
    tier = make(4)
    source = tier._reader._source
    source.fails = lambda layer, expert: expert == 2
    tier.event(0, [1, 2])
    tier.read_ahead(0, [1, 2])
    wait_until(lambda: all(job.future.done() for job in tier._reads.values()))
    source.fails = lambda layer, expert: False
    tier.ensure(0, [1, 2])
    check_rows(tier, 0, [1, 2])
    assert source.read_rows.count((0, 2)) == 2 and source.read_rows.count((0, 1)) == 1


# ------------------------------------------------------------------------------------------------- faults, interrupts


def test_after_a_fault_the_others_stay_and_the_next_call_reads_again(make):
    tier = make(4)
    source = tier._reader._source
    serve(tier, 1, [0])
    source.fails = lambda layer, expert: expert == 3
    tier.event(0, [1, 3])
    with pytest.raises(OSError, match="no layer 0 expert 3"):
        tier.ensure(0, [1, 3])
    check_rows(tier, 1, [0])
    assert tier._slot_of[0, 3] < 0
    source.fails = lambda layer, expert: False
    serve(tier, 0, [1, 3])


class Interrupted(LRU):
    """A policy in whose n-th priority Ctrl-C is pressed."""

    name, countdown = "interrupted", -1

    def priority(self, xp, state, layer, expert, t):
        self.countdown -= 1
        if not self.countdown:
            raise KeyboardInterrupt
        return super().priority(xp, state, layer, expert, t)


def test_an_interrupt_in_the_tables_leaves_nobody_with_a_row(make):
    tier = make(3, policy=Interrupted())
    serve(tier, 0, [0, 1, 2])
    tier.policy.countdown = 1
    tier.event(1, [4])
    with pytest.raises(KeyboardInterrupt):
        tier.ensure(1, [4])
    assert (tier._owner < 0).all() and (tier._slot_of < 0).all()
    for experts in ([0, 1, 2], [3, 4], [5]):
        serve(tier, 1, experts)


def test_an_interrupt_while_waiting_gives_no_row_to_two_reads(make, monkeypatch):
    tier = make(2)
    source = tier._reader._source
    source.gate.clear()
    tier.event(0, [0, 1])

    def interrupted(futures, **options):
        wait_until(lambda: len(source.read_rows) == 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("host_offload.disk_tier.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.ensure(0, [0, 1])
    threading.Timer(0.05, source.gate.set).start()
    serve(tier, 1, [3, 4])  # waits for the reads that still run into its rows
    assert sorted(source.read_rows) == [(0, 0), (0, 1), (1, 3), (1, 4)]


def test_closing_ends_the_threads_and_a_wait_for_them():
    before = threading.active_count()
    source = Source()
    tier = DiskTier(SPEC, source, 3, LRU(), threads=2)
    assert threading.active_count() == before + 2
    source.gate.clear()
    tier.event(0, range(3))
    errors = []

    def wait_for_rows():
        try:
            tier.ensure(0, range(3))
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait_for_rows)
    waiting.start()
    wait_until(lambda: len(source.read_rows) == 2)
    opening = threading.Timer(0.05, source.gate.set)
    opening.start()
    slabs = list(tier._pinned._arrays)
    tier.close()
    waiting.join(60)
    opening.join()
    assert not waiting.is_alive() and [type(error).__name__ for error in errors] == ["CancelledError"]
    assert threading.active_count() == before and source.closed and all(slab.is_deleted() for slab in slabs)
    tier.close()
