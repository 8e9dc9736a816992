"""Heads of released models, for tests and benchmarks."""

from typing import NamedTuple


class ArgSpec(NamedTuple):
    """N query heads, G key heads of width H, the first `rotary` components rotated; the kind of norm, over all heads or
    each; query heads every `step` rows; clip."""

    model: str
    N: int
    G: int
    H: int
    rotary: int
    norm: str | None = None
    over_all: bool = False
    step: int = 1
    clip: float | None = None


ARG_SPECS = (
    ArgSpec("qwen3-30b-a3b", 32, 4, 128, 128, "narrow"),
    ArgSpec("mixtral-8x7b", 32, 8, 128, 128),
    ArgSpec("olmoe", 16, 16, 128, 128, "narrow", over_all=True),
    ArgSpec("gpt-oss-120b", 64, 8, 64, 64),
    ArgSpec("dbrx", 48, 8, 128, 128, clip=8.0),
    ArgSpec("jamba", 32, 8, 128, 0),
    ArgSpec("qwen3.5-35b-a3b", 16, 2, 256, 64, "zero_centred", step=2),
)
