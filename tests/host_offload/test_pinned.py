"""Pinned memory: allocated by jax, or registered; whole, aligned, freed, and clear when it cannot be had."""

import gc
import mmap
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from played_cuda import PlayedCuda, cuda_module_on

import host_offload.transport
from host_offload import pinned
from host_offload.pinned import AllocatedMemory, HostMemoryError, RegisteredMemory, host_view, open_pinned, padded

DTYPES = [np.uint8, np.float32, np.float16, np.int32, np.uint32, ml_dtypes.bfloat16]


@pytest.fixture
def played(monkeypatch):
    """A CUDA runtime that is played, with arrays adopted as memory of the CPU, which jax has here."""
    runtime = PlayedCuda()
    module = cuda_module_on(runtime)
    monkeypatch.setitem(sys.modules, "host_offload.transport.cuda", module)
    monkeypatch.setattr(host_offload.transport, "cuda", module, raising=False)
    monkeypatch.setattr(pinned._Pinned, "device_type", 1)
    monkeypatch.setattr(pinned, "_platform", lambda: "gpu")
    return runtime


def test_an_array_on_a_gpu_says_that_it_is_pinned():
    assert pinned._Pinned(np.zeros(3, np.uint8)).__dlpack_device__() == (3, 0)


def test_registered_arrays_are_zeros_of_their_kind_where_the_memory_is(played):
    shape = (3, 5, 7)
    memory = open_pinned(sum(padded(105 * np.dtype(dtype).itemsize) for dtype in DTYPES), "registered")
    assert isinstance(memory, RegisteredMemory) and list(played.registered.values()) == [memory.nbytes]
    arrays = [memory.take(shape, dtype) for dtype in DTYPES]
    for number, (array, dtype) in enumerate(zip(arrays, DTYPES, strict=True)):
        assert array.shape == shape and array.dtype == dtype and array.unsafe_buffer_pointer() % mmap.PAGESIZE == 0
        assert not np.asarray(array).astype(np.float32).any()
        host_view(array)[1, 2, 3] = number + 1
    for number, array in enumerate(arrays):  # nobody wrote to a neighbour
        values = np.asarray(array).astype(np.float32)
        assert values[1, 2, 3] == number + 1 and values.sum() == number + 1
    with pytest.raises(ValueError, match="open as many as will be taken"):
        memory.take((1,), np.uint8)
    memory.close()
    assert all(array.is_deleted() for array in arrays) and not played.registered
    memory.close()


def test_more_than_is_free_is_refused_before_any_page_is_touched(played, monkeypatch):
    monkeypatch.setattr(pinned, "available_bytes", lambda: 5e9)
    with pytest.raises(HostMemoryError, match=r"take 6.0 GB of pinned memory, and 5.0 GB are free"):
        open_pinned(6_000_000_000, "registered")
    assert not played.registered


@pytest.mark.parametrize("call", ["cudaDeviceGetAttribute", "cudaHostRegister"])
def test_where_it_cannot_be_registered_jax_allocates_and_the_log_says_so(played, caplog, call):
    played.fails = lambda function, stream: function == call
    with caplog.at_level("WARNING", logger="host_offload"):
        memory = open_pinned(padded(8), "registered")
    assert isinstance(memory, AllocatedMemory) and "so jax allocates it" in caplog.text and not played.registered
    assert memory.take((8,), np.uint8).sharding.memory_kind == "pinned_host"
    memory.close()


@pytest.mark.parametrize("way", pinned.WAYS)
def test_without_a_gpu_jax_allocates(way):
    memory = open_pinned(padded(24), way)
    array = memory.take((2, 3), np.float32)
    assert isinstance(memory, AllocatedMemory) and array.sharding.memory_kind == "pinned_host"
    assert not host_view(array).any()
    memory.close()
    assert array.is_deleted()
    memory.close()


