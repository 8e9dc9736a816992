"""Process-wide settings of jax that must stand before its backend starts. Applied on `import moe_jax`.

A setting that the user made (environment variable or `jax.config`) is never changed.
"""

import os
from pathlib import Path

import jax

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
DEVICE_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# Shares of the machine's memory that may be pinned, and of the device's that jax may use, unless the user says so.
PINNED_SHARE = 0.9
DEVICE_SHARE = 0.92


def host_memory_bytes() -> int:
    """Physical memory of the machine; 0 when the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def configure() -> dict[str, str]:
    """Sets defaults of pinned host memory (90 % of RAM; jax: 64 GB), device memory (92 %; jax: 75 %) and compile cache.

    Returns what was set.
    """
    chosen = {}
    memory = host_memory_bytes()
    if memory:
        chosen[HOST_LIMIT] = str(max(64, int(memory * PINNED_SHARE) >> 30))
    chosen[DEVICE_FRACTION] = str(DEVICE_SHARE)
    chosen = {name: value for name, value in chosen.items() if name not in os.environ}
    os.environ.update(chosen)
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moe_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        chosen["jax_compilation_cache_dir"] = str(cache)
    return chosen
