"""Prefetch for a layer stays on only while it makes that layer faster: an A/B test that never ends.

A sample is the time from the event at which a layer's prefetch is decided to the event after that layer's own: it holds
the prediction, the layer's stall for rows, and what copies of wrong rows cost it. Samples with prefetch are compared
with samples without from the same stretch of time, so that a context that grows is not taken for an effect. Until there
are `LEAST` comparisons, on and off alternate, in an order drawn for each pair and layer, so that neighbours do not move
in step. Then the better state holds, judged by the trimmed mean of the last `WINDOW` comparisons, and the other one is
tried once in `CONTROL` samples while on, and while off at intervals that double from `PROBE` to `PROBE_MOST`, so that
what was found harmful costs little.
"""

import math
import random

LEAST = 12
WINDOW = 32
CONTROL, PROBE, PROBE_MOST = 16, 64, 1024
# A trial is compared with the mean of so many samples of the state that holds.
NEIGHBOURS = 4
# Share of the comparisons that is left out at each end.
TRIM = 0.125


class ShutOff:
    """The A/B test of one layer. `seed`: of the order; enabled False: always on."""

    def __init__(self, seed=0, enabled=True):
        self._enabled = enabled
        self._draw = random.Random(seed)
        self._pair: list[bool] = []  # what is left of the running pair, while on and off alternate
        self._recent: dict[bool, list[float]] = {True: [], False: []}
        self._gains: list[float] = []
        self._countdown, self._interval = CONTROL, PROBE
        self.state, self.tried = True, False  # tried: the other state was timed since `wake`

    def ask(self) -> bool:
        """Whether to prefetch for the layer's next event."""
        if not self._enabled:
            return True
        if not self.decided:
            if not self._pair:
                self._pair = [True, False]
                self._draw.shuffle(self._pair)
            return self._pair.pop()
        self._countdown -= 1
        if self._countdown > 0:
            return self.state
        if self.state:
            self._countdown = CONTROL
        else:
            self._countdown, self._interval = self._interval, min(2 * self._interval, PROBE_MOST)
        return not self.state

    def wake(self):
        """After a sleep, when nobody asked: the other state is tried once there are fresh samples of the one that
        holds."""
        self._recent, self.tried = {True: [], False: []}, False
        self._countdown = NEIGHBOURS + 1

    def tell(self, on, seconds):
        """The time that the layer took with prefetch `on` or off."""
        if not self._enabled:
            return
        self._recent[on] = [*self._recent[on][1 - NEIGHBOURS :], seconds]
        if not self.decided:
            if all(self._recent.values()):
                self.tried = True
                self._compare(self._recent[False].pop(), self._recent[True].pop())
        elif on != self.state and self._recent[self.state]:
            self.tried = True
            holding = math.fsum(self._recent[self.state]) / len(self._recent[self.state])
            self._compare(*((seconds, holding) if self.state else (holding, seconds)))

    def _compare(self, off, on):
        self._gains = [*self._gains[1 - WINDOW :], off - on]
        state = self.gain >= 0
        if self.decided and state != self.state:
            self.state = state
            self._countdown, self._interval = (CONTROL if state else PROBE), PROBE

    @property
    def decided(self) -> bool:
        """Whether there are enough comparisons."""
        return len(self._gains) >= LEAST

    @property
    def gain(self) -> float:
        """Seconds an event that prefetch saves, below 0 it costs: trimmed mean of the comparisons; 0 without any."""
        cut = int(len(self._gains) * TRIM)
        kept = sorted(self._gains)[cut : len(self._gains) - cut]
        return math.fsum(kept) / max(1, len(kept))

    def to_dict(self) -> dict:
        """State, why, and what it rests on."""
        if not self._enabled:
            reason = "prefetch_shutoff is off"
        elif not self.decided:
            reason = "being tried: on and off alternate"
        else:
            reason = f"prefetch {'saves' if self.gain >= 0 else 'costs'} {abs(self.gain) * 1e6:.1f} us an event"
        return {
            "on": self.state,
            "reason": reason,
            "comparisons": len(self._gains),
            "gain_seconds": self.gain if self._gains else None,
        }
