"""The transport with prefetch, its host calls made by hand: rows are right after each event, and nothing locks up."""

import importlib.util
import random
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from played_cuda import DeviceBuffer, PlayedCuda, Timeline

import host_offload.prefetch as prefetch_package
import host_offload.transport.callback as callback_module
import host_offload.transport.prefetching as prefetching_module
from host_offload.capacity import resolve_slots
from host_offload.disk_tier import DiskTier
from host_offload.plan import check_invariants
from host_offload.policy import get_policy
from host_offload.predictor import Predictor
from host_offload.prefetch import Experience, PrefetchSettings
from host_offload.prefetch.lanes import NumpyLane
from host_offload.store import RowSpec
from host_offload.transport.host_calls import NumpyMover
from host_offload.transport.prefetching import PrefetchTransport
from tests.host_offload.test_disk_tier import Source as AnySource
from tests.host_offload.test_host_calls import cuda_module

__all__ = ["cuda_module"]  # the fixture

L, E, K = 3, 8, 2
SPEC = RowSpec(L=L, E=E, tensors={"gate_up": ((4, 2), np.dtype("float32")), "down": ((2, 2), np.dtype("float32"))})
RESERVE = 6


class Pool:
    """Rows that say whose they are."""

    spec, adjacent = SPEC, True

    def __init__(self):
        self.rows = {
            name: np.stack([np.stack([np.full(shape, value(layer, e), dtype) for e in range(E)]) for layer in range(L)])
            for name, (shape, dtype) in SPEC.tensors.items()
        }

    def row(self, layer, name, expert):
        return self.rows[name][layer, expert]

    stored = row

    def address(self, layer, name, expert):
        return self.row(layer, name, expert).ctypes.data


class Source(AnySource):
    """The source of a disk tier with the same rows."""

    spec = SPEC

    def read(self, layer, expert, name, out):
        self.watch(out)
        if name == "gate_up":
            time.sleep(self.stall())
        if self.fails(layer, expert):
            raise OSError(f"no layer {layer} expert {expert}")
        out[...] = value(layer, expert)


def value(layer, expert):
    return layer * E + expert + 1


class Mixed(Predictor):
    """Right in a part of the cases: of what comes (`plan`, by the number of the event) and of drawn experts."""

    name = "mixed"
    plan: list = []

    def __init__(self, right=0.5, **declared):
        super().__init__(**declared)
        self.right = right

    def init(self, xp, L, E, seed):
        return {"at": np.zeros((), np.int64), "draw": np.random.default_rng(seed)}

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        return state | {"at": state["at"] + 1}

    def predict(self, xp, state, layer_now, target_layer):
        scores = state["draw"].random(E).astype(np.float32)
        later = state["at"] - 1 + (target_layer - layer_now) % L
        if later < len(self.plan) and state["draw"].random() < self.right:
            scores[self.plan[later]] += 1
        return scores


