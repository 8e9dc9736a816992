"""How long it takes from one MoE layer's event to the next one's, measured while the model runs."""

# Samples a layer that the median is taken of: an outlier (the end of a chunk, another process) counts for nothing.
SAMPLES = 15


class Windows:
    """Time from the event of each layer to the one that follows it, medians of the last samples.

    Args:
      first, L: decode steps run the MoE layers first..L-1.
    """

    def __init__(self, first, L):
        self._first, self._L = first, L
        self._samples: list[list[float]] = [[] for _ in range(L)]
        self._medians: list[float | None] = [None] * L
        self._last: tuple[int, float] | None = None

    def mark(self, layer, now):
        """The event of `layer` begins at `now` (seconds of any clock)."""
        if self._last is not None:
            before, then = self._last
            if layer == self._next(before):
                kept = self._samples[before]
                kept.append(now - then)
                if len(kept) > SAMPLES:
                    kept.pop(0)
                self._medians[before] = sorted(kept)[len(kept) // 2]
        self._last = layer, now

    def pause(self):
        """What comes next does not follow the last event: no sample from it."""
        self._last = None

    def seconds(self, layer, target) -> float | None:
        """Expected time from the event of `layer` to the next one of `target`; None if it was not measured yet."""
        total = 0.0
        while True:
            median = self._medians[layer]
            if median is None:
                return None
            total += median
            layer = self._next(layer)
            if layer == target:
                return total

    def _next(self, layer):
        return layer + 1 if layer + 1 < self._L else self._first
