"""A predictor at work beside a running model: fed with its events, taught by what was seen, asked for ids."""

import numpy as np

from host_offload.predictor import get_predictor
from host_offload.predictors.replay import upcoming
from host_offload.prefetch.experience import Experience

# Names of the arrays that a device's own routers fill: prediction of the layer so many ahead.
GATES = {"gate-1": 1, "gate-2": 2, "gate-3": 3}
# Share of new tokens from which on tables are made anew.
WORTH = 0.1


def worth_learning(predictor, seen: Experience, taken: tuple[int, int]) -> bool:
    """Whether there is more to learn from than at `taken`, the requests and tokens that the predictor's tables were
    made of; a few tokens are not worth the time."""
    requests, tokens = taken
    if predictor.learned:
        return seen.counts.tokens > tokens * (1 + WORTH)
    return seen.requests != requests


def is_scripted(predictor) -> bool:
    """Whether it reads arrays that only a recorded run has, such as the truth."""
    return bool(set(predictor.reads) - GATES.keys())


def check_script(predictor, script):
    """Raises ValueError if a scripted predictor is to begin a run without its recorded steps."""
    if is_scripted(predictor) and script is None:
        raise ValueError(
            f"prefetch={predictor.name!r} reads {', '.join(predictor.reads)} from a recorded run: use it with "
            "MoE.replay, or choose one that learns while the model runs, such as 'cross-layer+temporal'"
        )


class LivePredictor:
    """Wraps a `Predictor` (NumPy); owner as of `Experience`.

    Args:
      predictor: name, class or instance. Raises ValueError for an unknown name, and for one that cannot learn live.
      experience: what it learns from, and adds to.
      seed: handed to `init`.
    """

    def __init__(self, predictor, experience: Experience, seed=0):
        self.predictor = get_predictor(predictor)
        self._seen, self._seed = experience, seed
        self._state = None  # None: nothing learned yet, so nothing is predicted
        self._script: list | None = None
        self._at = -1  # step of the script
        self._told = np.full((experience.L, experience.E), -np.inf, np.float32)
        self._take_tables()

    @property
    def scripted(self) -> bool:
        """See `is_scripted`."""
        return is_scripted(self.predictor)

    @property
    def ready(self) -> bool:
        """False until it has learned enough to predict."""
        return self._state is not None

    def _take_tables(self):
        """Makes the state anew from what was learned; keeps None if that is nothing."""
        self._taken = self._seen.requests, self._seen.counts.tokens
        if self.predictor.learn(self._seen):
            self._state = self.predictor.init(np, self._seen.L, self._seen.E, self._seed)

    def _stale(self):
        return worth_learning(self.predictor, self._seen, self._taken)

    def begin(self, script=None):
        """A run begins. script: its decode steps ahead of time, `predictors.replay.Step`s, for a scripted predictor.

        Raises ValueError if a scripted predictor gets none.
        """
        check_script(self.predictor, script)
        self._script, self._at = script, -1
        self._seen.end_request()
        if self.predictor.needs_fit and self._stale():
            self._take_tables()
        if self.ready:
            self._state = self.predictor.reset(np, self._state)

    def observe(self, layer, need, scores, t, *, first, last, guess=None):
        """An event of decode.

        need [E] bool; scores [E] float32; t: event clock. first, last: whether the step begins or ends with it. guess:
        what the device's router of the layer `lead` ahead made of this layer's hidden states, [rows, K] int, or None.
        """
        recorded = None
        if first:
            self._at += 1
        if self.scripted:
            recorded = self._read_script(layer)
        elif self.predictor.reads:
            recorded = {self.predictor.array: self._tell(layer, guess)}
        if self.ready:
            self._state = self.predictor.observe(np, self._state, layer, need, scores, t, recorded)
        self._seen.observe(layer, need, last)
        if last and self._seen.due:
            self._seen.count()
            self._refresh()

    def skip(self, need, first, t):
        """Decode steps that passed without `observe`: need [steps, L, E] bool, of the layers from `first` on; t: event
        clock of layer 0 in the last one. All of them count as seen, but a predictor's own state takes in only the last.
        """
        self._at += len(need) - 1
        self._seen.pass_by(need[:-1])
        scores = np.zeros((self._seen.E,), np.float32)
        for layer in range(first, self._seen.L):
            at = {"first": layer == first, "last": layer == self._seen.L - 1}
            self.observe(layer, need[-1, layer], scores, np.int32(t + layer), **at)

    def pass_steps(self, count):
        """So many decode steps passed of which nothing is known."""
        self._at += count

    def _read_script(self, layer):
        if self._at >= len(self._script):
            raise ValueError(f"the recorded run has {len(self._script)} steps, and this is one more")
        now, later = self._script[self._at], None
        if self._at + 1 < len(self._script):
            later = self._script[self._at + 1].recorded
        return upcoming(now.recorded, later, layer)

    def _tell(self, layer, guess):
        """[L, E] float32: the device's guess in the row of the layer that it is for, by rank, best over the rows."""
        target = layer + GATES[self.predictor.array]
        if guess is not None and target < self._seen.L:
            told = self._told[target]
            told.fill(-np.inf)
            K = guess.shape[1]
            for rank in range(K - 1, -1, -1):  # the best rank is written last
                told[guess[:, rank]] = K - rank
        return self._told

    def _refresh(self):
        """New tables in the middle of a request, for predictors whose other state does not depend on them."""
        if not self.predictor.learned:
            return
        if not self.ready:
            self._take_tables()
        elif self._stale() and self.predictor.learn(self._seen):
            self._taken = self._seen.requests, self._seen.counts.tokens
            fresh = self.predictor.init(np, self._seen.L, self._seen.E, self._seed)
            self._state |= {name: fresh[name] for name in self.predictor.learned if name in fresh}

    def predict(self, layer, target, width):
        """The up to `width` likeliest experts of the next run of `target`, best first: int64 [n], empty if unknown."""
        gate = not GATES.keys().isdisjoint(self.predictor.reads)
        if not self.ready or (gate and target <= layer):  # a gate knows nothing of the next token
            return np.zeros(0, np.int64)
        scores = self.predictor.predict(np, self._state, layer, target)
        likely = np.argsort(-scores, kind="stable")[:width]
        return likely[scores[likely] > -np.inf]

    def end(self):
        """The last run is over (the model is being closed): all of it counts."""
        self._seen.end_request()
