"""The host's part of prefetch in the `device` transport: teaching the predictor, the books, and when to leave off.

The decision itself is made in the compiled step (`transport/staged.py`). Between its calls the host learns from the
routing that they return, and hands tables and switches to the next one as values: nothing is compiled for them.
"""

import dataclasses
from collections import deque

import jax.numpy as jnp
import numpy as np

from host_offload.predictor import get_predictor
from host_offload.predictors.replay import upcoming
from host_offload.prefetch.experience import Experience
from host_offload.prefetch.live import GATES, check_script, is_scripted, worth_learning
from pallas_kernels.expert_ffn import Prefix

# About what the link brings while it would be idle: a layer of Qwen3-30B-A3B whose experts are all there takes 65 us,
# 25 of them in its expert kernels (one token, H200), and 32 programs read 1.8 MB from pinned memory in 46.6 us.
AUTO_BUDGET = 2 << 20
# Rows that may be staged for an event: a budget of several rows is for experts that are small.
MOST_ROWS = 4
# Fewest steps of a table of a recorded run: below, more shapes would only mean more compilations.
MIN_STEPS = 64


@dataclasses.dataclass(frozen=True)
class StagingSettings:
    """What to stage. predictor: registered name, class or instance. budget: most bytes an event; auto: it was not
    given. rows: P, experts an event. prefix: how much of each. shutoff: layers whose rows are hardly used leave off.
    experience: what predictors learn from."""

    predictor: object
    budget: int
    auto: bool
    rows: int
    prefix: Prefix
    shutoff: bool
    experience: Experience


class GraphPredictor:
    """A `Predictor` inside a compiled step: `observe` and `scores` are traced, all else runs on the host between calls.

    Its state is split: what it learned is a value that the host replaces (`learned`), the rest belongs to the step
    (`fresh`, `reset`). A gate's prediction is the guess of the model's own router and has neither; nor has that of a
    recorded run, which is a table by step (`script`).

    Args:
      predictor: name, class or instance.
      experience: what it learns from, and adds to. Owner: the engine's thread.
      seed: handed to `init`.

    Raises:
      ValueError: an unknown name; a predictor that cannot learn live, or not run in a compiled step.
    """

    def __init__(self, predictor, experience: Experience, seed=0):
        self.predictor = check_traceable(predictor)
        self._seen, self._seed = experience, seed
        self.L, self.E = experience.L, experience.E
        self.gate = GATES.get(self.predictor.reads[0], 0) if self.predictor.reads else 0
        self.scripted = is_scripted(self.predictor)
        self.ready, self.learned, self._start = True, {}, {}
        self.script = None
        if self.scripted:
            self._lay([])
        elif not self.gate:
            self._take_tables()

    def _take_tables(self):
        """Learned values and a first state from what was seen; of one token of nothing until that is enough."""
        self._taken = self._seen.requests, self._seen.counts.tokens
        self.ready = self.predictor.learn(self._seen)
        if not self.ready:
            blank = Experience(self.L, self.E)
            blank.pass_by(np.zeros((1, self.L, self.E), bool))
            blank.count()
            if not self.predictor.learn(blank):
                raise ValueError(
                    f"predictor {self.predictor.name!r} has no tables before it has learned, and a compiled step needs "
                    "their shapes: use transport='callback'"
                )
        state = self.predictor.init(np, self.L, self.E, self._seed)
        self.learned = {name: jnp.asarray(state[name]) for name in self.predictor.learned if name in state}
        self._start = {name: value for name, value in state.items() if name not in self.learned}

    def _stale(self):
        return worth_learning(self.predictor, self._seen, self._taken)

    def _lay(self, steps):
        """The table of a recorded run: [S, 2, L, E] float32, what was told of each layer when the one before it ran; at
        [s, 1] of those that then run in the next step."""
        S = MIN_STEPS
        while S < len(steps):
            S *= 2
        table = np.full((S, 2, self.L, self.E), -np.inf, np.float32)
        for s, step in enumerate(steps):
            later = steps[s + 1].recorded if s + 1 < len(steps) else None
            (name,) = self.predictor.reads
            table[s, 0] = step.recorded[name]
            table[s, 1] = upcoming(step.recorded, later, self.L - 1)[name]
        self.script = jnp.asarray(table)

    # ------------------------------------------------------------------------------------------------ between the calls

    def fresh(self):
        """The step's part of the state before the first event."""
        return {name: jnp.asarray(value) for name, value in self._start.items()}

    def begin(self, state, script=None):
        """A run begins: (the step's part of the state, whether `learned` or `script` changed). script: see
        `LivePredictor.begin`. Raises ValueError if a scripted predictor gets none."""
        self._seen.end_request()
        check_script(self.predictor, script)
        if self.scripted:
            self._lay(script)
            return state, True
        if self.gate:
            return state, False
        if self.predictor.needs_fit and self._stale():
            self._take_tables()
            return self.fresh(), True
        whole = self.predictor.reset(jnp, {**state, **self.learned})
        return {name: whole[name] for name in state}, False

    def passed(self, need) -> bool:
        """Learns from decode steps, need [steps, L, E] bool; whether `learned` changed."""
        self._seen.pass_by(need)
        if not self._seen.due:
            return False
        self._seen.count()
        if not self.predictor.learned or (self.ready and not self._stale()):
            return False
        self._take_tables()
        return True

    def end(self):
        """The last run is over: all of it counts."""
        self._seen.end_request()

    # ----------------------------------------------------------------------------------------------- traced into a step

    def observe(self, state, learned, layer, need, scores, t):
        """The step's part of the state after an event; arguments as of `Predictor.observe`."""
        if self.gate or self.scripted:
            return state
        whole = self.predictor.observe(jnp, {**state, **learned}, layer, need, scores, t)
        return {name: whole[name] for name in state}

    def scores(self, state, learned, layer, target):
        """[E] float32 as of `Predictor.predict`, of a predictor that learns."""
        return self.predictor.predict(jnp, {**state, **learned}, layer, target)