class Host:
    """The calls of a run of decode steps, with banks in NumPy. cuda: the played runtime's module."""

    def __init__(self, monkeypatch, pool, *, slots=4, policy="lru", scope="layer", budget=10**9, right=0.5, cuda=None,
                 lane=None, forced=False, batch=1, shutoff=False):  # fmt: skip
        self.cuda = None
        if cuda is not None:
            self.cuda = cuda.cudart = PlayedCuda()
            module = lane_module(cuda)
            monkeypatch.setattr(cuda, "copy_rate", lambda nbytes: 1e9)
            monkeypatch.setattr(callback_module, "make_mover", lambda *args: cuda.CudaMover(*args))
            monkeypatch.setattr(prefetching_module, "make_lane", module.CudaLane)
        else:
            monkeypatch.setattr(callback_module, "make_mover", lambda pool, early, staging: NumpyMover(pool, staging))
            monkeypatch.setattr(prefetching_module, "make_lane", lambda *args: (lane or NumpyLane)(pool))
        self.predictor = Mixed(right)
        settings = PrefetchSettings(self.predictor, budget, shutoff, RESERVE, Experience(L, E))
        self.transport = PrefetchTransport(
            SPEC,
            pool,
            resolve_slots(L=L, E=E, row_bytes=SPEC.row_bytes, expert_slots=slots * L, scope=scope),
            get_policy(policy),
            forced_admit=forced,
            max_pairs=K * batch,
            implementation="xla",
            prefetch=settings,
        )
        self.pool, self.batch = pool, batch
        rows = self.transport.rows
        self.arrays = {name: np.zeros((rows, *shape), dtype) for name, (shape, dtype) in SPEC.tensors.items()}
        self.ctx = SimpleNamespace(stream=Timeline())
        self.banks = {name: self._buffer(array) for name, array in self.arrays.items()}

    def _buffer(self, array):
        return array if self.cuda is None else DeviceBuffer(array)

    def run(self, events, check_every=1):
        """Serves events, ids [batch, K] each, the layers in turn, as one request."""
        self.predictor.plan = [np.unique(ids) for ids in events]
        self.transport.reset_policy(None)
        for number, ids in enumerate(events):
            self.event(number % L, ids, number % check_every == 0)

    def event(self, layer, ids, check=True):
        transport, single = self.transport, self.batch == 1
        distinct = min(E, ids.size)
        out = {"rows": np.zeros((distinct,), np.int32)}
        values = {"ids": ids.astype(np.int32)}
        if not single:
            out |= {"count": np.zeros((1,), np.int32), "entry": np.zeros((ids.size,), np.int32)}
            values["live"] = np.ones((len(ids),), bool)
        buffers = [{name: self._buffer(array) for name, array in part.items()} for part in (out, values)]
        transport._on_decode(layer, self.ctx, *buffers, self.banks)
        wanted = ids[0] if single else np.unique(ids)
        rows = dict(zip(wanted.tolist(), out["rows"][: len(wanted)].tolist(), strict=True))
        assert len(set(rows.values())) == len(rows)
        self._compute(layer, rows, "gate_up")
        transport._on_down(layer, self.ctx, {}, {}, self.banks)
        self._compute(layer, rows, "down")
        if check:
            self.check()

    def _compute(self, layer, rows, name):
        array = self.arrays[name]
        for expert, row in rows.items():
            assert (array[row] == value(layer, expert)).all(), f"layer {layer} expert {expert} is not in row {row}"
        if self.cuda is not None:
            reads = [(array[row].ctypes.data, array[row].nbytes) for row in rows.values()]
            self.cuda.compute(self.ctx.stream, reads)

    def check(self):
        """Owners' bytes are in their rows, the reserve's too, nobody shares a row, and the books balance."""
        transport, prefetcher = self.transport, self.transport._prefetcher
        check_invariants(transport._slot_of, transport._owner)
        for row in np.flatnonzero(transport._owner >= 0):
            for array in self.arrays.values():
                assert (array[row] == transport._owner[row] + 1).all()
        held = list(prefetcher._held.values())
        assert sorted(h.row for h in held) == np.flatnonzero(prefetcher.taken).tolist() and len(held) <= RESERVE
        assert (transport._owner[prefetcher.taken] < 0).all()
        for one in held:
            if one.copy.done and one.copy.error is None:
                assert all((array[one.row] == value(one.layer, one.expert)).all() for array in self.arrays.values())
        rows = transport.prefetch_stats()["rows"]
        assert rows["issued"] == rows["on_time"] + rows["late"] + rows["wasted"] + rows["waiting"], rows