@pytest.mark.parametrize("what", ("RESOURCE_EXHAUSTED: pinned", "Out of memory"))
def test_exhausted_memory_of_jax_names_the_variable(monkeypatch, what):
    memory = AllocatedMemory(2_000_000_000)
    memory.take((1000,), np.uint8)

    def exhausted(shape, dtype):
        raise RuntimeError(what)

    monkeypatch.setattr(pinned, "pinned_zeros", exhausted)
    with pytest.raises(
        HostMemoryError, match=r"after 0.0 of 2.0 GB .*XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=\d+ before jax"
    ):
        memory.take((1000,), np.uint8)
    memory.close()


def test_another_error_is_not_called_a_lack_of_memory(monkeypatch):
    def broken(shape, dtype):
        raise ValueError("no such memory kind")

    monkeypatch.setattr(pinned, "pinned_zeros", broken)
    with pytest.raises(ValueError, match="no such memory kind"):
        AllocatedMemory(8).take((8,), np.uint8)


def test_free_memory_is_the_least_of_the_systems_and_the_groups(tmp_path, monkeypatch):
    files = {
        "/proc/meminfo": ["MemTotal: 100 kB", "MemAvailable: 50 kB"],
        "/sys/fs/cgroup/memory.max": ["40000"],
        "/sys/fs/cgroup/memory.current": ["30000"],
        "/sys/fs/cgroup/memory.stat": ["anon 7", "inactive_file 2000"],
    }
    monkeypatch.setattr(pinned, "_lines", lambda path: files.get(path, []))
    assert pinned.available_bytes() == 12000
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert pinned.available_bytes() == 50 * 1024
    files.clear()
    assert pinned.available_bytes() == float("inf")


def test_free_memory_of_this_machine_is_known():
    assert 0 < pinned.available_bytes() < 1e16 or not sys.platform.startswith("linux")


@pytest.mark.parametrize("huge", [False, True])
def test_touched_memory(huge, monkeypatch):
    monkeypatch.setattr(pinned, "_TOUCHED_AT_A_TIME", 1 << 22)
    before = resident_bytes()
    memory = pinned.touched((64 << 20) + 5, huge)
    assert resident_bytes() - before > 60 << 20, "its pages are there"
    assert memory.shape == ((64 << 20) + 5,) and memory.dtype == np.uint8 and not memory.any()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("fault", [RuntimeError("no such device type"), None])
def test_memory_that_jax_does_not_take_is_given_back(played, caplog, monkeypatch, fault):
    def refuses(array):
        if fault is not None:
            raise fault
        return jax.numpy.zeros(array._array.shape, jax.numpy.uint8)

    monkeypatch.setattr(jax.dlpack, "from_dlpack", refuses)
    with caplog.at_level("WARNING", logger="host_offload"):
        memory = open_pinned(padded(8), "registered")
    assert isinstance(memory, AllocatedMemory) and not played.registered
    assert ("copied" if fault is None else "no such device type") in caplog.text
    memory.close()


def test_memory_that_is_dropped_is_unregistered_first(played):
    """Pages that are given back while they are registered would stay pinned."""
    memory = open_pinned(padded(8), "registered")
    array = memory.take((8,), np.uint8)
    assert len(played.registered) == 1
    del memory
    gc.collect()
    assert not played.registered
    array.delete()


def test_without_cuda_bindings_jax_allocates(caplog, monkeypatch):
    monkeypatch.setattr(pinned, "_platform", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "host_offload.transport.cuda", None)
    with caplog.at_level("WARNING", logger="host_offload"):
        memory = open_pinned(padded(8), "registered")
    assert isinstance(memory, AllocatedMemory) and "takes cuda-bindings" in caplog.text
    memory.close()


def test_jax_that_copied_would_be_noticed(monkeypatch):
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda array: jax.numpy.zeros(8, jax.numpy.uint8))
    with pytest.raises(RuntimeError, match="copied"):
        pinned.adopt(np.zeros(8, np.uint8))
