"""The demo model that travels with the package."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Directory of the bundled demo model: a Qwen3-MoE checkpoint of 15 M parameters in Hugging Face layout (30 MB).

    What it was trained on and what it is good for stands in the README.md of that directory.
    """
    return Path(__file__).resolve().parent / "demo_model"
