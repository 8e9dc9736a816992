"""Mixture-of-Experts models in JAX with experts offloaded to pinned host memory.

Example::

    from moe_jax import MoE

    with MoE("path/or/hub-id", {"cache_rate": 0.25}) as moe:
        print(moe.generate("Once upon a time", max_new_tokens=50))
"""

from moe_jax import runtime

runtime.configure()  # before anything starts jax's backend

from moe_jax._version import __version__  # noqa: E402
from moe_jax.api import MoE  # noqa: E402
from moe_jax.config import OffloadConfig  # noqa: E402
from moe_jax.demo import demo_model_path  # noqa: E402
from moe_jax.generation.sampling import SamplingParams  # noqa: E402

__all__ = ["MoE", "OffloadConfig", "SamplingParams", "__version__", "demo_model_path"]
