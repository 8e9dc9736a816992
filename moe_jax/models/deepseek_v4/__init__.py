"""DeepSeek-V4."""
