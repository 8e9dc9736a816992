"""Missing expert rows from pinned host memory into bank rows, in any storage format, before a product that reads them.

For experts that no kernel of `expert_ffn` reads straight from the pool, and for the parts of rows that are brought
ahead of need (`expert_ffn/staging.py`). `implementation` is "pallas" (compiled for an NVIDIA GPU), "interpret" (the
same kernel in Pallas' interpreter) or "xla" (any platform).
"""

from pallas_kernels.fetch_rows import kernel, ref

__all__ = ["fetch_rows"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def fetch_rows(rows, src, count, banks, pool, *, distinct, implementation, regions=None):
    """Writes pool row src[u] to bank row rows[u] for every entry u < count[0] with src[u] >= 0.

    Args:
      rows: [>= U] i32, bank row of each entry.
      src: [>= U] i32, pool row of a missing expert, -1 where nothing is to be moved.
      count: [1] i32, number of valid entries.
      banks: {name: [R, ...]}, updated in place when the caller donates them.
      pool: {name: [E, ...]} of the same rows, in pinned host memory.
      distinct: U, the static bound of `count`.
      implementation: see the module.
      regions: {name: ((start, stop), ...)}, what of a row is written, counted along the first axis of the row tensor;
        the other bytes of the bank's row stay. None: whole rows.

    Returns:
      The banks.

    Raises:
      ValueError: unknown implementation; a region that is not within its tensor.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if regions is not None:
        for name, spans in regions.items():
            size = banks[name].shape[1]
            if wrong := [span for span in spans if not 0 <= span[0] < span[1] <= size]:
                raise ValueError(f"regions[{name!r}] = {wrong}: must lie within the {size} rows of the tensor")
    if implementation == "xla":
        return ref.fetch_rows(rows, src, count, banks, pool, regions=regions)
    interpret = implementation == "interpret"
    return kernel.fetch_rows(rows, src, count, banks, pool, distinct=distinct, interpret=interpret, regions=regions)
