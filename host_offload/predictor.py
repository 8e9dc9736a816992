"""Predictors: which experts a later layer will need, told before its router has run.

A predictor is a few pure functions on small arrays over an array namespace `xp` (`numpy` or `jax.numpy`), like a policy
(`host_offload/policy.py`), and is asked one question: with the experts of `layer_now` known, which ones will
`target_layer` need the next time it runs? If `target_layer > layer_now` that is the same token, otherwise the next one.
Tables are learned by `fit` from traces of other requests. Shape letters: L MoE layers, E experts a layer.

Every predictor declares what it costs: `lead_layers`, how many layers ahead it can be asked (1 is the next layer;
more lead hides longer copies); `cost_us`, the microseconds that one prediction takes on the critical path; `byte_cap`,
the most bytes it may have moved at one event (None: no cap of its own).
"""

import abc

import numpy as np

from host_offload.registry import find


class Predictor(abc.ABC):
    """The interface; subclass it, set `name`, and `register_predictor` the class.

    Args:
        lead_layers: largest distance in layers that may be asked, at least 1.
        cost_us: microseconds a prediction takes; None keeps the class's value.
        byte_cap: most bytes to prefetch at one event, None for no cap.

    `reads` names the per-step arrays of a trace that `observe` wants in `recorded`: "experts" (the truth, for the
    oracle) or the name of a `pred/<name>` array. `needs_fit` says that `init` needs a `fit` before.
    `traceable` says that `observe` and `predict` may be traced into a compiled step, for which the shapes of the state
    must not change with what was learned.
    `by_layer` names the entries [L, ...] of the state that `observe` and `predict` use as `state[name][layer]` and
    `set_row` alone: such a step keeps them as single rows, as updates in place would cost it copies.
    `learned` names the entries of the state that `init` makes from what `fit` or `learn` found and nothing else: they
    may be replaced in the middle of a request.
    """

    name: str = ""
    needs_fit: bool = False
    traceable: bool = True
    by_layer: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    cost_us: float = 0.0

    def __init__(self, lead_layers=1, cost_us=None, byte_cap=None):
        check_int("lead_layers", lead_layers, 1)
        if byte_cap is not None:
            check_int("byte_cap", byte_cap, 0)
        if cost_us is not None:
            if isinstance(cost_us, bool) or not isinstance(cost_us, int | float) or not 0 <= cost_us < np.inf:
                raise ValueError(f"cost_us: {cost_us!r} is not a time of at least 0 microseconds")
            self.cost_us = float(cost_us)
        self.lead_layers = int(lead_layers)
        self.byte_cap = byte_cap

    def fit(self, traces):
        """Learns from `traces` (an iterable of `Trace`, all of one model) and returns self; by default nothing."""
        del traces
        return self

    def learn(self, seen):
        """Takes tables from what the running model has seen so far, an `Experience` (`prefetch/experience.py`).

        Returns whether that was enough for `init`. Raises ValueError for a predictor that only `fit` can teach.
        """
        del seen
        if self.needs_fit:
            raise ValueError(f"predictor {self.name!r} is fitted on traces and cannot learn while a model runs")
        return True

    @abc.abstractmethod
    def init(self, xp, L, E, seed):
        """Returns the state before the first event: a dict of arrays. Raises ValueError if `fit` is missing or was of
        another shape."""

    @abc.abstractmethod
    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        """Records an event once its router has run, and returns the new state (in place under NumPy).

        `layer` int32 scalar; `need` [E] bool; `scores` [E] float32, the router's scores summed over the rows of the
        event; `t` int32 scalar, the event clock; `recorded` {name: [L, E] float32} for the names in `reads`: row l is
        about the next time that layer l runs, -inf where nothing is known.
        """

    @abc.abstractmethod
    def predict(self, xp, state, layer_now, target_layer):
        """Returns float32 [E], higher = likelier, -inf = not predicted; both layers are Python ints.

        Called after `observe` of `layer_now`. Raises ValueError beyond `lead_layers`, see `distance`.
        """

    def reset(self, xp, state):
        """Returns the state at the start of a request; by default nothing is forgotten."""
        del xp
        return state

    def distance(self, L, layer_now, target_layer):
        """Layers from `layer_now` to the next run of `target_layer`: 1..L, counting on through the next token.

        Raises ValueError if it is above `lead_layers`, or for layers outside 0..L-1.
        """
        for field, layer in (("layer_now", layer_now), ("target_layer", target_layer)):
            if not 0 <= layer < L:
                raise ValueError(f"{field}: {layer} is outside 0..{L - 1}")
        ahead = (target_layer - layer_now - 1) % L + 1
        if ahead > self.lead_layers:
            raise ValueError(
                f"target_layer: {target_layer} is {ahead} layers after layer_now {layer_now}, but {self.name!r} has "
                f"lead_layers {self.lead_layers}; build it with a larger lead_layers"
            )
        return ahead

    def _check_fitted(self, table, L, E):
        """Raises ValueError unless `table` is there and was fitted on L layers of E experts."""
        if table is None:
            raise ValueError(f"predictor {self.name!r}: call fit(traces) before init")
        if table.shape[1] != L or table.shape[-1] != E:
            raise ValueError(
                f"predictor {self.name!r}: fitted on L = {table.shape[1]}, E = {table.shape[-1]}, the model has "
                f"L = {L}, E = {E}; fit it on traces of this model"
            )


def check_int(field, value, low):
    """Raises ValueError naming `field` unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{field}: {value!r} is not an integer of at least {low}")


# ------------------------------------------------------------------------------------------------------------- registry

_REGISTRY: dict[str, type[Predictor]] = {}


def register_predictor(cls):
    """Class decorator that makes a `Predictor` available by its `name`.

    Raises TypeError for anything but a subclass, ValueError for an empty name or one taken by another class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Predictor)):
        raise TypeError(f"predictor: expected a subclass of host_offload.predictor.Predictor, got {cls!r}")
    if not isinstance(cls.name, str) or not cls.name:
        raise ValueError(f"predictor {cls.__qualname__}: `name` must be a non-empty string, got {cls.name!r}")
    known = _REGISTRY.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"predictor name {cls.name!r} is taken by {known.__module__}.{known.__qualname__}; choose another"
        )
    _REGISTRY[cls.name] = cls
    return cls


def get_predictor(predictor, **parameters):
    """Returns a predictor for a registered name or a class (built with `parameters`), or the instance itself.

    Raises ValueError for an unknown name and TypeError for other objects, or for parameters beside an instance.
    """
    import host_offload.predictors  # noqa: F401  registers the built-in ones; they import this module

    return find("predictor", "predictors", Predictor, _REGISTRY, predictor, parameters)


def list_predictors():
    """Returns the registered names in alphabetical order."""
    import host_offload.predictors  # noqa: F401  registers the built-in ones; they import this module

    return sorted(_REGISTRY)
