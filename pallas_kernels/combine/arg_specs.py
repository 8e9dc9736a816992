"""Sums of released models, for tests and benchmarks."""

from typing import NamedTuple


class ArgSpec(NamedTuple):
    """K experts a token of width D; dtype of the router's weights."""

    model: str
    D: int
    K: int
    weights: str = "bfloat16"


ARG_SPECS = (
    ArgSpec("qwen3-30b-a3b", 2048, 8),
    ArgSpec("mixtral-8x7b", 4096, 2, "float32"),
    ArgSpec("gpt-oss-120b", 2880, 4),
    ArgSpec("dbrx", 6144, 4),
    ArgSpec("jamba", 4096, 2),
)
