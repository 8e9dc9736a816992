"""Missing expert rows from pinned host memory into bank rows, in any storage format, before a product that reads them.

For experts that no kernel of `expert_ffn` reads straight from the pool. `implementation` is "pallas" (compiled for an
NVIDIA GPU), "interpret" (the same kernel in Pallas' interpreter) or "xla" (any platform).
"""

from pallas_kernels.fetch_rows import kernel, ref

__all__ = ["fetch_rows"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def fetch_rows(rows, src, count, banks, pool, *, distinct, implementation):
    """Writes pool row src[u] to bank row rows[u] for every entry u < count[0] with src[u] >= 0.

    Args:
      rows: [>= U] i32, bank row of each entry.
      src: [>= U] i32, pool row of a missing expert, -1 where nothing is to be moved.
      count: [1] i32, number of valid entries.
      banks: {name: [R, ...]}, updated in place when the caller donates them.
      pool: {name: [E, ...]} of the same rows, in pinned host memory.
      distinct: U, the static bound of `count`.
      implementation: see the module.

    Returns:
      The banks.

    Raises:
      ValueError: unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "xla":
        return ref.fetch_rows(rows, src, count, banks, pool)
    return kernel.fetch_rows(rows, src, count, banks, pool, distinct=distinct, interpret=implementation == "interpret")
