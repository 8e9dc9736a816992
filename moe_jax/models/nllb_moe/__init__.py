"""NLLB-MoE."""
