"""Staging: the first part of a few missing rows, brought from pinned memory before their event ("prefix").

A program of the decode kernels computes one block of output rows of one expert, so the first blocks of a missing expert
can come from a staging row while the others come from the pool, with the same arithmetic on the same bytes. The prefix
is therefore counted in output rows. The down projection's rows go first: its kernel runs last, so they have the longest
time to arrive, and while they are all of the prefix the gate and up kernel waits for nothing.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from pallas_kernels._compat import cdiv


@dataclass(frozen=True)
class Prefix:
    """How much of a row is staged: the first output rows of each matrix that `gate_up` and `down` stack, 0 for none."""

    gate_up: int
    down: int


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "rows"], meta_fields=["prefix"])
@dataclass(frozen=True)
class Staging:
    """Staging rows, and whose they are.

    ids: [P] i32, the pool row whose prefix each staging row holds, -1 for none; no row twice. rows: {name: [P, *row
    shape]} of the tensors that `regions` names, whole in shape and filled in these regions alone. prefix: static.
    """

    ids: jax.Array
    rows: dict[str, jax.Array]
    prefix: Prefix


def regions(prefix: Prefix, spec, shapes) -> dict[str, tuple[tuple[int, int], ...]]:
    """{name: ((start, stop), ...)}, what `prefix` covers of each row tensor, counted along its first axis.

    shapes: {name: row shape} of an expert of `spec`. Tensors of which nothing is staged are left out. Scales that serve
    several output rows are covered if they serve one of the prefix.
    """
    out = {}
    for tensor in ("gate_up", "down"):
        rows = getattr(prefix, tensor)
        if not rows:
            continue
        sizes = spec.outs(tensor, shapes[tensor][0])
        for name in spec.parts(tensor):
            each = shapes[name][0] // len(sizes)  # entries a matrix
            stop = cdiv(rows * each, sizes[0])
            spans = [(matrix * each, matrix * each + stop) for matrix in range(len(sizes))]
            out[name] = ((0, shapes[name][0]),) if stop == each else tuple(spans)
    return out


def prefix_bytes(prefix: Prefix, spec, tensors) -> int:
    """Bytes that `prefix` covers of a row; tensors: {name: (row shape, dtype)}."""
    covered = regions(prefix, spec, {name: shape for name, (shape, _) in tensors.items()})
    total = 0
    for name, spans in covered.items():
        shape, dtype = tensors[name]
        entry = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(dtype).itemsize
        total += sum(stop - start for start, stop in spans) * entry
    return total


def choose_prefix(spec, tensors, budget: int, blocks) -> Prefix:
    """The longest prefix of whole blocks in `budget` bytes: of `down` first, of `gate_up` once all of that is covered.

    tensors: {name: (row shape, dtype)}. blocks: {"gate_up", "down": output rows of a block, of each matrix}. A prefix
    of no row is possible.
    """
    sizes = {tensor: spec.outs(tensor, tensors[tensor][0][0])[0] for tensor in ("gate_up", "down")}

    def longest(make, tensor):
        counts = range(sizes[tensor], 0, -blocks[tensor])
        return next((n for n in counts if prefix_bytes(make(n), spec, tensors) <= budget), 0)

    down = longest(lambda n: Prefix(0, n), "down")
    if down < sizes["down"]:
        return Prefix(0, down)
    return Prefix(longest(lambda n: Prefix(n, down), "gate_up"), down)


def staging_row(ids, src, P: int):
    """Within a kernel: the staging row that holds the prefix of pool row `src`, -1 if none does; ids: ref [P]."""
    at = np.int32(-1)
    for p in range(P):
        at = jax.numpy.where(ids[p] == src, np.int32(p), at)
    return at
