"""Checkpoints: safetensors reading, hub download, the map from file names to parameters, loading."""

from moe_jax.checkpoint.bin_convert import convert_bin
from moe_jax.checkpoint.hub import resolve
from moe_jax.checkpoint.loading import (
    PackedMatrix,
    conversions,
    load_params,
    load_prepared_params,
    packed_matrices,
)
from moe_jax.checkpoint.logical import LogicalTensor
from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule, WeightMap, map_checkpoint
from moe_jax.checkpoint.prepared import PreparedCheckpoint, open_checkpoint
from moe_jax.checkpoint.quantization import Quantization
from moe_jax.checkpoint.reader import Checkpoint, TensorInfo

__all__ = [
    "Checkpoint",
    "ExpertRule",
    "Ignore",
    "LogicalTensor",
    "PackedMatrix",
    "PreparedCheckpoint",
    "Quantization",
    "Rule",
    "TensorInfo",
    "WeightMap",
    "conversions",
    "convert_bin",
    "load_params",
    "load_prepared_params",
    "map_checkpoint",
    "open_checkpoint",
    "packed_matrices",
    "resolve",
]
