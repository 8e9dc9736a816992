"""Predictors that look at one expert at a time: how lately or how often it was needed."""

import numpy as np

from host_offload.policy import set_row
from host_offload.predictor import Predictor, register_predictor
from host_offload.predictors.replay import fitted_shape, request_needs


def scores_of_counts(xp, count):
    """float32 image of `count`: experts that were never counted are not predicted."""
    return xp.where(count > 0, count.astype(xp.float32), -xp.inf).astype(xp.float32)


@register_predictor
class PreviousToken(Predictor):
    """The latest experts of the target layer, most recent first; only those that this request has needed.

    The first K are the previous token's; the order beyond them is that of LRU. State: `last` [L, E] int32, the clock of
    the latest event that needed the expert, -1 never; `clock` int32 scalar.
    """

    name = "previous-token"
    by_layer = ("last",)
    cost_us = 2.0

    def init(self, xp, L, E, seed):
        return {"last": xp.full((L, E), -1, xp.int32), "clock": xp.zeros((), xp.int32)}

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        last = set_row(xp, state["last"], layer, xp.where(need, t, state["last"][layer]))
        return {"last": last, "clock": xp.asarray(t, xp.int32)}

    def predict(self, xp, state, layer_now, target_layer):
        last = state["last"][target_layer]
        self.distance(state["last"].shape[0], layer_now, target_layer)
        # The age, not the clock, becomes a float: exact for ages below 2^24 however long the run is.
        return xp.where(last >= 0, -(state["clock"] - last).astype(xp.float32), -xp.inf).astype(xp.float32)

    def reset(self, xp, state):
        return {**state, "last": xp.full_like(state["last"], -1)}


@register_predictor
class RequestCounts(Predictor):
    """How often the request has needed each expert of the target layer so far: a request is like itself.

    State: `count` [L, E] int32.
    """

    name = "request-counts"
    by_layer = ("count",)
    cost_us = 2.0

    def init(self, xp, L, E, seed):
        return {"count": xp.zeros((L, E), xp.int32)}

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        return {"count": set_row(xp, state["count"], layer, state["count"][layer] + need)}

    def predict(self, xp, state, layer_now, target_layer):
        self.distance(state["count"].shape[0], layer_now, target_layer)
        return scores_of_counts(xp, state["count"][target_layer])

    def reset(self, xp, state):
        return {"count": xp.zeros_like(state["count"])}


@register_predictor
class StaticFrequency(Predictor):
    """How often other requests needed each expert of the target layer: the same answer for every token.

    State: `count` [L, E] float32 from `fit`.
    """

    name = "static-frequency"
    needs_fit = True
    learned = ("count",)
    cost_us = 1.0

    def __init__(self, **declared):
        super().__init__(**declared)
        self._count = None

    def fit(self, traces):
        traces = list(traces)
        count = np.zeros(fitted_shape(traces), np.int64)
        for need in request_needs(traces):
            count += need.sum(axis=0)
        self._count = count
        return self

    def learn(self, seen):
        self._count = seen.counts.total
        return bool(seen.counts.tokens)

    def init(self, xp, L, E, seed):
        self._check_fitted(None if self._count is None else self._count[None], L, E)
        return {"count": xp.array(self._count, xp.float32)}

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        return state

    def predict(self, xp, state, layer_now, target_layer):
        self.distance(state["count"].shape[0], layer_now, target_layer)
        return scores_of_counts(xp, state["count"][target_layer])
