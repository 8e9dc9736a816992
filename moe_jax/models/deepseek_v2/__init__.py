"""DeepSeek-V2 and DeepSeek-V2-Lite."""
