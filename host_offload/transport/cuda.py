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
    """A small pinned buffer for ids and tables; pieces are handed out in a ring so that copies in flight keep theirs."""

    def __init__(self, nbytes: int):
        self._address = int(check(cudart.cudaMallocHost(nbytes)))
        self._bytes = (ctypes.c_char * nbytes).from_address(self._address)
        self._size, self._next = nbytes, 0

    def take(self, shape, dtype):
        """(NumPy array, its address): valid until the ring comes round."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = max(16, -(-count * dtype.itemsize // 16) * 16)
        if nbytes > self._size:
            raise CudaError(f"a table of {nbytes} bytes does not fit the staging ring of {self._size}")
        if self._next + nbytes > self._size:
            self._next = 0
        at, self._next = self._next, self._next + nbytes
        return np.frombuffer(self._bytes, dtype, count, at).reshape(shape), self._address + at

    def close(self):
        """Frees the buffer."""
        if self._address:
            check(cudart.cudaFreeHost(self._address))
            self._address = 0


class CudaMover:
    """Moves rows and small tables on XLA's stream, and rows of a prefill round ahead of need on a private stream.

    Owner: XLA's execution thread, which runs the callbacks one after another.
    """

    def __init__(self, pool, staging_bytes=8 << 20):
        self._pool = pool
        self._spec = pool.spec
        self._nbytes = {name: pool.spec.nbytes(name) for name in pool.spec.tensors}
        self._host = [{name: slab.unsafe_buffer_pointer() for name, slab in layer.items()} for layer in pool.slabs]
        self._staging = Staging(staging_bytes)
        flags = cudart.cudaStreamNonBlocking
        self._private = check(cudart.cudaStreamCreateWithFlags(flags))
        make = lambda: check(cudart.cudaEventCreateWithFlags(cudart.cudaEventDisableTiming))  # noqa: E731
        self._computed, self._arrived = make(), [make(), make()]

    def fetch(self, ctx, buffers, meanwhile):
        """NumPy copies of small device buffers, after everything before them on XLA's stream.

        `meanwhile()` runs on the host while the device gets there.
        """
        out = {}
        for name, buffer in buffers.items():
            out[name], address = self._staging.take(buffer.shape, buffer.dtype)
            check(cudart.cudaMemcpyAsync(address, pointer(buffer), out[name].nbytes, D2H, ctx.stream))
        meanwhile()
        check(cudart.cudaStreamSynchronize(ctx.stream))
        return out

    def store(self, ctx, buffer, value):
        """Writes a small array into a device buffer on XLA's stream."""
        array, address = self._staging.take(buffer.shape, buffer.dtype)
        array[...] = value
        check(cudart.cudaMemcpyAsync(pointer(buffer), address, array.nbytes, H2D, ctx.stream))

    def banks(self, buffers):
        """Addresses of the banks in this call."""
        return {name: pointer(buffer) for name, buffer in buffers.items()}

    def _copy(self, banks, layer, expert, row, stream):
        for name, nbytes in self._nbytes.items():
            source = self._host[layer][name] + expert * nbytes
            check(cudart.cudaMemcpyAsync(banks[name] + row * nbytes, source, nbytes, H2D, stream))

    def move(self, ctx, banks, layer, moves):
        """Copies (expert, row) pairs before whatever follows on XLA's stream."""
        for expert, row in moves:
            self._copy(banks, layer, expert, row, ctx.stream)

    def move_ahead(self, ctx, banks, layer, now, ahead, turn):
        """Starts the moves of the next round and makes XLA's stream wait for those of this one.

        now: whether this round's rows were moved by the call before; ahead: (expert, row) pairs of the next round; turn: round number.
        The next round's rows may be overwritten once all compute enqueued so far is done.
        """
        if ahead:
            check(cudart.cudaEventRecord(self._computed, ctx.stream))
            check(cudart.cudaStreamWaitEvent(self._private, self._computed, 0))
            for expert, row in ahead:
                self._copy(banks, layer, expert, row, self._private)
            check(cudart.cudaEventRecord(self._arrived[(turn + 1) % 2], self._private))
        if now:
            check(cudart.cudaStreamWaitEvent(ctx.stream, self._arrived[turn % 2], 0))

    def close(self):
        """Waits for its copies and frees streams, events and staging."""
        if self._private is None:
            return
        check(cudart.cudaStreamSynchronize(self._private))
        for event in (self._computed, *self._arrived):
            check(cudart.cudaEventDestroy(event))
        check(cudart.cudaStreamDestroy(self._private))
        self._private = None
        self._staging.close()
