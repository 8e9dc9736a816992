"""Expert feed-forward through slots: y = act(x gate_up^T) down^T with the weights of each token's experts.

Two public functions: `expert_ffn_decode` for a few tokens (missing experts are read from pinned host memory, used and
deposited in one pass) and `expert_ffn_round` for one round of a prefill chunk (the next missing experts move while
these are computed). `group_pairs` sorts a chunk's token-expert pairs into the blocks that rounds work on. `ExpertSpec`
says what an expert computes and how its row is stored. `implementation` is

* "pallas": the kernels, compiled for an NVIDIA GPU;
* "interpret": the same kernels in Pallas' interpreter (tests on CPU);
* "xla": plain jax.numpy, any platform, every `ExpertSpec`.
"""

from pallas_kernels.expert_ffn import decode, grouped, ref
from pallas_kernels.expert_ffn.layout import group_pairs
from pallas_kernels.expert_ffn.spec import SILU, ExpertSpec
from pallas_kernels.expert_ffn.staging import Prefix, Staging

__all__ = [
    "IMPLEMENTATIONS",
    "SILU",
    "ExpertSpec",
    "Prefix",
    "Staging",
    "expert_ffn_decode",
    "expert_ffn_round",
    "group_pairs",
]

IMPLEMENTATIONS = ("pallas", "interpret", "xla")


def expert_ffn_decode(
    x, rows, src, deposit, count, banks, pool, *, distinct, implementation, between=None, spec=SILU, fetch="xla",
    staging=None, feeds_kernels=False,
):  # fmt: skip
    """See `decode.expert_ffn_decode` for the arguments; returns y [distinct, B, D] f32 and the banks, and `staging` if
    there is one.

    fetch: how "xla" moves missing rows, an implementation of `pallas_kernels.fetch_rows`; the kernels read them.
    Raises ValueError for an unknown implementation and for a `spec` that the kernels do not serve.
    """
    if implementation == "xla":
        options = {"distinct": distinct, "between": between, "spec": spec, "fetch": fetch, "staging": staging}
        return ref.expert_ffn_decode(x, rows, src, deposit, count, banks, pool, **options)
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
        spec=spec,
        interpret=_interpret(implementation, spec),
        staging=staging,
        feeds_kernels=feeds_kernels,
    )


def expert_ffn_round(x, y, layout, span, banks, *, block_rows, implementation, spec=SILU):
    """See `grouped.expert_ffn_round` for the arguments; returns y [T*K, D]. Raises as `expert_ffn_decode`."""
    if implementation == "xla":
        return ref.expert_ffn_round(x, y, layout, span, banks, block_rows=block_rows, spec=spec)
    return grouped.expert_ffn_round(
        x, y, layout, span, banks, block_rows=block_rows, spec=spec, interpret=_interpret(implementation, spec)
    )


def _interpret(implementation: str, spec: ExpertSpec) -> bool:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation = {implementation!r}: must be one of {', '.join(IMPLEMENTATIONS)}")
    if reason := spec.without_kernel():
        raise ValueError(f"implementation = {implementation!r}: {reason}; use implementation='xla'")
    return implementation == "interpret"
