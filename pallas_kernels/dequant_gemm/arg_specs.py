"""Dense matrices of released models that are stored packed, for tests and benchmarks.

DeepSeek-V3 and V4 have FP8 projections; Mixtral and Qwen3 are as their GPTQ and AWQ conversions store them, matrices of
equal input stacked as the models do. gpt-oss keeps its dense weights in bfloat16: its sizes stand for MXFP4. Heads are
bfloat16 in releases; that of V3 is also here as FP8.
"""

from typing import NamedTuple

from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format


class ArgSpec(NamedTuple):
    """W [N, D] of `matrix` in `model`."""

    model: str
    matrix: str
    N: int
    D: int
    form: Format


ARG_SPECS = (
    ArgSpec("deepseek-v3", "kv_a", 576, 7168, FP8()),
    ArgSpec("deepseek-v3", "q_b", 24576, 1536, FP8()),
    ArgSpec("deepseek-v3", "o", 7168, 16384, FP8()),
    ArgSpec("deepseek-v3", "shared_gate_up", 4096, 7168, FP8()),
    ArgSpec("deepseek-v3", "shared_down", 7168, 2048, FP8()),
    ArgSpec("deepseek-v3", "lm_head", 129280, 7168, FP8()),
    ArgSpec("deepseek-v3", "lm_head", 129280, 7168, Dense()),
    ArgSpec("deepseek-v4-flash", "q_b", 32768, 1024, FP8()),
    ArgSpec("deepseek-v4-flash", "o_b", 4096, 8192, FP8()),
    ArgSpec("deepseek-v4-flash", "shared_gate_up", 4096, 4096, FP8()),
    ArgSpec("mixtral-8x7b", "qkv", 6144, 4096, INT4(128)),
    ArgSpec("mixtral-8x7b", "qkv", 6144, 4096, INT4(128, zeros=True)),
    ArgSpec("mixtral-8x7b", "o", 4096, 4096, INT4(128, order=True)),
    ArgSpec("qwen3-30b-a3b", "qkv", 5120, 2048, INT4(128)),
    ArgSpec("qwen3-30b-a3b", "qkv", 5120, 2048, INT4(32, zeros=True)),
    ArgSpec("qwen3-30b-a3b", "o", 2048, 4096, INT4(64)),
    ArgSpec("qwen3-30b-a3b", "lm_head", 151936, 2048, Dense()),
    ArgSpec("gpt-oss-120b", "qkv", 5120, 2880, MXFP4()),
    ArgSpec("gpt-oss-120b", "lm_head", 201088, 2880, MXFP4()),
)

ROWS = (1, 8, 64, 4096)
