"""Pinned host memory: how it is had, given out as jax arrays, and given back.

jax allocates it at about 1 GB/s on the H200 of docs/measurements.md, for the driver makes the pages one after another.
Pages that threads have touched before, huge ones where the system has them, are registered with CUDA 26 times as
fast, and DLPack makes a jax array of a piece of them without a copy.
"""

import ctypes
import logging
import math
import mmap
import os
import time
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

logger = logging.getLogger(__name__)

# More threads than this do not copy faster (38 GB/s with 16, docs/measurements.md), they only take cores.
MAX_THREADS = 16
HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_TOUCHED_AT_A_TIME = 1 << 28
# Of DLPack (dlpack.h): the number of pinned host memory, that of bfloat16, and where a tensor says what its numbers
# are: after the data's address (8 bytes), the device (8) and the number of dimensions (4).
_DL_CUDA_HOST, _DL_BFLOAT, _DL_TYPE_CODE_AT = 3, 4, 20


# Ways to have it.
ALLOCATED, REGISTERED = WAYS = ("allocated", "registered")


class HostMemoryError(MemoryError):
    """Pinned host memory could not be had."""


def pinned_zeros(shape, dtype):
    """A `pinned_host` jax array of zeros that jax allocates, of the first device."""
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    # Made on the device and moved: XLA needs a device temporary of this size.
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


def host_view(array):
    """The NumPy view (writable, no copy) of a host-memory jax array; valid while the array lives."""
    buffer = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(buffer, np.uint8).view(array.dtype).reshape(array.shape)


def padded(nbytes: int) -> int:
    """Bytes that an array of `nbytes` takes of a `PinnedMemory`."""
    return math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE


def open_pinned(nbytes: int, way=ALLOCATED) -> "PinnedMemory":
    """`nbytes` of pinned memory of zeros, the sum of what will be taken, each `padded`. Raises HostMemoryError.

    way: one of `WAYS`. What cannot be registered is allocated, and the log says why.
    """
    if way == ALLOCATED:
        return AllocatedMemory(nbytes)
    if _platform() != "gpu":
        logger.info("pinned memory: allocated; it is registered with a GPU, and there is none")
        return AllocatedMemory(nbytes)
    try:
        from host_offload.transport.cuda import CudaError
    except ImportError as error:
        logger.warning("pinned memory: registering takes cuda-bindings (%s), so jax allocates it", error)
        return AllocatedMemory(nbytes)
    try:
        return RegisteredMemory(nbytes)
    except CudaError as error:
        logger.warning("pinned memory: it cannot be registered (%s), so jax allocates it, which takes longer", error)
        return AllocatedMemory(nbytes)


def _platform() -> str:
    return jax.devices()[0].platform


class PinnedMemory(ABC):
    """What `open_pinned` returns. Owner: who opened it.

    Attributes:
      way: one of `WAYS`.
    """

    way: str

    def __init__(self, nbytes):
        self.nbytes, self._arrays = nbytes, []

    def take(self, shape, dtype):
        """A `pinned_host` jax array of zeros of the first device. Raises HostMemoryError."""
        array = self._make(tuple(shape), np.dtype(dtype))
        self._arrays.append(array)
        return array

    @abstractmethod
    def _make(self, shape: tuple[int, ...], dtype: np.dtype):
        """The array of `take`."""

    def close(self):
        """Frees all arrays, which no running program may use, and views of them. Safe to call twice."""
        for array in self._arrays:
            if not array.is_deleted():
                array.delete()
        self._arrays = []


class AllocatedMemory(PinnedMemory):
    """Each array is allocated by jax."""

    way = ALLOCATED

    def _make(self, shape, dtype):
        try:
            return jax.block_until_ready(pinned_zeros(shape, dtype))
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
                raise
            done = sum(array.nbytes for array in self._arrays)
            raise HostMemoryError(
                f"pinned host memory ran out after {done / 1e9:.1f} of {self.nbytes / 1e9:.1f} GB of expert rows: set "
                f"{HOST_LIMIT_VARIABLE}={math.ceil(self.nbytes / 1e9 * 1.1) + 2} before jax starts "
                f"(now {os.environ.get(HOST_LIMIT_VARIABLE, '64, its default')}), or free host memory"
            ) from error


