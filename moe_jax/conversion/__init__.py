"""Checkpoints in other formats: experts quantised or decoded, as prepared rows or in Hugging Face layout."""

from moe_jax.conversion.hub_layout import write_hub_layout
from moe_jax.conversion.report import ErrorReport
from moe_jax.conversion.rows import prepare
from moe_jax.conversion.weights import Target

__all__ = ["ErrorReport", "Target", "prepare", "write_hub_layout"]