class LayerRows:
    """An array [L, ...] as L arrays while a step is traced; for layers that are Python ints.

    A row that is written into an array which others still read costs a copy of it at every layer; single rows are put
    together once a step (`whole`).
    """

    def __init__(self, array):
        self._rows, self.shape = [array[layer] for layer in range(array.shape[0])], array.shape

    def __getitem__(self, layer):
        return self._rows[layer]

    @property
    def at(self):
        """`rows.at[layer].set(row)` as of jax arrays."""
        return _At(self)

    def whole(self):
        """The array [L, ...]."""
        return jnp.stack(self._rows)


class _At:
    def __init__(self, rows, layer=None):
        self._of, self._layer = rows, layer

    def __getitem__(self, layer):
        return _At(self._of, layer)

    def set(self, row, mode=None):
        """New `LayerRows` with another row; mode: as of jax arrays, without a meaning here."""
        new = LayerRows.__new__(LayerRows)
        new._rows, new.shape = list(self._of._rows), self._of.shape
        new._rows[self._layer] = row.astype(self._of._rows[self._layer].dtype)
        return new


def check_traceable(predictor):
    """The predictor of that name, class or instance. Raises ValueError for one that cannot run in a compiled step."""
    predictor = get_predictor(predictor)
    if not predictor.traceable:
        raise ValueError(
            f"predictor {predictor.name!r} keeps a state that grows with the requests, which a compiled step cannot: "
            "use transport='callback', or another predictor such as 'cross-layer+temporal'"
        )
    if len(predictor.reads) > 1:
        raise ValueError(f"predictor {predictor.name!r} reads several recorded arrays: use transport='callback'")
    if predictor.reads and GATES.get(predictor.reads[0], 1) > 1:
        raise ValueError(
            f"predictor {predictor.name!r} looks further than the next layer, and transport='device' stages for that "
            "one alone: use 'gate-1', or transport='callback'"
        )
    return predictor


# What became of the staged rows, by the layer that they were staged for.
ISSUED, USEFUL = range(2)


