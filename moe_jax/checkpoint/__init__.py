"""Checkpoints: safetensors reading, hub download, the map from file names to parameters, loading."""

from moe_jax.checkpoint.mapping import ExpertRule, Ignore, Rule

__all__ = ["ExpertRule", "Ignore", "Rule"]
