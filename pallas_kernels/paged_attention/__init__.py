"""Attention of one new token a sequence to the tokens in its pages: split over the tokens, then merged exactly.

One kernel serves grouped, multi-query and multi-head attention, and multi-head latent attention (MLA) with absorbed
weights, whose latents are keys and values at once: scores are a sum over *parts*, each a query and a key pool of its
own width. `implementation` is "pallas" (compiled for an NVIDIA GPU), "interpret" or "xla".
"""

from pallas_kernels.paged_attention import kernel, ref

__all__ = ["IMPLEMENTATIONS", "paged_decode_attention"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def paged_decode_attention(
    queries, keys, values, page_table, lengths, *, scale, window=None, sinks=None, softcap=None,
    feeds_kernels=False, implementation
):  # fmt: skip
    """out[b, n] = softmax_s(cap(scale * sum_i queries[i][b, n] . keys[i][s, g])) values[s, g], over stored tokens s.

    The query of sequence b is at position lengths[b] - 1; it sees token s iff s < lengths[b] and, with a window w,
    lengths[b] - 1 - s < w. Query head n reads key head g = n // (N / G). cap(z) = softcap * tanh(z / softcap), or z.

    Args:
      queries: tuple of [B, N, H_i], one a part.
      keys: tuple of pools [pages, P, G, H_i]; P is a power of two, compiled at least 16.
      values: pool [pages, P, G, Hv]; may be one of `keys`.
      page_table: [B, n] i32, page of tokens iP .. iP + P - 1 of a sequence.
      lengths: [B] i32, stored tokens, that of the query included. 0: the row's output is zeros.
      scale, window, softcap: static numbers; None: no window, no cap.
      sinks: [N] or None, the score of a further key without a value in each head's softmax.
      feeds_kernels: see `_compat.call`.
      implementation: see the module.

    Returns:
      [B, N, Hv] in the dtype of the queries.

    Raises:
      ValueError: unknown implementation, or heads that do not divide.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    N, G = queries[0].shape[1], values.shape[2]
    if N % G:
        raise ValueError(f"{N} query heads: must be a multiple of the {G} key heads")
    options = dict(scale=scale, window=window, softcap=softcap)
    if implementation == "xla":
        return ref.paged_decode_attention(queries, keys, values, page_table, lengths, sinks, **options)
    options |= dict(feeds_kernels=feeds_kernels, interpret=implementation == "interpret")
    return kernel.paged_decode_attention(queries, keys, values, page_table, lengths, sinks, **options)