def lane_module(cuda):
    """`host_offload.prefetch.cuda_lane` over the played runtime's module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "host_offload.transport.cuda", cuda)
        path = f"{prefetch_package.__path__[0]}/cuda_lane.py"
        spec = importlib.util.spec_from_file_location("played_cuda_lane", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def draw_events(seed, n, batch=1, skew=True):
    rng = np.random.default_rng(seed)
    weight = np.linspace(1, 3, E) if skew else np.ones(E)
    return list((rng.random((n, batch, E)) * weight).argsort(-1)[..., :K])


def hits_of(host, events, check_every=1):
    """Counters of the run."""
    host.run(events, check_every)
    host.transport._settle()
    return host.transport._counters.copy()


class StallingLane(NumpyLane):
    """Copies that take a while now and then."""

    def __init__(self, pool):
        super().__init__(pool)
        self.draw = random.Random(0)

    def _move(self, copy):
        if self.draw.random() < 0.02:
            time.sleep(self.draw.random() * 1e-3)
        super()._move(copy)


@pytest.mark.parametrize("right", (0.0, 0.5, 1.0))
def test_ten_thousand_events_with_a_full_cache(monkeypatch, right):
    """No lock-up, no wrong byte, and the same hits as the cache has by itself."""
    events = draw_events(0, 10_000 if right == 0.5 else 1_000)
    host = Host(monkeypatch, Pool(), slots=2, lane=StallingLane, right=right)
    try:
        counters = hits_of(host, events, len(events) // 1000)
        rows = host.transport.prefetch_stats()["rows"]
        assert rows["issued"] > len(events) // 20
    finally:
        host.transport.close()
    with monkeypatch.context() as patch:
        other = Host(patch, Pool(), slots=2, budget=1)
        assert (hits_of(other, events, 100) == counters).all()
        assert not any(other.transport.prefetch_stats()["rows"].values())
        other.transport.close()


@pytest.mark.parametrize("scope", ("layer", "global"))
@pytest.mark.parametrize(("batch", "forced", "policy"), ((1, True, "lfu"), (3, False, "lru"), (2, True, "lfru")))
def test_scopes_contracts_and_batches(monkeypatch, scope, batch, forced, policy):
    events = draw_events(1, 300, batch)
    host = Host(monkeypatch, Pool(), slots=3, scope=scope, batch=batch, forced=forced, policy=policy)
    try:
        for _ in range(2):  # a second request
            host.run(events[:150])
        assert host.transport.prefetch_stats()["rows"]["useful"]
        host.transport.quiesce()
        host.run(events[150:])
    finally:
        host.transport.close()


@pytest.mark.parametrize("seed", range(4))
def test_on_a_gpu_no_copy_meets_another_or_a_read(monkeypatch, cuda_module, seed):
    """The played runtime knows which operations may overlap; copies end late, in any order that it allows."""
    host = Host(monkeypatch, Pool(), slots=2, cuda=cuda_module, right=0.6, batch=1 + seed % 2)
    draw = random.Random(seed)
    host.cuda.late = lambda event: draw.random() < 0.6
    monkeypatch.setattr(type(host.transport._lane), "AHEAD_BYTES", SPEC.row_bytes * (seed % 3))
    host.run(draw_events(seed, 240, host.batch))
    rows = host.transport.prefetch_stats()["rows"]
    assert rows["late"] and rows["on_time"] and rows["wasted"] and rows["cancelled"]
    host.transport.quiesce()
    assert host.cuda.none_under_way(host.ctx.stream)
    host.transport.close()
    host.transport.close()
    assert not host.cuda.open and not host.cuda.memory


def test_nothing_is_prefetched_after_an_event_that_copies_nothing(monkeypatch):
    """The host would keep the device waiting; such events are learned from, and mark the time, all the same."""
    events = draw_events(4, 300)
    host = Host(monkeypatch, Pool(), slots=4, right=0.7)
    prefetcher = host.transport._prefetcher
    copied, asked, served, ahead = [], [], prefetcher.serve, prefetcher.ahead
    monkeypatch.setattr(
        prefetcher, "serve", lambda layer, ids, now=None: copied.append(len(ids)) or served(layer, ids, now)
    )
    monkeypatch.setattr(
        prefetcher, "ahead", lambda layer, *args, **more: asked.append(layer) or ahead(layer, *args, **more)
    )
    host.run(events)
    host.transport.close()
    assert len(copied) == len(events) and 0 < len(asked) <= np.count_nonzero(copied) < len(events)
    assert prefetcher.settings.experience.counts.tokens == 100


@pytest.mark.parametrize("place", ("cpu", "gpu", "tier"))
def test_asleep_and_awake_in_turn(monkeypatch, cuda_module, place):
    """Rows are right and hits those without prefetch wherever sleep begins and ends; all steps are learned from."""
    monkeypatch.setattr("host_offload.prefetch.prefetcher.NAP", 5)
    monkeypatch.setattr("host_offload.prefetch.prefetcher.NAP_MOST", 9)
    monkeypatch.setattr("host_offload.prefetch.shutoff.ShutOff._compare", lambda shutoff, off, on: None)
    pool = DiskTier(SPEC, Source(), 12, get_policy("lru"), threads=2) if place == "tier" else Pool()
    events = draw_events(3, 603)
    host = Host(monkeypatch, pool, slots=2, cuda=cuda_module if place == "gpu" else None, right=0.7, shutoff=True)
    prefetcher = host.transport._prefetcher
    for shutoff in prefetcher.shutoffs:
        shutoff._gains, shutoff.state = [-1.0] * 12, False
    try:
        counters = hits_of(host, events)
        stats = host.transport.prefetch_stats()
        assert 60 < stats["steps_asleep"] < 140 and stats["rows"]["issued"] and stats["rows"]["useful"]
    finally:
        host.transport.close()
    assert prefetcher.settings.experience.counts.tokens == 201
    with monkeypatch.context() as patch:
        other = Host(patch, Pool(), slots=2, budget=1)
        assert (hits_of(other, events, 100)[:, :4] == counters[:, :4]).all()
        other.transport.close()
    if place == "tier":
        pool.close()


def test_the_played_runtime_sees_a_row_that_is_not_waited_for(monkeypatch, cuda_module):
    host = Host(monkeypatch, Pool(), slots=1, cuda=cuda_module, right=1.0)
    host.cuda.late = lambda event: True
    monkeypatch.setattr(host.transport._prefetcher, "wait", lambda ctx: None)
    with pytest.raises(AssertionError, match="a row is read while a copy may write it"):
        host.run(draw_events(0, 60))


def test_prefetched_rows_travel_after_demanded_ones(monkeypatch, cuda_module):
    """What was demanded before a prefetch was given to its stream has ended when the prefetch begins."""
    host = Host(monkeypatch, Pool(), slots=1, cuda=cuda_module, right=0.5)
    host.cuda.late = lambda event: True
    copy, kinds = host.cuda.cudaMemcpyAsync, {}

    def note(to, source, nbytes, kind, stream):
        done = copy(to, source, nbytes, kind, stream)
        if stream is not host.ctx.stream:
            kinds[host.cuda.copies[-1]] = stream is host.transport._lane._stream
        return done

    host.cuda.cudaMemcpyAsync = note
    host.run(draw_events(0, 60))
    ahead = [one for one, prefetched in kinds.items() if prefetched]
    demanded = [one for one, prefetched in kinds.items() if not prefetched]
    assert len(ahead) > 20 and len(demanded) > 20
    for one in ahead:
        assert all(other.bit & one.before for other in demanded if other.bit < one.bit)


# -------------------------------------------------------------------------------------------------- with a disk tier


@pytest.mark.parametrize("rows", (10, 14, 20))
def test_behind_a_disk_tier_with_stalls(monkeypatch, rows):
    source, draw = Source(), random.Random(rows)
    source.stall = lambda: draw.random() * 1e-3 if draw.random() < 0.1 else 0.0
    tier = DiskTier(SPEC, source, rows, get_policy("lru"), threads=3)
    events = draw_events(rows, 400)
    host = Host(monkeypatch, tier, slots=2, lane=StallingLane, right=0.7)
    try:
        counters = hits_of(host, events)
        stats = host.transport.prefetch_stats()["rows"]
        assert stats["useful"]
        with_tier = tier.stats()
        assert with_tier["hits"] + with_tier["misses"] == counters[:, 1].sum() - stats["useful"]
    finally:
        host.transport.close()
        tier.close()


def test_behind_a_disk_tier_no_host_row_is_overwritten_while_it_is_copied(monkeypatch, cuda_module):
    source = Source()
    tier = DiskTier(SPEC, source, 9, get_policy("lru"), threads=2)
    host = Host(monkeypatch, tier, slots=2, cuda=cuda_module, right=0.7)
    draw = random.Random(5)
    host.cuda.late = lambda event: draw.random() < 0.7

    def check_free(out):
        start = out.ctypes.data
        for copy in list(host.cuda.copies):
            touched = copy.source < start + out.nbytes and start < copy.source + copy.nbytes
            assert not touched or copy.bit & host.cuda.host.ended, "a host row is overwritten while it is copied"

    source.watch = check_free
    try:
        host.run(draw_events(7, 300))
        assert host.transport.prefetch_stats()["rows"]["useful"]
    finally:
        host.transport.close()
        tier.close()


def test_predicted_rows_are_read_ahead(monkeypatch):
    """With a predictor that is always right, what the device comes to miss is mostly in host memory."""
    hits = {}
    for right in (0.0, 1.0):
        with monkeypatch.context() as patch:
            tier = DiskTier(SPEC, Source(), 12, get_policy("lru"), threads=3)
            host = Host(patch, tier, slots=2, right=right, budget=1)  # nothing goes to the device
            for number, ids in enumerate(draw_events(2, 300, skew=False)):
                if number == 0:
                    host.predictor.plan = [np.unique(e) for e in draw_events(2, 300, skew=False)]
                    host.transport.reset_policy(None)
                host.event(number % L, ids)
                time.sleep(2e-4)  # of the device: time in which the reads end
            stats = tier.stats()
            hits[right] = stats["hit_rate"]
            host.transport.close()
            tier.close()
    assert hits[1.0] > hits[0.0] + 0.2, hits


# ------------------------------------------------------------------------------------------------------------- faults


def test_a_copy_that_fails_is_raised_and_the_next_run_is_right(monkeypatch):
    class Failing(NumpyLane):
        broken = threading.Event()

        def _move(self, copy):
            if self.broken.is_set():
                raise OSError("a copy failed")
            super()._move(copy)

    host = Host(monkeypatch, Pool(), slots=2, lane=Failing, right=1.0)
    events = draw_events(3, 200)
    host.run(events)
    Failing.broken.set()
    with pytest.raises(OSError, match="a copy failed"):
        host.run(events)
    Failing.broken.clear()
    for drain in host.transport._calls.drains:
        drain()
    host.transport._clear()
    host.run(events)
    host.transport.close()


def test_cuda_faults_end_the_run_and_leave_nothing_under_way(monkeypatch, cuda_module):
    host = Host(monkeypatch, Pool(), slots=2, cuda=cuda_module, right=1.0)
    lane = host.transport._lane
    host.run(draw_events(3, 30))
    host.cuda.fails = lambda function, stream: function == "cudaMemcpyAsync" and stream is lane._stream
    with pytest.raises(cuda_module.CudaError, match="out of luck"):
        host.run(draw_events(4, 30))
    host.cuda.fails = lambda function, stream: False
    for drain in host.transport._calls.drains:
        drain()
    host.transport._clear()
    host.run(draw_events(5, 30))
    host.transport.close()
    assert not host.cuda.open


def test_the_lane_cancels_only_what_has_not_begun():
    lane = NumpyLane(Pool())
    gate, banks = threading.Event(), {name: np.zeros((4, *s), d) for name, (s, d) in SPEC.tensors.items()}
    lane._move = lambda copy: gate.wait(10)
    first, second = (lane.copy(banks, 0, expert, expert) for expert in (1, 2))
    assert lane.waiting_bytes == 0 and lane.rate is None
    lane.submit(first)
    lane.submit(second)
    while not first.begun:
        time.sleep(1e-4)
    assert not lane.cancel(first) and lane.waiting_bytes == 2 * SPEC.row_bytes
    assert lane.cancel(second) and lane.cancel(second) and lane.waiting_bytes == SPEC.row_bytes
    gate.set()
    lane.wait(None, first)
    assert first.done and not second.begun and lane.waiting_bytes == 0 and lane.rate > 0
    lane.close()
    lane.close()
