"""What stands between the projection and attention for one new token a sequence, in one launch: norm, clip, rotary
embedding, and the write of keys and values to their pages.

`implementation` is "pallas" (compiled for an NVIDIA GPU), "interpret" or "xla".
"""

from pallas_kernels.turn_heads import kernel, ref
from pallas_kernels.turn_heads.spec import HeadNorm

__all__ = ["IMPLEMENTATIONS", "HeadNorm", "turn_heads"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def turn_heads(
    heads, keys, values, page_table, positions, live, cos, sin, *, query_heads, step=1, norm=None, q_weight=None,
    k_weight=None, clip=None, feeds_kernels=False, implementation,
):  # fmt: skip
    """Query heads ready for attention, and the pools with the new token of each sequence in its place.

    In this order: norm of queries and keys, clip of all three to [-clip, clip], rotation of queries and keys in halves
    layout (component i of the first 2 R together with i + R), in float32 and rounded to the dtype of `heads` after norm
    and after rotation.

    Args:
      heads: [B, M, H]; the N query heads are rows 0, step, 2 step, ...; the last 2 G rows are G keys, then G values.
      keys, values: pools [pages, P, G, H], donated by the caller and updated in place.
      page_table: [B, n] i32, page of tokens iP .. iP + P - 1 of a sequence; positions: [B] i32, of the new token; live:
        [B] i32, 0 for a row that does not count: its token goes to page 0, which belongs to nobody.
      cos, sin: [B, R] rotary tables of the positions with 2 R <= H, or None: nothing is rotated.
      query_heads, step: static N, and rows a query head.
      norm: `HeadNorm` with q_weight, k_weight ([H] each, [N H] and [G H] over all heads), or None.
      clip: static number or None.
      feeds_kernels: see `_compat.call`.
      implementation: see the module.

    Returns:
      (q [B, N, H] in the dtype of `heads`, keys, values).

    Raises:
      ValueError: unknown implementation, shapes that do not fit, or weights without norm and the reverse.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    B, M, H = heads.shape
    G = keys.shape[2]
    if M != query_heads * step + 2 * G or keys.shape[3] != H or values.shape != keys.shape:
        raise ValueError(
            f"heads {heads.shape}, pools {keys.shape} and {values.shape}: must be [B, {query_heads} * {step} + 2 G, H] "
            "and two of [pages, P, G, H]"
        )
    if (cos is None) != (sin is None) or (cos is not None and (cos.shape != sin.shape or 2 * cos.shape[-1] > H)):
        raise ValueError(
            f"cos {getattr(cos, 'shape', None)}, sin {getattr(sin, 'shape', None)}: must be two [B, <= H / 2]"
        )
    every = norm is not None and norm.over_all
    for name, value, count in (("q_weight", q_weight, query_heads), ("k_weight", k_weight, G)):
        wanted = None if norm is None else (count * H if every else H,)
        if (None if value is None else value.shape) != wanted:
            raise ValueError(f"{name} {getattr(value, 'shape', None)}: must be {wanted}")
    options = dict(query_heads=query_heads, step=step, norm=norm, q_weight=q_weight, k_weight=k_weight, clip=clip)
    arrays = heads, keys, values, page_table, positions, live, cos, sin
    if implementation == "xla":
        return ref.turn_heads(*arrays, **options)
    interpret = implementation == "interpret"
    return kernel.turn_heads(*arrays, **options, feeds_kernels=feeds_kernels, interpret=interpret)
