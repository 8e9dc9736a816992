"""Weight table of DeepSeek-V2 and V2-Lite: experts one by one (hub) or stacked."""

from moe_jax.models.mla import MLA_RULES

WEIGHT_TABLE = MLA_RULES
