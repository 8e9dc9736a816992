"""A CUDA runtime that is played on the host, for tests of the CUDA mover where there is no GPU.

It knows of each operation which others must have ended before it starts: by the order of its stream, by events and by
waits of the host. All else may happen at any time. Copies take place when they are enqueued, which is one of the orders
that a GPU may choose; a program in which no copy can meet another or the read of a row has the same result in all.
"""

import ctypes
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

import host_offload.transport


class Timeline:
    """A stream, an event or the host: the set of operations that must have ended, as bits of an int."""

    def __init__(self, ended=0):
        self.ended = ended


class Copy(NamedTuple):
    """A copy of `nbytes` from `source` to `to`: its bit, and the bits of what must have ended before it starts."""

    to: int
    source: int
    nbytes: int
    bit: int
    before: int


class PlayedCuda(ModuleType):
    """The calls of `cuda.bindings.runtime` that the mover makes.

    fails: (function, stream) -> whether a call answers with an error, and does nothing. late: event -> whether a query
    finds it not ready yet.
    """

    cudaStreamNonBlocking = cudaEventDisableTiming = 1
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice="h2d", cudaMemcpyDeviceToHost="d2h", cudaMemcpyDeviceToDevice="d2d"
    )
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem="same addresses")
    cudaHostRegisterMapped = "mapped"

    def __init__(self):
        super().__init__("cuda.bindings.runtime")
        self.host, self.open, self.memory = Timeline(), set(), {}
        self.registered: dict[int, int] = {}
        self.copies: list[Copy] = []
        self._reads, self.operations = [], 0
        self.fails = lambda function, stream: False
        self.late = lambda event: False

    def _enqueue(self, stream):
        """(bit of a new operation, what must end before it starts)."""
        before = stream.ended | self.host.ended
        bit = 1 << self.operations
        self.operations += 1
        stream.ended = before | bit
        return bit, before

    def _new(self, flags):
        made = Timeline()
        self.open.add(made)
        return 0, made

    cudaStreamCreateWithFlags = cudaEventCreateWithFlags = _new

    def _destroy(self, made):
        self.open.remove(made)
        return (0,)

    cudaStreamDestroy = cudaEventDestroy = _destroy

    def cudaGetErrorString(self, code):
        return 0, b"out of luck"

    def cudaMallocHost(self, nbytes):
        memory = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(memory)] = memory
        return 0, ctypes.addressof(memory)

    def cudaFreeHost(self, address):
        del self.memory[address]
        return (0,)

    cudaMalloc, cudaFree = cudaMallocHost, cudaFreeHost

    def cudaDeviceGetAttribute(self, attribute, device):
        return 0, int(not self.fails("cudaDeviceGetAttribute", None))

    def cudaHostRegister(self, address, nbytes, flags):
        if self.fails("cudaHostRegister", None):
            return (2,)
        self.registered[address] = nbytes
        return (0,)

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return (0,)

    def cudaEventRecord(self, event, stream):
        if self.fails("cudaEventRecord", stream):
            return (2,)
        event.ended = stream.ended | self.host.ended
        return (0,)

    def cudaStreamWaitEvent(self, stream, event, flags):
        if self.fails("cudaStreamWaitEvent", stream):
            return (2,)
        stream.ended |= event.ended
        return (0,)

    def cudaEventQuery(self, event):
        if self.late(event):
            return (600,)
        self.host.ended |= event.ended
        return (0,)

    def cudaStreamSynchronize(self, stream):
        self.host.ended |= stream.ended
        return (0,)

    def cudaEventSynchronize(self, event):
        self.host.ended |= event.ended
        return (0,)

    def cudaMemcpyAsync(self, to, source, nbytes, kind, stream):
        if self.fails("cudaMemcpyAsync", stream):
            return (2,)
        bit, before = self._enqueue(stream)
        for other in self.copies:
            touched = to < other.to + other.nbytes and other.to < to + nbytes
            assert not touched or other.bit & before, "two copies may write a row at the same time"
            touched = source < other.to + other.nbytes and other.to < source + nbytes
            assert not touched or other.bit & before, "a copy may read what another is still writing"
            touched = to < other.source + other.nbytes and other.source < to + nbytes
            assert not touched or other.bit & before, "a copy may write what another is still reading"
        for reader, reads in self._reads:
            touched = any(to < at + size and at < to + nbytes for at, size in reads)
            assert not touched or reader & before, "a copy may write a row that is still being read"
        ctypes.memmove(to, source, nbytes)
        self.copies.append(Copy(to, source, nbytes, bit, before))
        return (0,)

    def compute(self, stream, reads):
        """A kernel that reads the memory (address, bytes): no copy may be under way there. Returns (bit, before)."""
        bit, before = self._enqueue(stream)
        for copy in self.copies:
            touched = any(copy.to < at + size and at < copy.to + copy.nbytes for at, size in reads)
            assert not touched or copy.bit & before, "a row is read while a copy may write it"
        self._reads.append((bit, reads))
        return bit, before

    def none_under_way(self, stream, but=lambda copy: False):
        """Whether what comes next on a stream starts after every copy so far `but` some."""
        return all(copy.bit & (stream.ended | self.host.ended) for copy in self.copies if not but(copy))


class DeviceBuffer:
    """What a callback gets on a GPU, over host memory."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.__cuda_array_interface__ = {"data": (array.ctypes.data, False)}


def cuda_module_on(played: PlayedCuda):
    """`host_offload.transport.cuda` as imported where cuda-bindings is `played`."""
    bindings, root = ModuleType("cuda.bindings"), ModuleType("cuda")
    bindings.runtime, root.bindings = played, bindings
    names = {"cuda": root, "cuda.bindings": bindings, "cuda.bindings.runtime": played}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in names.items():
            patch.setitem(sys.modules, name, module)
        path = f"{host_offload.transport.__path__[0]}/cuda.py"
        spec = importlib.util.spec_from_file_location("cuda_on_a_played_runtime", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
