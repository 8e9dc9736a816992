"""Checkpoints in other formats: experts quantised or decoded, as prepared rows."""

from moe_jax.conversion.report import ErrorReport
from moe_jax.conversion.rows import prepare
from moe_jax.conversion.weights import Target

__all__ = ["ErrorReport", "Target", "prepare"]
