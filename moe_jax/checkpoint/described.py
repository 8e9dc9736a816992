"""Expert rows as config.json alone describes them, for plans that are made before there are files.

Files decide what is packed and how; where they are there, `map_checkpoint` is exact and this is not needed. Releases of
the supported families hold what their config.json says.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from host_offload.store import RowSpec
from moe_jax.checkpoint.quantization import WHOLE_ROW, Quantization
from moe_jax.errors import CheckpointError
from pallas_kernels.expert_ffn import ExpertSpec
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format


def described_experts(config: Mapping[str, Any], cfg: Any) -> ExpertSpec:
    """What an expert of `cfg`, the model of `config` (config.json), computes, with the formats that are announced.

    Raises CheckpointError as `Quantization.from_hf`.
    """
    spec, quantization = cfg.expert_spec(), Quantization.from_hf(config)
    if quantization is None or quantization.method == "mxfp4":  # the family's own format is in its spec
        return spec
    fp4 = config.get("expert_dtype") == "fp4"  # DeepSeek-V4: experts apart from the FP8 of the rest
    return dataclasses.replace(
        spec,
        gate_up=MXFP4() if fp4 else _format(quantization, cfg.hidden_size),
        down=MXFP4() if fp4 else _format(quantization, cfg.expert_width),
    )


def described_rows(config: Mapping[str, Any], cfg: Any, stored: np.dtype, compute: np.dtype) -> RowSpec:
    """The rows of these experts.

    Args:
        stored: dtype of the files' floating tensors. compute: the compute dtype, which a row has where it is narrower.
            Scales of packed weights, where their format does not fix it, are 16-bit floats, as in releases.

    Raises CheckpointError, also for widths that the announced format cannot hold.
    """
    spec = described_experts(config, cfg)
    try:
        shapes = spec.row_tensors(cfg.expert_width, cfg.hidden_size)
    except ValueError as error:
        raise CheckpointError(f"config.json: quantization_config does not fit the experts: {error}") from error
    scale = stored if stored.itemsize == 2 else np.dtype(np.float16)
    plain = compute if compute.itemsize < stored.itemsize else stored
    packed = {name for name in ("gate_up", "down") if not isinstance(getattr(spec, name), Dense)}
    parts = {name + suffix for name in packed for suffix in getattr(spec, name).suffixes}
    tensors = {name: (shape, fixed or (scale if name in parts else plain)) for name, (shape, fixed) in shapes.items()}
    return RowSpec(tensors, L=len(cfg.moe_layers), E=cfg.num_experts)


def _format(quantization: Quantization, width: int) -> Format:
    """The format of a matrix with rows of `width` values."""
    if quantization.method == "fp8":
        return FP8(quantization.size)
    group = width if quantization.size == WHOLE_ROW else quantization.size
    zeros = quantization.zero_points or quantization.method == "awq"
    return INT4(group, zeros=zeros, order=quantization.column_order)
