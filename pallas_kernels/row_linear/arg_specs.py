"""Linear layers of one row in released models, for tests and benchmarks."""

from typing import NamedTuple


class ArgSpec(NamedTuple):
    """`matrix` [N, D] of `model`: the kind of norm before it (None: none), and what it has beside the product."""

    model: str
    matrix: str
    N: int
    D: int
    norm: str | None = None
    bias: bool = False
    residual: bool = False
    gated: bool = False


ARG_SPECS = (
    ArgSpec("qwen3-30b-a3b", "qkv", 5120, 2048, "narrow"),
    ArgSpec("qwen3-30b-a3b", "out", 2048, 4096, residual=True),
    ArgSpec("qwen3-30b-a3b", "router", 128, 2048, "narrow"),
    ArgSpec("mixtral-8x7b", "qkv", 6144, 4096, "narrow"),
    ArgSpec("mixtral-8x7b", "out", 4096, 4096, residual=True),
    ArgSpec("mixtral-8x7b", "router", 8, 4096, "narrow"),
    ArgSpec("gpt-oss-120b", "qkv", 5120, 2880, "wide", bias=True),
    ArgSpec("gpt-oss-120b", "out", 2880, 4096, bias=True, residual=True),
    ArgSpec("gpt-oss-120b", "router", 128, 2880, "wide", bias=True),
    ArgSpec("deepseek-v2-lite", "qkv", 3648, 2048, "narrow"),
    ArgSpec("deepseek-v2-lite", "mlp gate_up", 21888, 2048, "narrow", gated=True),
    ArgSpec("deepseek-v2-lite", "mlp down", 2048, 10944),
    ArgSpec("deepseek-v3", "q_up", 24576, 1536),
    ArgSpec("deepseek-v3", "mlp gate_up", 36864, 7168, "narrow", gated=True),
    ArgSpec("deepseek-v3", "mlp down", 7168, 18432),
    ArgSpec("qwen3.5-35b-a3b", "in_proj", 12352, 2048, "zero_centred"),
    ArgSpec("qwen3.5-35b-a3b", "shared gate_up", 1024, 2048, gated=True),
    ArgSpec("qwen3.5-35b-a3b", "shared gate", 1, 2048),
)
