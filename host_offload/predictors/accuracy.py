"""How good a predictor's lists are, apart from caches and links: recall and precision at k."""

import dataclasses

import numpy as np

from host_offload.predictor import check_int, get_predictor
from host_offload.predictors.replay import replay_steps, trace_shape, upcoming


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Counts of a replay; arrays are [len(ks), L] int64 by target layer.

    found: needed experts among the k predicted first. predicted: experts predicted, at most k an event. needed [L]:
    distinct experts needed. Layers that were no target have zeros.
    """

    predictor: str
    lead: int
    ks: tuple[int, ...]
    found: np.ndarray
    predicted: np.ndarray
    needed: np.ndarray

    @property
    def recall(self):
        """float64 [len(ks)]: found / needed over all target layers; NaN if nothing was needed."""
        return _ratio(self.found.sum(axis=1), self.needed.sum())

    @property
    def precision(self):
        """float64 [len(ks)]: found / predicted over all target layers; NaN if nothing was predicted."""
        return _ratio(self.found.sum(axis=1), self.predicted.sum(axis=1))

    @property
    def recall_per_layer(self):
        """float64 [len(ks), L]; NaN for layers that were no target."""
        return _ratio(self.found, self.needed[None])

    def __add__(self, other):
        """The counts of two replays together, of two folds for instance. Raises ValueError if they do not match."""
        if (self.predictor, self.lead, self.ks) != (other.predictor, other.lead, other.ks):
            raise ValueError(
                f"accuracy: cannot add {other.predictor!r} lead {other.lead} ks {other.ks} to {self.predictor!r} lead "
                f"{self.lead} ks {self.ks}"
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("found", "predicted", "needed")}
        return dataclasses.replace(self, **sums)


def evaluate(predictor, trace, *, ks=(4, 8, 12), lead=1, phase="decode", reset="request", seed=0):
    """Asks a predictor, after each layer of each step, for the layer `lead` ahead in the same step.

    Targets are the layers lead..L-1 of every step. Experts are ranked by falling score, ties by rising id; those of
    score -inf are not predicted.

    Args:
        predictor: name, class or instance; fitted if it needs to be, on requests that `trace` does not hold.
        trace: `Trace`.
        ks: list lengths.
        lead: distance in layers, 1..L-1 and at most the predictor's `lead_layers`.
        phase: "decode", "prefill" or None for all rows.
        reset: "request" (the predictor's `reset` at the first step of each request) or "never".
        seed: handed to `init`.

    Returns:
        `Accuracy`. Raises ValueError for bad arguments and TraceError for a trace without the recorded arrays.
    """
    predictor = get_predictor(predictor)
    L, E = trace_shape(trace)
    ks = tuple(ks)
    for k in ks:
        check_int("ks", k, 1)
    check_int("lead", lead, 1)
    if lead >= L:
        raise ValueError(f"lead: {lead} layers ahead leaves no target in {L} MoE layers; give at most {L - 1}")
    if reset not in ("request", "never"):
        raise ValueError(f"reset: expected 'request' or 'never', got {reset!r}")
    found, predicted = np.zeros((len(ks), L), np.int64), np.zeros((len(ks), L), np.int64)
    needed = np.zeros(L, np.int64)
    state = predictor.init(np, L, E, seed)
    for step in replay_steps(trace, phase, predictor.reads):
        if step.start and reset == "request":
            state = predictor.reset(np, state)
        for layer in range(L):
            recorded = upcoming(step.recorded, None, layer)
            t = np.int32(step.number * L + layer)
            state = predictor.observe(np, state, layer, step.need[layer], step.scores[layer], t, recorded)
            target = layer + lead
            if target >= L:
                continue
            scores = predictor.predict(np, state, layer, target)
            order = np.argsort(-scores, kind="stable")
            real = scores[order] > -np.inf
            good = real & step.need[target][order]
            needed[target] += np.count_nonzero(step.need[target])
            for row, k in enumerate(ks):
                found[row, target] += np.count_nonzero(good[:k])
                predicted[row, target] += np.count_nonzero(real[:k])
    return Accuracy(predictor.name, lead, ks, found, predicted, needed)


def _ratio(part, whole):
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.divide(part, whole, out=np.full(np.broadcast(part, whole).shape, np.nan), where=whole > 0)
