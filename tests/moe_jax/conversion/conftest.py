"""What a checkpoint loads as, without compiling a model."""

import jax
import numpy as np
import pytest

from moe_jax.checkpoint import open_checkpoint
from moe_jax.config import OffloadConfig
from moe_jax.engine.loading import read_parts


def _opened(directory, **config):
    with open_checkpoint(directory) as files:
        parts = read_parts(files, OffloadConfig.parse({"progress": False} | config), False)
        found = {}
        for layer in range(parts.spec.L):
            for e in range(parts.spec.E):
                row = {name: np.empty(shape, dtype) for name, (shape, dtype) in parts.spec.tensors.items()}
                for name, out in row.items():
                    parts.store.read(layer, e, name, out)
                found[layer, e] = row
    return parts, found


@pytest.fixture(scope="session")
def opened():
    """`opened(directory, **config)`: (`Parts`, {(layer, expert): row}) of a checkpoint."""
    return _opened


@pytest.fixture(scope="session")
def assert_same():
    """`assert_same(a, b)` of two results of `opened`: rows, parameters and what describes them, to the bit."""

    def check(ours, theirs):
        (parts, rows), (others, other_rows) = ours, theirs
        assert parts.spec == others.spec and parts.experts == others.experts and parts.dtype == others.dtype
        for place, row in rows.items():
            assert {n: w.tobytes() for n, w in row.items()} == {n: w.tobytes() for n, w in other_rows[place].items()}
        leaves = zip(jax.tree.leaves_with_path(parts.params), jax.tree.leaves_with_path(others.params), strict=True)
        for (path, leaf), (other_path, other) in leaves:
            assert path == other_path and leaf.dtype == other.dtype and leaf.tobytes() == other.tobytes(), path

    return check
