"""The pinned pool: filled by threads through views of its own memory, freed at once, clear when memory runs out."""

import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from host_offload import pool as pool_module
from host_offload.pinned import AllocatedMemory, HostMemoryError, host_view
from host_offload.pool import ExpertPool
from host_offload.store import RowSpec

SPEC = RowSpec(L=2, E=3, tensors={"a": ((2, 4), np.dtype(np.float32)), "b": ((5,), np.dtype(ml_dtypes.bfloat16))})


class Counting:
    """A row source whose rows say who they are; remembers the threads that read and may fail."""

    def __init__(self, fail_at=None):
        self.threads, self.fail_at = set(), fail_at

    def read(self, layer, expert, name, out):
        self.threads.add(threading.get_ident())
        if (layer, expert) == self.fail_at:
            raise OSError(f"cannot read layer {layer} expert {expert}")
        out[...] = value(layer, expert, name)


def value(layer, expert, name):
    return 100 * layer + 10 * expert + (name == "b")


@pytest.fixture
def pool():
    pool = ExpertPool(SPEC)
    yield pool
    pool.close()


def test_slabs_are_pinned_and_start_at_zero(pool):
    assert len(pool.slabs) == SPEC.L
    for layer in pool.slabs:
        for name, (shape, dtype) in SPEC.tensors.items():
            slab = layer[name]
            assert slab.shape == (SPEC.E, *shape) and slab.dtype == dtype
            assert slab.sharding.memory_kind == "pinned_host"
            assert not host_view(slab).astype(np.float32).any()
    assert pool.nbytes == SPEC.L * SPEC.E * (2 * 4 * 4 + 5 * 2)


@pytest.mark.parametrize("threads", (None, 1, 4))
def test_fill_writes_every_row_where_the_device_reads_it(pool, threads):
    source = Counting()
    assert pool.fill(source, threads, progress=False) >= 0
    for layer in range(SPEC.L):
        for name in SPEC.tensors:
            on_device = np.asarray(jax.device_put(pool.slabs[layer][name], jax.memory.Space.Device))
            for expert in range(SPEC.E):
                np.testing.assert_array_equal(on_device[expert].astype(np.float32), value(layer, expert, name))
                np.testing.assert_array_equal(pool.view(layer, name)[expert], on_device[expert])
    assert threading.get_ident() not in source.threads
    assert len(source.threads) <= (threads or pool_module.MAX_THREADS)


def test_address_is_that_of_the_row(pool):
    for name in SPEC.tensors:
        for expert in range(SPEC.E):
            assert pool.address(1, name, expert) == pool.view(1, name)[expert].ctypes.data


def test_the_view_writes_through(pool):
    pool.view(0, "a")[1, 1, 2] = 7
    assert np.asarray(pool.slabs[0]["a"])[1, 1, 2] == 7


def test_a_failing_read_stops_the_fill_and_is_raised(pool):
    with pytest.raises(OSError, match="layer 1 expert 0"):
        pool.fill(Counting(fail_at=(1, 0)), 2, progress=False)
    pool.fill(Counting(), 2, progress=False)  # and can be done again


def test_close_frees_every_slab_and_may_be_repeated(pool):
    slabs = [slab for layer in pool.slabs for slab in layer.values()]
    pool.close()
    assert all(slab.is_deleted() for slab in slabs)
    assert pool.slabs == []
    pool.close()


def test_a_pool_that_does_not_fit_leaves_nothing(monkeypatch):
    opened = []

    class Short(AllocatedMemory):
        def take(self, shape, dtype):
            if len(self._arrays) == 3:
                raise HostMemoryError("no more")
            return super().take(shape, dtype)

        def close(self):
            opened.append(self)
            super().close()

    monkeypatch.setattr(pool_module, "open_pinned", lambda nbytes, way: Short(nbytes))
    with pytest.raises(HostMemoryError, match="no more"):
        ExpertPool(SPEC)
    assert len(opened) == 1 and not opened[0]._arrays
