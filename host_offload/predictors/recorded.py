"""Predictions that were made elsewhere and lie in the trace: a model's own gates, and the truth.

`pred/<name>` [T, L, k] int16 holds, for each token and *target* layer, the experts predicted for it by falling
likelihood, -1 where there is none. The gate predictors are the router of the target layer applied to a hidden state of
1, 2 or 3 layers before (as in Eliseev and Mazur, arXiv 2312.17238); that needs weights, so it is recorded while the
model runs (docs/predictors.md).
"""

from host_offload.predictor import Predictor, register_predictor


class Recorded(Predictor):
    """What the trace holds under `pred/<array>`, recorded `lead_layers` layers ahead of its target.

    State: `told` [L, E] float32, the predictions for each layer's next run.
    """

    name = "recorded"
    array = ""

    def __init__(self, array=None, **declared):
        super().__init__(**declared)
        if array is not None:
            self.array = array
        if not isinstance(self.array, str) or not self.array:
            raise ValueError(f"array: {self.array!r} is not the name of a pred/<name> array; pass array='...'")
        self.reads = (self.array,)

    def init(self, xp, L, E, seed):
        return {"told": xp.full((L, E), -xp.inf, xp.float32)}

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        if recorded is None or self.array not in recorded:
            raise ValueError(f"predictor {self.name!r}: observe needs recorded[{self.array!r}] [L, E]")
        return {"told": xp.asarray(recorded[self.array], xp.float32)}

    def predict(self, xp, state, layer_now, target_layer):
        self.distance(state["told"].shape[0], layer_now, target_layer)
        return state["told"][target_layer]


class _Gate(Recorded):
    """A router `layers` ahead on this layer's hidden state; its predictions exist that many layers early, not more."""

    layers = 1
    cost_us = 6.0  # one [E, D] matrix-vector product beside the layer's own

    def __init__(self, lead_layers=None, **declared):
        super().__init__(lead_layers=self.layers if lead_layers is None else lead_layers, **declared)
        if self.lead_layers > self.layers:
            raise ValueError(
                f"lead_layers: {self.lead_layers}, but {self.name!r} is made {self.layers} layers ahead; "
                "use a farther gate"
            )


@register_predictor
class Gate1(_Gate):
    """The next layer's router on the hidden state that this layer's router saw."""

    name, array, layers = "gate-1", "gate-1", 1


@register_predictor
class Gate2(_Gate):
    """The router two layers ahead."""

    name, array, layers = "gate-2", "gate-2", 2


@register_predictor
class Gate3(_Gate):
    """The router three layers ahead."""

    name, array, layers = "gate-3", "gate-3", 3


@register_predictor
class Oracle(Recorded):
    """The truth, up to a whole token ahead, at no cost: the bound of every predictor."""

    name, array = "oracle", "experts"
