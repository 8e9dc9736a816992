"""Expert feed-forward through slots: y = (silu(x gate^T) * (x up^T)) down^T with the weights of each token's experts.

Two public functions: `expert_ffn_decode` for a few tokens (missing experts are read from pinned host memory, used and
deposited in one pass) and `expert_ffn_round` for one round of a prefill chunk (the next missing experts move while
these are computed). `group_pairs` sorts a chunk's token-expert pairs into the blocks that rounds work on.
`implementation` is

* "pallas": the kernels, compiled for an NVIDIA GPU;
* "interpret": the same kernels in Pallas' interpreter (tests on CPU);
* "xla": plain jax.numpy, any platform.
"""

from pallas_kernels.expert_ffn import decode, grouped, ref
from pallas_kernels.expert_ffn.layout import group_pairs

__all__ = ["IMPLEMENTATIONS", "expert_ffn_decode", "expert_ffn_round", "group_pairs"]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def expert_ffn_decode(x, rows, src, deposit, count, banks, pool, *, distinct, implementation, between=None):
    """See `decode.expert_ffn_decode` for the arguments; returns y [distinct, B, D] f32 and the banks."""
    if implementation == "xla":
        return ref.expert_ffn_decode(x, rows, src, deposit, count, banks, pool, distinct=distinct, between=between)
    return decode.expert_ffn_decode(
        x,
        rows,
        src,
        deposit,
        count,
        banks,
        pool,
        distinct=distinct,
        between=between,
        interpret=_interpret(implementation),
    )


def expert_ffn_round(x, y, layout, span, banks, *, block_rows, implementation):
    """See `grouped.expert_ffn_round` for the arguments; returns y [T*K, D]."""
    if implementation == "xla":
        return ref.expert_ffn_round(x, y, layout, span, banks, block_rows=block_rows)
    return grouped.expert_ffn_round(
        x, y, layout, span, banks, block_rows=block_rows, interpret=_interpret(implementation)
    )


def _interpret(implementation: str) -> bool:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    return implementation == "interpret"
