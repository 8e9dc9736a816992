"""A link in played time for tests of prefetch: copies of one row take a fixed time, one after another."""

from collections import deque

import numpy as np

from host_offload.plan import check_invariants
from host_offload.policy import get_policy
from host_offload.predictors.replay import replay_steps, trace_shape
from host_offload.prefetch import Experience, Prefetcher, PrefetchSettings
from host_offload.prefetch.lanes import Copy
from host_offload.prefetch_sim import CacheRun
from host_offload.simulate import slot_capacities
from host_offload.store import RowSpec

ROW = 1000


class PlayedLane:
    """A lane whose copies begin when the link is free and time passes by `now`."""

    def __init__(self, copy_seconds):
        self.now = self.busy_until = 0.0
        self._seconds = copy_seconds
        self._queue: deque = deque()
        self._arrival: dict[Copy, float] = {}
        self.rate = ROW / copy_seconds
        self.waited = []

    def copy(self, banks, layer, expert, row):
        return Copy([], ROW)

    def submit(self, copy):
        self._queue.append((copy, self.now))

    def cancel(self, copy):
        if copy.begun:
            return False
        self._queue = deque(entry for entry in self._queue if entry[0] is not copy)
        return True

    def poll(self):
        while self._queue and max(self.busy_until, self._queue[0][1]) < self.now:
            copy, queued = self._queue.popleft()
            copy.begun = True
            self._arrival[copy] = self.demand(queued)
        for copy, arrival in list(self._arrival.items()):
            if arrival <= self.now:
                copy.done = True
                del self._arrival[copy]

    def demand(self, earliest):
        """One copy as soon as the link is free; when it arrives."""
        self.busy_until = max(self.busy_until, earliest) + self._seconds
        return self.busy_until

    @property
    def waiting_bytes(self):
        return ROW * (len(self._queue) + len(self._arrival))

    def wait(self, ctx, copy):
        self.waited.append(self._arrival.get(copy, self.now))

    def wait_rest(self, ctx, copy):
        pass

    def drain(self):
        self._queue.clear()
        for copy in self._arrival:
            copy.done = True
        self._arrival.clear()


class PlayedRun:
    """A trace served by a cache, a `Prefetcher` and a link, as `host_offload.prefetch_sim` plays it.

    predictor: instance or None for no prefetch. copy_seconds, layer_seconds: times. budget, shutoff, reserve: as in
    `PrefetchSettings`. `run()` returns the seconds of each step.
    """

    def __init__(
        self, trace, predictor, policy="lru", *, copy_seconds=1.0, layer_seconds=1.0, slots=1, budget=10**9,
        shutoff=False, reserve=None, experience=None,
    ):  # fmt: skip
        L, E = trace_shape(trace)
        self.trace, self.layer_seconds = trace, layer_seconds
        self.cache = CacheRun(get_policy(policy), L, E, slot_capacities(L, E, slots, None, "layer"), "layer",
                              "atomic-bypass", 0)  # fmt: skip
        self.lane = PlayedLane(copy_seconds)
        self.rows = L * slots + E + (reserve or E)
        self.prefetcher = None
        if predictor is not None:
            settings = PrefetchSettings(predictor, budget, shutoff, reserve or E, experience or Experience(L, E))
            spec = RowSpec(L=L, E=E, tensors={"a": ((ROW,), np.uint8)})
            self.prefetcher = Prefetcher(spec, self.rows, settings, self.lane, clock=lambda: self.lane.now)
        self.misses = self.demanded = 0
        self.awake = False
        self.asks = lambda: True  # whether the event decides on what comes
        self.rests = lambda number: False  # whether the prefetcher sees nothing of the step

    def run(self, reads=()):
        """Serves the trace; [steps] float seconds."""
        L, _ = trace_shape(self.trace)
        steps = list(replay_steps(self.trace, "decode", reads))
        if self.prefetcher is not None:
            self.prefetcher.begin(steps)
        seconds = []
        for number, step in enumerate(steps):
            began = self.lane.now
            self.resting = self.rests(number)
            if self.prefetcher is not None:
                self.awake = self.prefetcher.rest() if self.resting else self.prefetcher.wakes()
            for layer in range(L):
                self._event(layer, step, np.int32(number * L + layer))
            seconds.append(self.lane.now - began)
        return np.array(seconds)

    def _event(self, layer, step, t):
        lane, prefetcher, need = self.lane, self.prefetcher, step.need[layer]
        missing = np.flatnonzero(self.cache.serve(layer, need, step.scores[layer], t)).tolist()
        check_invariants(self.cache._slot_of, self.cache._owner)
        lane.waited = []
        claimed = prefetcher.serve(layer, missing) if self.awake else {}
        ready = [lane.demand(lane.now) for expert in missing if expert not in claimed]
        self.misses += len(missing)
        self.demanded += len(ready)
        listed, scores = np.flatnonzero(need), step.scores[layer]
        if prefetcher is not None and not self.awake and not self.resting:
            prefetcher.note(layer, listed)
        if self.awake:
            prefetcher.wait(None)
            prefetcher.wait_rest(None)
            if self.asks():
                prefetcher.ahead(layer, listed, scores, {}, self.cache._slot_of, lambda: ~prefetcher.taken)
            else:
                prefetcher.saw(layer, listed, scores)
            self.check_balance()
        lane.now = max([lane.now, *ready, *lane.waited]) + self.layer_seconds

    def check_balance(self):
        """Every row that was issued was used, wasted, or waits; the bytes are those of the rows."""
        stats = self.prefetcher.stats()
        rows = stats["rows"]
        assert rows["issued"] == rows["on_time"] + rows["late"] + rows["wasted"] + rows["waiting"], rows
        assert rows["useful"] == rows["on_time"] + rows["late"]
        assert stats["bytes"] == {name: n * ROW for name, n in rows.items()}
        assert all(sum(column) == rows[name] for name, column in stats["per_layer"].items())