class RegisteredMemory(PinnedMemory):
    """One piece of anonymous memory, touched by threads, registered with CUDA, cut into arrays.

    Raises HostMemoryError if the system has less memory free (the first touch of too much would end the process), and
    CudaError if it cannot be registered, the device cannot read it where the host has it, or jax does not take it.
    """

    way = REGISTERED

    def __init__(self, nbytes):
        super().__init__(nbytes)
        free = available_bytes()
        if nbytes > free:
            raise HostMemoryError(
                f"host memory: expert rows take {nbytes / 1e9:.1f} GB of pinned memory, and {free / 1e9:.1f} GB are "
                "free: free host memory, or give transport='callback' a host_memory_bytes that fits"
            )
        from host_offload.transport import cuda

        attribute = cuda.cudart.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not cuda.check(cuda.cudart.cudaDeviceGetAttribute(attribute, 0)):
            raise cuda.CudaError("the device cannot read registered memory at the host's addresses")
        started = time.perf_counter()
        self._memory = touched(nbytes)
        address = self._memory.ctypes.data
        cuda.check(cuda.cudart.cudaHostRegister(address, nbytes, cuda.cudart.cudaHostRegisterMapped))
        # Whatever becomes of this object: pages that are given back while registered would stay pinned. What the call
        # holds keeps them until then.
        self._unregister = weakref.finalize(self, _unregister, cuda, self._memory)
        self._used = 0
        try:
            adopt(self._memory[: mmap.PAGESIZE]).delete()
        except Exception as error:
            self._unregister()
            raise cuda.CudaError(f"jax does not take registered memory ({error})") from error
        seconds = time.perf_counter() - started
        logger.info("pinned memory: %.2f GB registered in %.2f s", nbytes / 1e9, seconds)

    def _make(self, shape, dtype):
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + padded(nbytes)
        if self._used > self.nbytes:
            raise ValueError(f"{self._used} bytes are taken of {self.nbytes}: open as many as will be taken")
        return adopt(self._memory[start : start + nbytes].view(dtype).reshape(shape))

    def close(self):
        super().close()
        self._unregister()
        self._memory = None


def _unregister(cuda, memory):
    cuda.check(cuda.cudart.cudaHostUnregister(memory.ctypes.data))


def touched(nbytes: int, huge=True) -> np.ndarray:
    """Anonymous memory of zeros [nbytes] uint8 whose pages are there: `huge` ones, if the system has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without them
        logger.info("pinned memory: no huge pages (%s)", error)
    array = np.frombuffer(memory, np.uint8)

    def touch(start):
        array[start : start + _TOUCHED_AT_A_TIME : mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="touch") as workers:
        list(workers.map(touch, range(0, nbytes, _TOUCHED_AT_A_TIME)))
    return array


class _Pinned:
    """A NumPy array in registered memory, as `jax.dlpack.from_dlpack` takes it: pinned memory of the first device."""

    device_type = _DL_CUDA_HOST

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, **_):
        if self._array.dtype != ml_dtypes.bfloat16:
            return self._array.__dlpack__()
        # NumPy cannot describe bfloat16: it describes numbers of as many bits, and what they are is put right.
        capsule = self._array.view(np.uint16).__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_uint8.from_address(get(capsule, b"dltensor") + _DL_TYPE_CODE_AT).value = _DL_BFLOAT
        return capsule


def adopt(array: np.ndarray):
    """The jax array of registered memory, where it lies."""
    adopted = jax.dlpack.from_dlpack(_Pinned(array))
    if adopted.unsafe_buffer_pointer() != array.ctypes.data:
        raise RuntimeError("jax copied pinned memory instead of taking it where it lies")
    return adopted


def available_bytes() -> float:
    """Bytes that new pages may take: what the system calls available, and what the process's group has left; inf if
    neither tells."""
    free = math.inf
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        cached = [
            int(line.split()[1]) for line in _lines("/sys/fs/cgroup/memory.stat") if line.startswith("inactive_file")
        ]
        free = min(free, int(limit[0]) - int(used[0]) + sum(cached))
    return free


def _lines(path) -> list[str]:
    """The lines of a file of the system, none if it has no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
