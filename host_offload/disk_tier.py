"""Expert rows in pinned host memory when not all of them fit: the rows of most use stay, the others are read from disk.

`DiskTier` stands in the place of an `ExpertPool` in the `callback` transport. It holds H of the L * E rows. An event
first says which experts the device misses (`event`), then waits until they are in host memory (`ensure`), and what its
later rounds, or later layers by a prediction, need is read meanwhile (`read_ahead`). Who stays is decided by
`plan_event` with a policy of its own, global scope and the contract `atomic-forced-admit`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import numpy as np

from host_offload.disk_reader import make_reader
from host_offload.pinned import ALLOCATED, MAX_THREADS, host_view, open_pinned, padded
from host_offload.plan import apply, plan_event
from host_offload.policy import fresh_state
from host_offload.read_threads import AHEAD, DEMAND, ReadThreads
from host_offload.store import ALIGNMENT, row_offsets, row_stride, row_views

logger = logging.getLogger(__name__)

# A slab of pinned memory needs a device temporary of its size while it is made.
SLAB_BYTES = 1 << 30
# Priority of rows that are being moved, times 1 + their round: above what policies say.
MOVING = 2.0**100
# Columns of `take_counters`.
HOST_HITS, HOST_MISSES, ROWS_READ = range(3)


def tier_bytes(spec, rows: int) -> int:
    """Pinned bytes of a tier of `rows` rows: each `row_stride(spec)`, and what it takes to align each slab."""
    return rows * row_stride(spec) + -(-rows // _slab_rows(spec)) * ALIGNMENT


def rows_within(spec, nbytes: int) -> int:
    """Most rows of a tier that takes no more than `nbytes`."""
    rows = max(0, nbytes // row_stride(spec))
    while rows and tier_bytes(spec, rows) > nbytes:
        rows -= 1
    return rows


def _slab_rows(spec) -> int:
    return max(1, SLAB_BYTES // row_stride(spec))


class _Job:
    """One read: neighbouring experts of a layer, the rows they go to, and the future of the call that does it."""

    def __init__(self, layer, experts, rows, rank):
        self.layer, self.experts, self.rows, self.rank = layer, experts, rows, rank
        self.future: Future = Future()

    def lost(self) -> bool:
        """Whether it ended without its rows."""
        return self.future.cancelled() or (self.future.done() and self.future.exception() is not None)


class DiskTier:
    """A cache of expert rows in pinned host memory over a source on disk.

    Owner of the tables: the thread that makes the host calls (XLA's execution thread while a program runs, else the
    engine's), one at a time. Threads of its own write rows that the tables give to them and to nobody else. A row is
    given away only when no read is under way into it and no copy out of it may be (`moving`, `lend`).

    Args:
      spec: `RowSpec`. source: `RowSource`; the tier closes it, or what it made of it.
      rows: H, how many rows to hold; `ensure` takes at most so many experts at once.
      policy: `Policy` that decides who stays; `seed` of its draws. It observes the experts that the device missed, and
        gets zeros for the router's scores.
      threads: how many rows are read at a time (default: as many as a pool is filled with).
      why: for the log and `stats`. pinned: how its memory is had, see `pinned.open_pinned`.

    Attributes:
      adjacent: False, neighbouring experts need not be neighbours in memory. allocate_seconds, fill_seconds: as those
        of a pool; a tier starts empty.
    """

    adjacent = False
    fill_seconds = 0.0

    def __init__(self, spec, source, rows, policy, *, seed=0, threads=None, why="", pinned=ALLOCATED):
        if not 0 < rows <= spec.L * spec.E:
            raise ValueError(f"rows={rows}: a tier holds from 1 to all {spec.L * spec.E} rows")
        self.spec, self.rows, self.policy, self.why = spec, rows, policy, why
        self._offsets = row_offsets(spec)
        started = time.perf_counter()
        self._memory = self._allocate(pinned)
        self.allocate_seconds = time.perf_counter() - started
        self._views = [row_views(spec, row) for row in self._memory]
        self._addresses = [row.ctypes.data for row in self._memory]
        self._slot_of = np.full((spec.L, spec.E), -1, np.int32)
        self._owner = np.full((rows,), -1, np.int32)
        self._state = fresh_state(policy, np, spec.L, spec.E, seed, np.full(spec.L, rows), True)
        self._step, self._layer = -1, spec.L  # of the event clock
        self._awaited = np.zeros((spec.L * spec.E,), bool)  # experts that the running event still needs
        self._moving: dict[int, int] = {}  # row -> round in which its copy to the device was started
        self._lent: dict[int, Callable[[], None]] = {}  # row -> what ends the copy out of it, see `lend`
        self._reads: dict[int, _Job] = {}  # row -> the read that fills it, until that is known to have ended
        self._lock = threading.Lock()  # of what follows, which the reading threads count
        self._counters = np.zeros((spec.L, 3), np.int64)
        self._total = np.zeros(3, np.int64)
        self._reading, self._busy_since, self._busy_seconds = 0, 0.0, 0.0
        self._wait_seconds = 0.0
        try:
            self._reader = make_reader(source, self._memory[0])
        except BaseException:
            self._free()
            raise
        self._threads = ReadThreads(threads or MAX_THREADS)
        logger.info(
            "disk tier: %d of %d experts, %.2f GB, have a row in host memory, reads are %s, policy %s: %s",
            rows, spec.L * spec.E, self.nbytes / 1e9, self._reader.how, policy.name, why,
        )  # fmt: skip

    def _allocate(self, pinned):
        """[stride] uint8 a row."""
        stride, most = row_stride(self.spec), _slab_rows(self.spec)
        counts = [min(most, self.rows - start) for start in range(0, self.rows, most)]
        self._pinned = open_pinned(sum(padded(count * stride + ALIGNMENT) for count in counts), pinned)
        memory = []
        try:
            for count in counts:
                slab = self._pinned.take((count * stride + ALIGNMENT,), np.uint8)
                start = -slab.unsafe_buffer_pointer() % ALIGNMENT
                memory += list(host_view(slab)[start : start + count * stride].reshape(count, stride))
        except BaseException:
            self._pinned.close()
            raise
        return memory

    @property
    def pinned(self) -> str:
        """How its memory was had, one of `pinned.WAYS`."""
        return self._pinned.way

    @property
    def nbytes(self) -> int:
        """Pinned bytes."""
        return tier_bytes(self.spec, self.rows)

    # --------------------------------------------------------------------------------------------------- where rows are

    def _place(self, layer, expert) -> int:
        row = self._slot_of[layer, expert]
        if row < 0:
            raise LookupError(f"expert {expert} of MoE layer {layer} is not in host memory: `ensure` was not called")
        return row

    def row(self, layer: int, name: str, expert: int) -> np.ndarray:
        """The tensor `name` [*shape] of an expert that `ensure` brought, where it lies."""
        return self._views[self._place(layer, expert)][name]

    def address(self, layer: int, name: str, expert: int) -> int:
        """Host address of that tensor."""
        return self._addresses[self._place(layer, expert)] + self._offsets[name]

    def stored(self, layer: int, name: str, expert: int) -> np.ndarray:
        """A copy of a row tensor as it is on disk, for checks."""
        row = np.frombuffer(bytearray(row_stride(self.spec) + ALIGNMENT), np.uint8)
        start = -row.ctypes.data % ALIGNMENT
        row = row[start : start + row_stride(self.spec)]
        self._reader.read(layer, [expert], [row])
        return row_views(self.spec, row)[name]

    # ----------------------------------------------------------------------------------------------------------- events

    def event(self, layer: int, experts, on_their_way=()) -> None:
        """Begins an event: the device misses these `experts` [n] of `layer`, none if it has all that it needs.

        on_their_way: those that it misses too, but which reach it by copies of before. The policy observes them like
        the others, so that host memory keeps what it would keep without prefetch; nothing is read or kept for them.

        To be called when every copy of the event before but those of `lend` has ended. Reads ahead that were not begun
        are dropped.
        """
        self._moving = {}
        with self._undivided():
            for job in set(self._reads.values()):
                if job.rank == AHEAD:
                    job.future.cancel()
            self._settle()
        if layer <= self._layer:  # layers ascend within a step
            self._step += 1
        self._layer = layer
        self._awaited[:] = False
        if not len(experts) and not len(on_their_way):
            return
        need = self._need(experts)
        self._awaited[layer * self.spec.E : (layer + 1) * self.spec.E] = need
        found = np.count_nonzero(need & (self._slot_of[layer] >= 0))
        self._count(layer, HOST_HITS, found)
        self._count(layer, HOST_MISSES, np.count_nonzero(need) - found)
        scores = np.zeros((self.spec.E,), np.float32)
        need[list(on_their_way)] = True
        self._state = self.policy.observe(np, self._state, layer, need, scores, self._clock)

    def ensure(self, layer: int, experts, finish=None) -> None:
        """Waits until these `experts` [n <= H] of `layer` are in host memory.

        finish: `finish(turn)` waits for the copies of round `turn` and of those before it; needed if rows of this event
        were marked by `moving`, for they may have to make room.

        Raises what the reader raises; the experts that were not read are absent then, and may be asked for again.
        """
        if not len(experts):
            return
        started = time.perf_counter()
        try:
            with self._undivided():
                self._settle()
                for job in self._jobs(layer, experts):
                    if job.rank == AHEAD and job.future.cancel():
                        job.rank, job.future = DEMAND, Future()
                        self._submit(job)
                self._admit(layer, experts, DEMAND, finish)
            jobs = self._jobs(layer, experts)
            wait([job.future for job in jobs], return_when=FIRST_EXCEPTION)
            for job in jobs:
                job.future.result()
        except BaseException:
            for job in self._jobs(layer, experts):
                job.future.cancel()
            raise
        finally:
            with self._undivided():
                self._settle()
            self._wait_seconds += time.perf_counter() - started

    def read_ahead(self, layer: int, experts) -> None:
        """Begins to read `experts` [n] of `layer`, in this order, after all that is waited for; returns at once.

        As many as there is room for without the rows that the running event still needs, those that are being moved,
        and those that are being read.
        """
        with self._undivided():
            self._settle()
            occupied = np.flatnonzero(self._owner >= 0)
            kept = {*self._moving, *self._lent, *self._reads, *occupied[self._awaited[self._owner[occupied]]].tolist()}
            absent = [expert for expert in experts if self._slot_of[layer, expert] < 0][: self.rows - len(kept)]
            if absent:
                self._admit(layer, absent, AHEAD, None)

    def moving(self, layer: int, experts, turn: int) -> None:
        """Copies of these experts' rows to the device start in round `turn`; the event needs them no more."""
        for expert in experts:
            self._moving[int(self._place(layer, expert))] = turn
            self._awaited[layer * self.spec.E + expert] = False

    def present(self, layer: int, experts) -> np.ndarray:
        """[n] bool: which of `experts` [n] of `layer` lie in host memory, their read ended."""
        with self._undivided():
            self._settle()
        rows = self._slot_of[layer, list(experts)].tolist()
        return np.array([row >= 0 and row not in self._reads for row in rows], bool)

    def lend(self, layer: int, expert: int, finish: Callable[[], None]) -> int:
        """Keeps the row of a present expert for a copy that may outlast the event; returns it for `give_back`.

        finish: ends the copy, or sees to it that it never begins; called if the row must make room.
        """
        row = int(self._place(layer, expert))
        self._lent[row] = finish
        return row

    def give_back(self, row: int, finish: Callable[[], None]) -> None:
        """The copy out of a row that was lent with this `finish` has ended, or will never begin."""
        if self._lent.get(row) is finish:  # else it had to make room, and may be lent again
            del self._lent[row]

    def reset_policy(self) -> None:
        """The policy at the start of a request (`Policy.reset`)."""
        self._state = self.policy.reset(np, self._state)

    # ------------------------------------------------------------------------------------------------------ bookkeeping

    @property
    def _clock(self) -> np.int32:
        return np.int32(self._step * self.spec.L + self._layer)

    def _need(self, experts):
        need = np.zeros((self.spec.E,), bool)
        need[list(experts)] = True
        return need

    def _jobs(self, layer, experts):
        """The reads that are under way for some experts."""
        rows = self._slot_of[layer, list(experts)].tolist()
        return {self._reads[row] for row in rows if row in self._reads}

    def _priority(self, layer, expert, t):
        """The policy's, above it what is being moved, the latest round last to leave, then what is being read or lent,
        and above all what the running event still needs."""
        least = np.full((self.rows + 1,), -np.inf, np.float32)  # of each row; the last is for experts without one
        least[[*self._reads, *self._lent]] = np.finfo(np.float32).max
        for row, turn in self._moving.items():
            least[row] = max(least[row], MOVING * (1 + turn))
        priority = np.fmax(self.policy.priority(np, self._state, layer, expert, t), least[self._slot_of[layer, expert]])
        priority[self._awaited[layer * self.spec.E + expert]] = np.inf
        return priority

    def _admit(self, layer, experts, rank, finish):
        """Gives rows to those of `experts` that have none, and starts their reads in this order."""
        if len(experts) > self.rows:
            raise ValueError(f"{len(experts)} experts at once do not fit into {self.rows} rows of host memory")
        plan = plan_event(
            np,
            need=self._need(experts),
            slot_of=self._slot_of,
            owner=self._owner,
            priority=self._priority,
            layer=layer,
            capacity=self.rows,
            global_scope=True,
            forced_admit=True,
            t=self._clock,
            assign_rows=False,
        )
        missing = [int(expert) for expert in experts if plan.miss[expert]]
        if not missing:
            return
        # Free rows into which a read that was given up still runs, or out of which a copy may, come after the others.
        free = np.flatnonzero(self._owner < 0).tolist()
        free.sort(key=lambda row: row in self._reads or row in self._lent)
        rows = (free + self._slot_of.reshape(-1)[plan.evict].tolist())[: len(missing)]
        given_up = [job for row in rows if (job := self._vacate(row, finish)) is not None]
        plan.dest[missing] = rows
        apply(np, plan, self._slot_of, self._owner)
        for job in self._split(layer, missing, rows, rank):
            self._submit(job)
        for job in given_up:
            self._drop(job)
        if self.policy.in_cache:
            self._state = self.policy.commit(np, self._state, layer, self._slot_of >= 0, self._clock)

    def _vacate(self, row, finish):
        """Waits until nobody reads from or writes to a row; returns the read that was given up for it, or None."""
        turn = self._moving.get(row)
        if turn is not None:
            finish(turn)
            self._moving = {row: later for row, later in self._moving.items() if later > turn}
        lent = self._lent.pop(row, None)
        if lent is not None:
            lent()
        job = self._reads.get(row)
        if job is None or job.future.cancel():
            return job
        wait([job.future])
        return None

    def _split(self, layer, experts, rows, rank):
        """Jobs in order: experts that follow each other in the file are read together, see `RowReader`."""
        start = 0
        for end in range(1, len(experts) + 1):
            full = end - start == self._reader.rows_a_job
            if full or end == len(experts) or experts[end] != experts[end - 1] + 1:
                yield _Job(layer, experts[start:end], rows[start:end], rank)
                start = end

    def _submit(self, job):
        for row in job.rows:
            self._reads[row] = job  # before it can begin: who wants the row must know of it
        rows = [self._memory[row] for row in job.rows]
        self._threads.submit(job.rank, job.future, lambda: self._read(job.layer, job.experts, rows))

    def _read(self, layer, experts, rows):
        with self._lock:
            if not self._reading:
                self._busy_since = time.perf_counter()
            self._reading += 1
        try:
            self._reader.read(layer, experts, rows)
        finally:
            with self._lock:
                self._reading -= 1
                if not self._reading:
                    self._busy_seconds += time.perf_counter() - self._busy_since
        self._count(layer, ROWS_READ, len(rows))

    def _settle(self):
        """Forgets the reads that have ended; experts whose read was lost are absent."""
        for job in set(self._reads.values()):
            if job.lost():
                self._drop(job)
            elif job.future.done():
                self._forget(job)

    def _drop(self, job):
        """Takes the experts of a read that will not end well out of the tables."""
        for expert, row in zip(job.experts, job.rows, strict=True):
            if self._reads.get(row) is job and self._slot_of[job.layer, expert] == row:
                self._slot_of[job.layer, expert] = self._owner[row] = -1
        self._forget(job)

    def _forget(self, job):
        for row in job.rows:
            if self._reads.get(row) is job:
                del self._reads[row]

    @contextlib.contextmanager
    def _undivided(self):
        """Around a change of the tables: what interrupts it (Ctrl-C, a policy that raises) leaves nobody with a row.

        Reads under way are still known, so none of them can write into what a row is given to later.
        """
        try:
            yield
        except BaseException:
            self._slot_of.fill(-1)
            self._owner.fill(-1)
            for job in set(self._reads.values()):
                job.future.cancel()
            raise

    # ---------------------------------------------------------------------------------------------------------- figures

    def _count(self, layer, what, n):
        with self._lock:
            self._counters[layer, what] += n
            self._total[what] += n

    def take_counters(self) -> np.ndarray:
        """[L, 3] int64: host hits, host misses and rows read by layer since the last call of this."""
        with self._lock:
            counters, self._counters = self._counters, np.zeros_like(self._counters)
        return counters

    def stats(self) -> dict:
        """What the tier holds and what was read since it was made.

        hits, misses: experts that the device missed and that host memory had or had not. bytes_read: of whole rows,
        without padding. read_seconds: time in which at least one read was under way; gb_per_second: bytes_read over it.
        wait_seconds: time in which events waited for reads.
        """
        with self._lock:
            hits, misses, rows = self._total.tolist()
            seconds = self._busy_seconds + (time.perf_counter() - self._busy_since if self._reading else 0.0)
        nbytes = rows * self.spec.row_bytes
        return {
            "why": self.why,
            "rows": self.rows,
            "experts": self.spec.L * self.spec.E,
            "policy": self.policy.name,
            "reads": self._reader.how,
            "occupied_rows": int(np.count_nonzero(self._owner >= 0)),
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "bytes_read": nbytes,
            "read_seconds": seconds,
            "gb_per_second": nbytes / seconds / 1e9 if rows else None,
            "wait_seconds": self._wait_seconds,
        }

    # --------------------------------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Ends the threads, closes the files and gives the memory back. Safe to call twice."""
        self._threads.close()
        self._reader.close()
        self._free()

    def _free(self):
        self._memory = self._views = []
        self._pinned.close()
