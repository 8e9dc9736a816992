"""The matching of MoE-Infinity (arXiv 2401.14361): find earlier requests that used the experts alike.

An EAM (expert activation matrix) [L, E] counts how often a request used each expert; the EAMC is a collection of them.
The running request's EAM so far is compared with each by cosine similarity over the layers it has already used, and the
target layer's row of the most similar, or the mean of the rows of the eight most similar, ranks the experts.
"""

import numpy as np

from host_offload.policy import set_row
from host_offload.predictor import Predictor, register_predictor
from host_offload.predictors.replay import fitted_shape, request_needs


class _EAMC(Predictor):
    """State: `eams` [n, L, E] float32, rows that sum to 1 a layer; `squares` [n, L] float32, their squared lengths; of
    the running EAM `used` [L] bool, the layers that have run, and its `product` [n] float32 with each of the others
    over these layers, which have the squared `length` [n] float32 there."""

    needs_fit = True
    traceable = False  # n grows
    matches = 1

    def __init__(self, **declared):
        super().__init__(**declared)
        self._eams = None

    def fit(self, traces):
        """One EAM a request, its prompt included."""
        traces = list(traces)
        fitted_shape(traces)
        eams = [need.sum(axis=0) for need in request_needs(traces)]
        if not eams:
            raise ValueError(f"predictor {self.name!r}: fit: the traces hold no requests")
        self._take(eams)
        return self

    def learn(self, seen):
        if seen.eams:
            self._take(seen.eams)
        return bool(seen.eams)

    def _take(self, eams):
        eams = np.stack(eams).astype(np.float64)
        # A token uses K experts of each layer, so all rows of an EAM have the same sum: this divides out its length. A
        # layer that no token of it went through (the encoder's, while the target is written) is all zeros.
        self._eams = (eams / np.maximum(eams.sum(axis=-1, keepdims=True), 1)).astype(np.float32)

    def init(self, xp, L, E, seed):
        self._check_fitted(self._eams, L, E)
        n = len(self._eams)
        return {
            "eams": xp.array(self._eams),
            "squares": xp.array((self._eams**2).sum(axis=-1)),
            "used": xp.zeros((L,), bool),
            "product": xp.zeros((n,), xp.float32),
            "length": xp.zeros((n,), xp.float32),
        }

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        # Kept up to date event by event: comparing whole EAMs anew would read all of them for each prediction.
        new = ~state["used"][layer] & need.any()
        return {
            **state,
            "product": state["product"] + state["eams"][:, layer] @ need.astype(xp.float32),
            "length": state["length"] + xp.where(new, state["squares"][:, layer], 0).astype(xp.float32),
            "used": set_row(xp, state["used"], layer, state["used"][layer] | need.any()),
        }

    def predict(self, xp, state, layer_now, target_layer):
        eams = state["eams"]
        self.distance(eams.shape[1], layer_now, target_layer)
        # The length of the running EAM is the same in all n similarities and left out.
        similarity = state["product"] / xp.sqrt(xp.maximum(state["length"], 1e-30))
        nearest = xp.argsort(-similarity, stable=True)[: self.matches]
        row = eams[nearest, target_layer].mean(axis=0)
        return xp.where(row > 0, row, -xp.inf).astype(xp.float32)

    def reset(self, xp, state):
        return {**state, **{name: xp.zeros_like(state[name]) for name in ("used", "product", "length")}}


@register_predictor
class EAMCNearest(_EAMC):
    """The row of the most similar request."""

    name = "eamc-nearest"
    matches = 1
    cost_us = 30.0


@register_predictor
class EAMCMean(_EAMC):
    """The mean row of the eight most similar requests (all, if there are fewer)."""

    name = "eamc-mean"
    matches = 8
    cost_us = 30.0
