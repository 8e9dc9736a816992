"""Whether prefetch pays, by the clock: calls of decode with and without it, in turn.

What a row that came ahead saves, and what its copy and the host's decision cost the kernels beside them, cannot be seen
within a step, or only with errors that add up over its layers. But the same model runs the same steps with and without:
seconds a step = a + b * misses a step + d * staged, fitted by least squares to the calls of a trial, and d is what
prefetch costs.
"""

import numpy as np

TRIAL, ON, OFF = "trial", "on", "off"
# Calls of decode, and their programs where they are not the same.
STAGING, PLAIN = "staging", "plain"


class TimeTrial:
    """Decides which calls of decode stage; owner: the engine's thread.

    A trial counts at least `CALLS` of either kind. Prefetch goes on, for `HOLD` steps, if it is faster by `CLEAR`
    standard errors of d and by `LEAST` of a step. It stays off, for `PAUSE` steps, if it is slower by as much, or not
    clearly faster after `MOST`; twice as many each time, up to `PAUSE_MOST`. Then comes another trial.

    Args: enabled: False: every call stages.
    """

    CALLS, MOST, CLEAR, LEAST = 16, 48, 2.0, 1e-3
    HOLD, PAUSE, PAUSE_MOST = 16384, 4096, 65536

    def __init__(self, enabled=True):
        self._enabled = enabled
        self._pause = self.PAUSE
        self._staged = False  # the last call that was begun in a trial
        self.net_seconds = self.error_seconds = None  # d of the last verdict, and its standard error
        self._begin()

    def _begin(self):
        self.state, self._left = TRIAL, 0
        self._calls: list[tuple[bool, float, float]] = []  # (staged, seconds a step, misses a step)
        self._warm = set()  # kinds that have run since the trial began: a first call builds its CUDA graph

    @property
    def decided(self) -> bool:
        """Whether there is a verdict."""
        return not self._enabled or self.state != TRIAL

    def choose(self) -> bool:
        """Whether the call that begins now stages."""
        if not self._enabled:
            return True
        if self.state == TRIAL:
            self._staged = not self._staged
            return self._staged
        return self.state == ON

    def tell(self, staged: bool, seconds: float, steps: int, misses: int, timed: bool):
        """A call is over. timed: its seconds hold nothing but its steps."""
        if not self._enabled or not steps:
            return
        if self.state != TRIAL:
            self._left -= steps
            if self._left <= 0:
                self._begin()
            return
        if timed and staged in self._warm:
            self._calls.append((staged, seconds / steps, misses / steps))
            self._judge()
        self._warm.add(staged)

    def _judge(self):
        staged = np.array([call[0] for call in self._calls])
        fewest = min(staged.sum(), (~staged).sum())
        if fewest < self.CALLS:
            return
        _, seconds, misses = np.array(self._calls, np.float64).T
        self.net_seconds, self.error_seconds = net_cost(staged, seconds, misses)
        margin = max(self.CLEAR * self.error_seconds, self.LEAST * seconds.mean())
        if self.net_seconds < -margin:
            self.state, self._left, self._pause = ON, self.HOLD, self.PAUSE
        elif self.net_seconds > margin or fewest >= self.MOST:
            self.state, self._left = OFF, self._pause
            self._pause = min(2 * self._pause, self.PAUSE_MOST)

    def to_dict(self) -> dict:
        """State, why, and the figures of the last verdict, in microseconds a step (None before one)."""

        def micro(seconds):
            return None if seconds is None else seconds * 1e6

        net, error = micro(self.net_seconds), micro(self.error_seconds)
        if not self._enabled:
            reason = "prefetch_shutoff is off"
        elif self.state == TRIAL:
            n, staged = len(self._calls), sum(call[0] for call in self._calls)
            reason = f"being tried: timed so far are {staged} calls with prefetch and {n - staged} without"
        else:
            then = f"tried again in {self._left} steps"
            reason = f"prefetch changed a step by {net:+.1f} us (standard error {error:.1f}); {then}"
        return {"state": self.state if self._enabled else ON, "reason": reason, "net_us": net, "error_us": error}


def net_cost(staged, seconds, misses) -> tuple[float, float]:
    """(d, its standard error) of seconds = a + b * misses + d * staged by least squares; arrays [n], n > 3."""
    X = np.stack([np.ones(len(seconds)), misses - misses.mean(), staged], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(X, seconds, rcond=None)
    rest = seconds - X @ solution
    variance = rest @ rest / (len(seconds) - rank)
    return float(solution[2]), float(np.sqrt(variance * np.linalg.pinv(X.T @ X)[2, 2]))
