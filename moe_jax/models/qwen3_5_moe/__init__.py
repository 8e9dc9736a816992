"""Qwen3.5-MoE, the language model."""
