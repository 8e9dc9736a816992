"""What the engine counted: per call (`last`) and since the last reset (`total`)."""

from dataclasses import dataclass, field

import numpy as np

from host_offload.disk_tier import HOST_HITS, HOST_MISSES, ROWS_READ
from host_offload.slots import BYPASSES, EVICTIONS, HITS, MISSES

# Columns of the counters: the cache's, and from this one on those of a disk tier.
DISK = 4


@dataclass
class PhaseStats:
    """Prefill or decode.

    counters [L, 7]: hits, misses, bypasses, evictions by MoE layer, and `DiskTier.take_counters`, zeros without a tier.
    lookups: rows x K before deduplication, all layers.
    """

    layers: int
    row_bytes: int
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    lookups: int = 0
    counters: np.ndarray = field(default=None)

    def __post_init__(self):
        if self.counters is None:
            self.counters = np.zeros((self.layers, DISK + 3), np.int64)

    def add(self, counters, tokens, steps, seconds, lookups):
        """Books one jitted call; counters [L, 4], or [L, 7] with a disk tier."""
        self.counters[:, : counters.shape[1]] += counters
        self.tokens += tokens
        self.steps += steps
        self.seconds += seconds
        self.lookups += lookups

    def to_dict(self) -> dict:
        """Plain numbers. accesses = distinct experts requested = hits + misses; bypassed bytes count as moved."""
        sums = self.counters.sum(axis=0)
        accesses = int(sums[HITS] + sums[MISSES])
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "lookups": self.lookups,
            "accesses": accesses,
            "hits": int(sums[HITS]),
            "misses": int(sums[MISSES]),
            "bypasses": int(sums[BYPASSES]),
            "evictions": int(sums[EVICTIONS]),
            "hit_rate": float(sums[HITS] / accesses) if accesses else None,
            "bytes_moved": int(sums[MISSES]) * self.row_bytes,
            "bytes_per_token": float(sums[MISSES]) * self.row_bytes / self.tokens if self.tokens else None,
            "disk": self._disk(*sums[DISK:].tolist()),
            "per_layer": {
                name: self.counters[:, index].tolist()
                for index, name in (
                    (HITS, "hits"),
                    (MISSES, "misses"),
                    (BYPASSES, "bypasses"),
                    (EVICTIONS, "evictions"),
                )
            },
        }

    def _disk(self, *counts) -> dict | None:
        """What host memory had and what was read, None if nothing was asked of a disk tier."""
        hits, misses, rows = counts[HOST_HITS], counts[HOST_MISSES], counts[ROWS_READ]
        if not hits + misses:
            return None
        return {
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses),
            "bytes_read": rows * self.row_bytes,
            "bytes_per_token": rows * self.row_bytes / self.tokens if self.tokens else None,
        }


class RunStats:
    """One or many calls. `encoder` is a `PhaseStats` beside prefill and decode in an encoder-decoder, else None.

    ttft: seconds from a call to its first token, compilation excluded, summed over the `first_tokens` calls with one.
    """

    def __init__(self, layers: int, row_bytes: int, encoder: bool = False):
        self.encoder = PhaseStats(layers, row_bytes) if encoder else None
        self.prefill = PhaseStats(layers, row_bytes)
        self.decode = PhaseStats(layers, row_bytes)
        self.calls = self.first_tokens = 0
        self.ttft = 0.0
        self.overshoot = 0
        self.compilations = 0
        self.compile_seconds = 0.0

    def merge(self, other: "RunStats"):
        """Adds another run."""
        for phase in ("prefill", "decode", *(("encoder",) if self.encoder else ())):
            mine, theirs = getattr(self, phase), getattr(other, phase)
            mine.add(theirs.counters, theirs.tokens, theirs.steps, theirs.seconds, theirs.lookups)
        for name in ("calls", "first_tokens", "ttft", "overshoot", "compilations", "compile_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict:
        """Plain numbers by phase; in an encoder-decoder the encoder's, too, and prefill is that of the target."""
        decode = self.decode
        return {
            "calls": self.calls,
            "ttft_seconds": self.ttft / self.first_tokens if self.first_tokens else None,
            "seconds_per_token": decode.seconds / decode.steps if decode.steps else None,
            **({"encoder": self.encoder.to_dict()} if self.encoder else {}),
            "prefill": self.prefill.to_dict(),
            "decode": decode.to_dict(),
            "overshoot_tokens": self.overshoot,
            "compilations": self.compilations,
            "compile_seconds": self.compile_seconds,
        }
