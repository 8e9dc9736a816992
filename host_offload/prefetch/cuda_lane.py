"""The lane of a GPU: a private stream, two events a copy. Imported only on a GPU."""

from collections import deque

import host_offload.transport.cuda as cuda
from host_offload.prefetch.lanes import Copy
from host_offload.transport.cuda import H2D, check, pointer

NOT_READY = 600  # cudaErrorNotReady


class CudaLane:
    """Copies rows on a stream of its own; same interface as `lanes.NumpyLane`.

    Demand goes first: copies begin behind the demanded rows of the event, and no more than `AHEAD_BYTES` (or one row)
    are given to the stream at a time, so that rows demanded later wait for little. The others wait here, where they can
    be cancelled.

    Args:
      mover: the `CudaMover` whose copies go first. pool: what is copied from. early: as the mover's.
    """

    AHEAD_BYTES = 16 << 20

    def __init__(self, mover, pool, early):
        self._mover, self._pool, self._early = mover, pool, early
        self._nbytes = {name: pool.spec.nbytes(name) for name in pool.spec.tensors}
        runtime = cuda.cudart
        self._stream = check(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
        self._spare: list = []  # pairs of events
        self._made: list = []
        self._queue: deque[Copy] = deque()
        self._flying: deque[Copy] = deque()
        # The rate of large copies, measured once: the window of a layer is a matter of its order.
        self._rate = cuda.copy_rate(max(pool.spec.row_bytes, 1))

    def place(self, banks) -> tuple[int, ...]:
        """Where banks lie that a host call got."""
        return tuple(pointer(bank) for bank in banks.values())

    def copy(self, banks, layer, expert, row) -> Copy:
        """A copy of an expert's row, where it lies now, into a row of the banks; not submitted yet."""
        parts = []
        for name, nbytes in self._nbytes.items():
            parts.append((pointer(banks[name]) + row * nbytes, self._pool.address(layer, name, expert), nbytes))
        return Copy(parts, self._pool.spec.row_bytes)

    def submit(self, copy):
        """Queues a copy behind the others."""
        self._queue.append(copy)
        self.poll()

    def cancel(self, copy) -> bool:
        """Whether the copy had not begun; then it never will."""
        if copy.begun:
            return False
        if copy in self._queue:  # else `drain` has dropped it
            self._queue.remove(copy)
        return True

    def poll(self):
        """Starts what may start and notices what has ended. Raises CudaError."""
        while self._flying and self._ended(self._flying[0]):
            self._land(self._flying.popleft())
        flying = sum(copy.nbytes for copy in self._flying)
        while self._queue and (not self._flying or flying + self._queue[0].nbytes <= self.AHEAD_BYTES):
            copy = self._queue.popleft()
            flying += copy.nbytes
            self._begin(copy)

    def _ended(self, copy):
        (code,) = cuda.cudart.cudaEventQuery(copy.events[1])
        if int(code) == NOT_READY:
            return False
        check((code,))
        return True

    def _land(self, copy):
        copy.done = True
        self._spare.append(copy.events)

    def _begin(self, copy):
        runtime = cuda.cudart
        if not self._spare:
            flag = runtime.cudaEventDisableTiming
            pair = [check(runtime.cudaEventCreateWithFlags(flag)) for _ in range(2)]
            self._made += pair
            self._spare.append(pair)
        copy.events, copy.begun = self._spare.pop(), True
        self._flying.append(copy)  # before the first call that may fail: `drain` must know of it
        self._mover.let_pass(self._stream)
        for index, (target, source, nbytes) in enumerate(copy.parts):
            check(runtime.cudaMemcpyAsync(target, source, nbytes, H2D, self._stream))
            if index + 1 == self._early:
                check(runtime.cudaEventRecord(copy.events[0], self._stream))
        check(runtime.cudaEventRecord(copy.events[1], self._stream))
        if self._early >= len(copy.parts):
            check(runtime.cudaEventRecord(copy.events[0], self._stream))

    @property
    def rate(self) -> float:
        """Bytes a second of the copy engine."""
        return self._rate

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the copies that are queued or under way."""
        return sum(copy.nbytes for copy in (*self._flying, *self._queue))

    def wait(self, ctx, copy):
        """What follows on XLA's stream sees the early tensors of a copy that has begun."""
        if not copy.done:
            check(cuda.cudart.cudaStreamWaitEvent(ctx.stream, copy.events[0], 0))

    def wait_rest(self, ctx, copy):
        """What follows on XLA's stream sees all tensors of a copy that `wait` was called for."""
        if not copy.done:
            check(cuda.cudart.cudaStreamWaitEvent(ctx.stream, copy.events[1], 0))

    def finish(self, copy):
        """Waits on the host until a copy that has begun has ended: as the stream's order is, those before it too."""
        while not copy.done:
            first = self._flying.popleft()
            check(cuda.cudart.cudaEventSynchronize(first.events[1]))
            self._land(first)

    def drain(self):
        """Waits on the host until no copy is under way; what has not begun is dropped."""
        if self._stream is None:
            return
        self._queue.clear()
        check(cuda.cudart.cudaStreamSynchronize(self._stream))
        while self._flying:
            self._land(self._flying.popleft())

    def close(self):
        """Drains and frees stream and events. May be repeated."""
        if self._stream is None:
            return
        self.drain()
        check(cuda.cudart.cudaStreamDestroy(self._stream))
        for event in self._made:
            check(cuda.cudart.cudaEventDestroy(event))
        self._stream, self._made, self._spare = None, [], []
