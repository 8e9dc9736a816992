"""How prefetched rows travel beside everything else: one interface, a thread on the CPU, a private stream on a GPU.

A lane copies one row at a time, in order. A copy that has not begun can be cancelled; one that has begun ends by
itself, and only who really uses its row waits for it. `NumpyLane` is the CPU's; `cuda_lane.py` has the GPU's.
"""

import threading
import time
from collections import deque

import jax
import numpy as np

# Weight of the newest copy in the measured rate.
NEWEST = 0.25


class Copy:
    """One row on its way: `parts` are the (destination, source, bytes) of its tensors, `nbytes` their sum.

    begun, done: set by the lane, in this order; both stay False if it was cancelled. error: what the copy raised.
    """

    def __init__(self, parts, nbytes):
        self.parts, self.nbytes = parts, nbytes
        self.begun = self.done = False
        self.error: BaseException | None = None
        self.events = None


class NumpyLane:
    """Copies between host arrays in a thread of its own. Same interface as `cuda_lane.CudaLane`.

    Owner: the thread that makes the host calls. The thread of the lane touches a copy only between `begun` and `done`.
    """

    def __init__(self, pool, name="prefetch"):
        self._pool, self._name = pool, name
        self._queue: deque[Copy] = deque()
        self._running: Copy | None = None
        self._failed: BaseException | None = None
        self._rate: float | None = None
        self._closed = False
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None

    def place(self, banks) -> tuple[int, ...]:
        """Where banks lie that a host call got."""
        return tuple(np.asarray(bank).__array_interface__["data"][0] for bank in banks.values())

    def copy(self, banks, layer, expert, row) -> Copy:
        """A copy of an expert's row, where it lies now, into a row of the banks; not submitted yet."""
        parts, nbytes = [], 0
        for name, bank in banks.items():
            source = self._pool.row(layer, name, expert)
            parts.append((np.asarray(bank)[row, ...], source))
            nbytes += source.nbytes
        return Copy(parts, nbytes)

    def submit(self, copy):
        """Queues a copy behind the others."""
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._queue.append(copy)
            self._turn.notify_all()

    def cancel(self, copy) -> bool:
        """Whether the copy had not begun; then it never will."""
        with self._turn:
            if copy.begun:
                return False
            if copy in self._queue:  # else `drain` has dropped it
                self._queue.remove(copy)
            return True

    def poll(self):
        """Starts what may start and notices what has ended. Raises what a copy raised since the last call of this."""
        with self._turn:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    @property
    def rate(self) -> float | None:
        """Bytes a second of recent copies, None before the first."""
        return self._rate

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the copies that are queued or under way."""
        with self._turn:
            running = [] if self._running is None else [self._running]
            return sum(copy.nbytes for copy in (*running, *self._queue))

    def wait(self, ctx, copy):
        """What follows sees the early tensors of a copy that has begun. Raises what the copy raised."""
        with self._turn:
            self._turn.wait_for(lambda: copy.done)
        if copy.error is not None:
            raise copy.error

    def wait_rest(self, ctx, copy):
        """What follows sees all tensors of a copy that `wait` was called for: here it does already."""

    def finish(self, copy):
        """Waits on the host until a copy that has begun has ended, however it did."""
        with self._turn:
            self._turn.wait_for(lambda: copy.done)

    def drain(self):
        """Waits on the host until no copy is under way; what has not begun is dropped, and faults are forgotten: this
        comes after one that was reported, or before the end."""
        with self._turn:
            self._queue.clear()
            self._turn.wait_for(lambda: self._running is None)
            self._failed = None

    def close(self):
        """Drains and ends the thread. May be repeated."""
        self.drain()
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _move(self, copy):
        for target, source in copy.parts:
            target[...] = source

    def _work(self):
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                copy = self._running = self._queue.popleft()
                copy.begun = True
            started = time.perf_counter()
            try:
                self._move(copy)
            except BaseException as error:  # for who uses the row, and for `poll` if nobody does
                copy.error = error
            seconds = time.perf_counter() - started
            with self._turn:
                if copy.error is not None:
                    self._failed = copy.error
                elif seconds > 0:
                    rate = copy.nbytes / seconds
                    self._rate = rate if self._rate is None else self._rate + NEWEST * (rate - self._rate)
                copy.done, self._running = True, None
                self._turn.notify_all()


def make_lane(mover, pool, early):
    """The lane of the default device's platform beside a mover; `early`: row tensors that arrive before the others."""
    if jax.devices()[0].platform == "gpu":
        from host_offload.prefetch.cuda_lane import CudaLane

        return CudaLane(mover, pool, early)
    return NumpyLane(pool)
