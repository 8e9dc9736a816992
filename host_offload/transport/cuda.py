"""The few CUDA runtime calls of the callback transport, through cuda-bindings. Imported only on a GPU."""

import ctypes

import numpy as np
from cuda.bindings import runtime as cudart


class CudaError(RuntimeError):
    """A CUDA runtime call failed."""


def check(result):
    """Raises `CudaError` unless a cuda-bindings result is success; returns its values."""
    code, *values = result
    if int(code) != 0:
        name = cudart.cudaGetErrorString(code)[1]
        raise CudaError(f"CUDA: {name.decode() if isinstance(name, bytes) else name} ({code})")
    return values[0] if len(values) == 1 else values


def pointer(buffer) -> int:
    """Device address of a buffer that a callback got."""
    return buffer.__cuda_array_interface__["data"][0]


H2D = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
D2H = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
D2D = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice


def copy_rate(nbytes: int, copies: int = 8) -> float:
    """Bytes a second of the copy engine from pinned host memory to the device, `copies` copies of `nbytes` in a row."""
    host, device = check(cudart.cudaMallocHost(nbytes)), check(cudart.cudaMalloc(nbytes))
    stream = check(cudart.cudaStreamCreate())
    start, stop = check(cudart.cudaEventCreate()), check(cudart.cudaEventCreate())
    try:
        check(cudart.cudaMemcpyAsync(device, host, nbytes, H2D, stream))
        check(cudart.cudaEventRecord(start, stream))
        for _ in range(copies):
            check(cudart.cudaMemcpyAsync(device, host, nbytes, H2D, stream))
        check(cudart.cudaEventRecord(stop, stream))
        check(cudart.cudaEventSynchronize(stop))
        return copies * nbytes / (check(cudart.cudaEventElapsedTime(start, stop)) / 1e3)
    finally:
        for event in (start, stop):
            check(cudart.cudaEventDestroy(event))
        check(cudart.cudaStreamDestroy(stream))
        check(cudart.cudaFree(device))
        check(cudart.cudaFreeHost(host))


class Staging:
    """Small pinned buffers for ids and tables, handed out in turn, so that a copy in flight keeps its own."""

    TURNS = 64

    def __init__(self):
        self._kept: dict[tuple, list] = {}
        self._addresses: list[int] = []

    def take(self, key, shape, dtype):
        """(NumPy array, its address) for `key`: the same after `TURNS` other calls with it."""
        kept = self._kept.get(key)
        if kept is None or kept[1][0][0].shape != shape or kept[1][0][0].dtype != dtype:
            kept = self._kept[key] = [0, [self._make(shape, dtype) for _ in range(self.TURNS)]]
        kept[0] = (kept[0] + 1) % self.TURNS
        return kept[1][kept[0]]

    def _make(self, shape, dtype):
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = max(16, count * np.dtype(dtype).itemsize)
        address = int(check(cudart.cudaMallocHost(nbytes)))
        self._addresses.append(address)
        memory = (ctypes.c_char * nbytes).from_address(address)
        return np.frombuffer(memory, dtype, count).reshape(shape), address

    def close(self):
        """Frees the buffers."""
        self._kept = {}
        while self._addresses:
            check(cudart.cudaFreeHost(self._addresses.pop()))