class StagingBooks:
    """Counts of staged rows, [L, 2] int64: issued and useful; each row has `row_bytes` bytes.

    At any time issued = useful + wasted + rows that wait for the next step. Whether a row came before its event began
    is not known: the kernel that reads it waits.
    """

    def __init__(self, L, row_bytes):
        self.counts = np.zeros((L, 2), np.int64)
        self._row_bytes = row_bytes

    def add(self, counts):
        """Books what a call counted."""
        self.counts += counts

    def to_dict(self, waiting: int, first: int) -> dict:
        """Plain numbers as `Books.to_dict`; the `waiting` rows are for layer `first`."""
        issued, useful = self.counts.T
        wasted = issued - useful
        wasted[first] -= waiting
        rows = {"issued": issued, "useful": useful, "wasted": wasted}
        sums = {name: int(count.sum()) for name, count in rows.items()} | {"waiting": waiting}
        return {
            "rows": sums,
            "bytes": {name: count * self._row_bytes for name, count in sums.items()},
            "precision": sums["useful"] / sums["issued"] if sums["issued"] else None,
            "per_layer": {name: count.tolist() for name, count in rows.items()},
        }


class StagingShutOff:
    """Which layers stage: those whose staged bytes are used often enough, by the books of the last rows.

    A used row spares its event the link's time for the prefix; a wasted one costs what its copy takes from a layer that
    needed no copy, or delays the kernel that must wait for it. A layer leaves off when fewer than `LEAST_USEFUL` of its
    last rows were used, and tries again after `PAUSE` steps, twice as many each time it fails, up to `PAUSE_MOST`.

    Args: L layers; enabled False: always on.
    """

    # Estimated from kernels alone on an H200: a copy of 1.8 MB takes 46 us, and a chain of kernels of 69 us took 76.8
    # with it beside, so the two are equal where one in six is used. In a whole step a row cost 23 us and a used one
    # saved 18 (docs/measurements.md): whether staging pays at all is for the clock to say (`TimeTrial`).
    LEAST_USEFUL = 1 / 6
    # Rows that a verdict needs, and that it looks back on.
    LEAST, WINDOW = 64, 256
    PAUSE, PAUSE_MOST = 256, 4096

    def __init__(self, L, enabled=True):
        self._enabled = enabled
        self.on = np.ones((L,), bool)
        self._recent = [deque() for _ in range(L)]  # (issued, useful) of calls, oldest first, and their sums
        self._sums = [(0, 0)] * L
        self._left, self._pause = [0] * L, [self.PAUSE] * L  # steps until the next trial; and that of the next verdict

    def tell(self, counts, steps) -> bool:
        """A call of `steps` steps staged `counts` [L, 2] rows; whether a switch changed."""
        if not self._enabled:
            return False
        changed = False
        for layer, (issued, useful) in enumerate(counts.tolist()):
            if not self.on[layer]:
                self._left[layer] -= steps
                if self._left[layer] <= 0:
                    self.on[layer], changed = True, True
                    self._recent[layer].clear()
                    self._sums[layer] = 0, 0
            elif issued:
                self._note(layer, issued, useful)
                changed |= self._judge(layer)
        return changed

    def _note(self, layer, issued, useful):
        recent, (all_issued, all_useful) = self._recent[layer], self._sums[layer]
        recent.append((issued, useful))
        all_issued, all_useful = all_issued + issued, all_useful + useful
        while all_issued - recent[0][0] >= self.WINDOW:
            issued, useful = recent.popleft()
            all_issued, all_useful = all_issued - issued, all_useful - useful
        self._sums[layer] = all_issued, all_useful

    def _judge(self, layer) -> bool:
        """Whether the layer leaves off now."""
        issued, useful = self._sums[layer]
        if issued < self.LEAST:
            return False
        if useful >= issued * self.LEAST_USEFUL:
            self._pause[layer] = self.PAUSE
            return False
        self.on[layer], self._left[layer] = False, self._pause[layer]
        self._pause[layer] = min(2 * self._pause[layer], self.PAUSE_MOST)
        return True

    def to_dict(self, layer) -> dict:
        """State of a layer, why, and what it rests on."""
        issued, useful = self._sums[layer]
        used = f"{useful} of the last {issued} rows were used"
        if not self._enabled:
            reason = "prefetch_shutoff is off"
        elif not self.on[layer]:
            reason = f"only {used}; tried again in {max(1, self._left[layer])} steps"
        elif issued < self.LEAST:
            reason = f"being tried: {used}"
        else:
            reason = used
        return {"on": bool(self.on[layer]), "reason": reason, "staged": issued, "useful": useful}
