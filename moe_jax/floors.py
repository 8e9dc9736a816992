"""The least time that a decode step can take: what must cross the link, what must be read from device memory.

    link floor = bytes moved / link rate
    HBM floor  = (dense bytes + distinct experts used * row bytes + KV bytes) / memory rate
    efficiency = (link floor + HBM floor) / measured time

All three are per decode step, which is one token of every live sequence; with one sequence, per token. Experts used
count hits and misses alike, since a moved row is read as well. The two floors are added, as docs/glossary.md defines
efficiency: an engine that computes while rows are in flight could come closer to the larger of the two. Rates are of
large transfers, measured here or given.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.config import real
from moe_jax.models.config import DecoderConfig

# Large enough that starting a transfer does not count.
TRANSFER_BYTES = {"gpu": 512 << 20, "cpu": 64 << 20}
# Reductions chained in one program, so that its launch is a small part of the time.
READS = {"gpu": 16, "cpu": 2}
REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Rates of a machine in GB/s (10^9 bytes a second), each with how it was obtained."""

    link_gbps: float
    memory_gbps: float
    link_source: str
    memory_source: str


@dataclass(frozen=True)
class Floor:
    """Least milliseconds of a decode step: `link_ms` moves rows to the device, `memory_ms` reads device memory."""

    link_ms: float
    memory_ms: float

    @property
    def total_ms(self) -> float:
        """Both, one after the other."""
        return self.link_ms + self.memory_ms

    def efficiency(self, measured_ms: float) -> float:
        """Share of `measured_ms` that the floors explain; 1 is as fast as the machine allows without overlap."""
        return self.total_ms / measured_ms


def find_ceilings(link_gbps: float | None = None, memory_gbps: float | None = None) -> Ceilings:
    """The rates given, and measured ones for those that are None (about a second, half a GB of device memory).

    Raises ConfigError for a rate that is not a positive number.
    """
    allowed = "a positive rate in GB/s"
    platform = jax.devices()[0].platform
    if link_gbps is None:
        link = measure_link()
        link_source = "measured, pinned memory to device" if platform == "gpu" else "measured, memcpy (no GPU)"
    else:
        link, link_source = real("link_gbps", link_gbps, allowed, lambda v: v > 0), "given"
    if memory_gbps is None:
        memory = measure_memory()
        memory_source = "measured, device memory" if platform == "gpu" else "measured, host memory"
    else:
        memory, memory_source = real("hbm_gbps", memory_gbps, allowed, lambda v: v > 0), "given"
    return Ceilings(link, memory, link_source, memory_source)


def measure_link(nbytes: int | None = None) -> float:
    """GB/s of a large copy from pinned memory to the device by the copy engine; on CPU, of a memcpy by one thread."""
    device = jax.devices()[0]
    nbytes = nbytes or TRANSFER_BYTES[device.platform]
    if device.platform == "cpu":
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        return nbytes / _fastest(lambda: np.copyto(target, source)) / 1e9
    from host_offload.transport.cuda import copy_rate  # needs cuda-bindings, which only GPU installs have

    return copy_rate(nbytes) / 1e9


def measure_memory(nbytes: int | None = None) -> float:
    """GB/s at which the device reads its own memory, by a reduction over one large array."""
    platform = jax.devices()[0].platform
    nbytes = nbytes or TRANSFER_BYTES[platform]
    reads = READS[platform]

    @jax.jit
    def read(array):
        total = jnp.zeros((), array.dtype)
        for _ in range(reads):  # each pass depends on the one before, so that none is left out or merged
            total = total + jnp.max(jnp.minimum(array, total))
        return total

    array = jnp.ones(nbytes // 4, jnp.float32)
    try:
        return reads * nbytes / _fastest(lambda: read(array).block_until_ready()) / 1e9
    finally:
        array.delete()


def _fastest(run) -> float:
    """Seconds of the fastest of a few calls after one that does not count."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def dense_bytes_read(cfg: DecoderConfig, dtype: Any, dense_bytes: int) -> int:
    """Bytes of dense weights that a decode step reads: `dense_bytes` less an embedding, of which it only looks up rows.

    A tied embedding is the head as well, and a head is read whole.
    """
    embedding = 0 if cfg.tie_word_embeddings else cfg.vocab_size * cfg.hidden_size * jnp.dtype(dtype).itemsize
    return dense_bytes - embedding


def kv_tokens_read(prompt_tokens: Sequence[int], new_tokens: Sequence[int], window: int | None = None) -> int:
    """Cached tokens that decoding reads in all.

    For a sequence with P prompt tokens and n new ones it is the sum of P + i for i = 1..n-1: the first new token comes
    from prefill, and the last one is never fed. `window` bounds what a token sees.
    """
    total = 0
    for prompt, new in zip(prompt_tokens, new_tokens, strict=True):
        lengths = np.arange(prompt + 1, prompt + max(new, 1), dtype=np.int64)
        total += int((lengths if window is None else np.minimum(lengths, window)).sum())
    return total


def decode_floor(
    decode: Mapping[str, Any], ceilings: Ceilings, *, dense_bytes: int, row_bytes: int, kv_bytes: float
) -> Floor | None:
    """The floor of the mean decode step of a run.

    Args:
        decode: the `decode` part of `MoE.stats()`: `steps`, `accesses` (distinct experts used) and `bytes_moved`.
        dense_bytes: dense weights that a step reads, see `dense_bytes_read`.
        row_bytes: bytes of one expert.
        kv_bytes: KV cache read over all the steps, see `kv_tokens_read`.

    Returns:
        None if nothing was decoded.
    """
    steps = decode["steps"]
    if not steps:
        return None
    read = dense_bytes + (decode["accesses"] * row_bytes + kv_bytes) / steps
    return Floor(
        link_ms=decode["bytes_moved"] / steps / ceilings.link_gbps / 1e6,
        memory_ms=read / ceilings.memory_gbps / 1e6,
    )