class CudaMover:
    """Moves small tables on XLA's stream, and rows on two private streams beside it.

    Two streams, because the gap between two copies of one stream is time in which the link rests. Owner: XLA's
    execution thread, which runs the host calls one after another.

    Args:
      pool: `ExpertPool`, or a `DiskTier` that holds what is moved.
      early: how many row tensors, from the first, a decode event needs before the others.
      staging_rows: rows of device memory beside the banks that `stage` fills.
    """

    STREAMS = 2

    def __init__(self, pool, early=1, staging_rows=0):
        self._pool = pool  # kept alive: copies read its rows by address
        self._early = early
        self._nbytes = {name: pool.spec.nbytes(name) for name in pool.spec.tensors}
        self._staging = Staging()
        flags = cudart.cudaStreamNonBlocking
        self._streams = [check(cudart.cudaStreamCreateWithFlags(flags)) for _ in range(self.STREAMS)]
        self._events: list = []
        self._computed = self._event()
        self._arrived = [[self._event() for _ in self._streams] for _ in range(2)]
        self._rest = [self._event() for _ in self._streams]
        self._moving = False
        self._staged = {
            name: check(cudart.cudaMalloc(staging_rows * nbytes))
            for name, nbytes in self._nbytes.items()
            if staging_rows
        }

    def _event(self):
        self._events.append(check(cudart.cudaEventCreateWithFlags(cudart.cudaEventDisableTiming)))
        return self._events[-1]

    def fetch(self, ctx, layer, buffers, meanwhile):
        """NumPy copies of small device buffers, after everything before them on XLA's stream.

        `meanwhile()` runs on the host while the device gets there. The arrays are overwritten some calls later.
        """
        out = {}
        stream = ctx.stream
        for name, buffer in buffers.items():
            out[name], address = self._staging.take(name, buffer.shape, buffer.dtype)
            check(cudart.cudaMemcpyAsync(address, pointer(buffer), out[name].nbytes, D2H, stream))
        meanwhile()
        check(cudart.cudaStreamSynchronize(stream))
        return out

    def store(self, ctx, buffer, value):
        """Writes a small array into a device buffer on XLA's stream."""
        shape = buffer.shape
        array, address = self._staging.take(shape, shape, buffer.dtype)
        array[...] = value
        check(cudart.cudaMemcpyAsync(pointer(buffer), address, array.nbytes, H2D, ctx.stream))

    def _copy(self, name, bank, layer, runs):
        nbytes = self._nbytes[name]
        for index, (expert, row, count) in enumerate(runs):
            stream = self._streams[index % self.STREAMS]
            at, source = bank + row * nbytes, self._pool.address(layer, name, expert)
            check(cudart.cudaMemcpyAsync(at, source, count * nbytes, H2D, stream))

    def _record(self, events):
        for event, stream in zip(events, self._streams, strict=True):
            check(cudart.cudaEventRecord(event, stream))

    @staticmethod
    def _wait(ctx, events):
        for event in events:
            check(cudart.cudaStreamWaitEvent(ctx.stream, event, 0))

    def move(self, ctx, banks, layer, moves):
        """Copies (expert, row) pairs; what follows on XLA's stream sees the early row tensors, see `wait_rest`.

        To be called right after `fetch`: XLA's stream is empty then, so no compute still reads what is overwritten.
        """
        runs = [(expert, row, 1) for expert, row in moves]
        names = list(self._nbytes)
        for name in names[: self._early]:
            self._copy(name, pointer(banks[name]), layer, runs)
        self._record(self._arrived[0])
        self._wait(ctx, self._arrived[0])
        for name in names[self._early :]:
            self._copy(name, pointer(banks[name]), layer, runs)
        self._record(self._rest)
        self._moving = True

    def wait_rest(self, ctx):
        """What follows on XLA's stream sees all tensors of the rows of the last `move`."""
        if self._moving:
            self._moving = False
            self._wait(ctx, self._rest)

    def stage(self, layer, moves):
        """Starts (place, expert) copies into staging memory, after all moves so far.

        A place belongs to one stream, which also takes rows out of it: so neither can overtake the other.
        """
        for name, nbytes in self._nbytes.items():
            for place, expert in moves:
                to, stream = self._staged[name] + place * nbytes, self._streams[place % self.STREAMS]
                check(cudart.cudaMemcpyAsync(to, self._pool.address(layer, name, expert), nbytes, H2D, stream))

    def let_pass(self, stream):
        """What follows on `stream` starts after the rows of the last `move`."""
        for event in self._rest:
            check(cudart.cudaStreamWaitEvent(stream, event, 0))

    def move_ahead(self, ctx, banks, layer, moves, turn, staged=()):
        """Starts the moves of round `turn`, once all that is enqueued on XLA's stream is done; `staged` are (place,
        row) pairs that come from staging memory."""
        check(cudart.cudaEventRecord(self._computed, ctx.stream))
        for stream in self._streams:
            check(cudart.cudaStreamWaitEvent(stream, self._computed, 0))
        runs = merged(moves) if self._pool.adjacent else [(expert, row, 1) for expert, row in moves]
        for name, nbytes in self._nbytes.items():
            bank = pointer(banks[name])
            self._copy(name, bank, layer, runs)
            for place, row in staged:
                source, stream = self._staged[name] + place * nbytes, self._streams[place % self.STREAMS]
                check(cudart.cudaMemcpyAsync(bank + row * nbytes, source, nbytes, D2D, stream))
        self._record(self._arrived[turn % 2])

    def wait(self, ctx, turn):
        """What follows on XLA's stream waits for the moves of round `turn`."""
        self._wait(ctx, self._arrived[turn % 2])

    def finish(self, turn):
        """Waits on the host until the moves of round `turn`, or of round `turn + 2` if they started, have ended."""
        for event in self._arrived[turn % 2]:
            check(cudart.cudaEventSynchronize(event))

    def drain(self):
        """Waits on the host until no move is under way: after a fault nobody else waits for them."""
        for stream in self._streams:
            check(cudart.cudaStreamSynchronize(stream))

    def close(self):
        """Waits for its copies and frees streams, events and memory. Safe to call twice."""
        for stream in self._streams:
            check(cudart.cudaStreamSynchronize(stream))
            check(cudart.cudaStreamDestroy(stream))
        for event in self._events:
            check(cudart.cudaEventDestroy(event))
        for address in self._staged.values():
            check(cudart.cudaFree(address))
        self._streams, self._events, self._staged = [], [], {}
        self._staging.close()


def merged(moves):
    """(expert, row, count) runs of moves whose experts and rows both follow on: one larger copy each."""
    runs: list[tuple[int, int, int]] = []
    for expert, row in moves:
        if runs and expert == runs[-1][0] + runs[-1][2] and row == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((expert, row, 1))
    return runs
