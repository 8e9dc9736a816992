"""Small trained linear heads: one ridge regression a layer and distance, solved in closed form.

Features x are what is known when a layer has routed, targets y [E] the 0/1 set of the layer ahead. With n tokens X, Y:

    W = (X'X + ridge * I)^-1 X'Y          score = x W

(Hoerl and Kennard 1970, "Ridge regression"; the constant feature is not penalised.) Experts are ranked by the score, so
no link function is needed.
"""

import abc

import numpy as np

from host_offload.policy import set_row
from host_offload.predictor import Predictor, register_predictor
from host_offload.predictors.replay import fitted_shape, request_needs, requests_of
from host_offload.predictors.tables import pair_needs


class _Linear(Predictor):
    """State: `last` [L, E] bool; `seen` [L, E] float32, the source features; `weights` [lead, L, 2E + 1, E].

    Features of (source layer, target layer): source features [E], the target layer's last set [E], 1.
    """

    needs_fit = True
    cost_us = 12.0

    def __init__(self, ridge=10.0, **declared):
        super().__init__(**declared)
        if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 0 < ridge < np.inf:
            raise ValueError(f"ridge: {ridge!r} is not a positive number")
        self.ridge = float(ridge)
        self._weights = None

    @abc.abstractmethod
    def _sources(self, trace):
        """Yields [T, L, E] float64, the source features of each request."""

    @abc.abstractmethod
    def _source(self, xp, need, scores):
        """The same for one event: float32 [E]."""

    def fit(self, traces):
        traces = list(traces)
        L, E = fitted_shape(traces)
        lead = self.lead_layers
        if lead > L:
            raise ValueError(f"lead_layers: {lead} is more than the {L} MoE layers of the traces")
        n = 2 * E + 1
        gram, moment = np.zeros((lead, L, n, n)), np.zeros((lead, L, n, E))
        for trace in traces:
            for need, features in zip(request_needs([trace]), self._sources(trace), strict=True):
                for ahead, layer in np.ndindex(lead, L):
                    _, before, target = pair_needs(need, layer, ahead + 1)
                    source = features[: len(target), layer]
                    x = np.concatenate([source, before, np.ones((len(target), 1))], axis=1)
                    gram[ahead, layer] += x.T @ x
                    moment[ahead, layer] += x.T @ target
        penalty = np.full(n, self.ridge)
        penalty[-1] = 1e-6  # the constant: only enough to keep the matrix invertible
        self._weights = np.linalg.solve(gram + np.diag(penalty), moment).astype(np.float32)
        return self

    def init(self, xp, L, E, seed):
        self._check_fitted(self._weights, L, E)
        return {
            "last": xp.zeros((L, E), bool),
            "seen": xp.zeros((L, E), xp.float32),
            "weights": xp.array(self._weights),
        }

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        last = set_row(xp, state["last"], layer, need)
        seen = set_row(xp, state["seen"], layer, self._source(xp, need, scores))
        return {**state, "last": last, "seen": seen}

    def predict(self, xp, state, layer_now, target_layer):
        L, E = state["last"].shape
        weights = state["weights"][self.distance(L, layer_now, target_layer) - 1, layer_now]
        before = state["last"][target_layer].astype(xp.float32)
        return state["seen"][layer_now] @ weights[:E] + before @ weights[E : 2 * E] + weights[2 * E]

    def reset(self, xp, state):
        return {**state, "last": xp.zeros_like(state["last"]), "seen": xp.zeros_like(state["seen"])}


@register_predictor
class LinearNeed(_Linear):
    """From the set (0/1) that the layer has just needed."""

    name = "linear-need"

    def _sources(self, trace):
        for need in request_needs([trace]):
            yield need.astype(np.float64)

    def _source(self, xp, need, scores):
        return need.astype(xp.float32)


@register_predictor
class LinearScores(_Linear):
    """From the router's scores of all experts of the layer that has just routed; needs traces with `scores`."""

    name = "linear-scores"

    def _sources(self, trace):
        if trace.scores is None:
            raise ValueError("predictor 'linear-scores': the trace holds no scores; record them, or use 'linear-need'")
        for scores in requests_of(trace, "scores"):
            yield scores.astype(np.float64)

    def _source(self, xp, need, scores):
        return scores.astype(xp.float32)
