"""Base of the policies that are lists of keys with rules to move them: SLRU, 2Q, ARC, S3-FIFO.

Their published form takes one request at a time and evicts before it inserts. Here the members of an event are looked
up first, by falling id; the missing ones wait in `new` and enter their list at the end of the event, after its
evictions. With one expert an event and a full cache that is the published algorithm.
"""

import abc

import numpy as np

from host_offload.policy import Policy


class Queues(abc.ABC):
    """The lists of one cache of `capacity` slots. Lists are dicts of keys (`layer * E + expert`), oldest first.

    `new` maps missing keys of the running event to the name of the list that they will enter.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.new = {}

    @abc.abstractmethod
    def residents(self):
        """The lists that hold keys with a slot, a tuple of dicts."""

    @abc.abstractmethod
    def hit(self, key):
        """Records an access to a resident."""

    @abc.abstractmethod
    def missed(self, key):
        """Returns the name of the list that a missing key will enter; may use up what is remembered of it."""

    @abc.abstractmethod
    def evict(self, leaving):
        """Takes the resident that the rule evicts next, of those in `leaving`, out of its list and returns it."""

    @abc.abstractmethod
    def trim(self):
        """Called at the end of an event: bounds what is remembered of absent keys."""

    def access(self, key):
        if any(key in held for held in self.residents()):
            self.hit(key)
        elif key not in self.new:
            self.new[key] = self.missed(key)

    def copy(self):
        """A copy whose lists can be changed; keys and numbers are shared."""
        other = object.__new__(type(self))
        other.__dict__ = {name: v.copy() if isinstance(v, dict) else v for name, v in vars(self).items()}
        return other

    def eviction_order(self):
        """All keys in the order in which they would leave: residents by the rule, then missing ones as they came."""
        trial = self.copy()
        keys = set().union(*trial.residents())
        order = []
        while keys:
            order.append(trial.evict(keys))
            keys.discard(order[-1])
        return order + list(trial.new)

    def settle(self, resident):
        """The end of an event: `resident` is the set of keys in scope that have a slot now."""
        leaving = set().union(*self.residents()) - resident
        while leaving:
            leaving.discard(self.evict(leaving))
        for key, name in self.new.items():
            if key in resident:
                getattr(self, name)[key] = 0
        self.new = {}
        self.trim()


class QueuePolicy(Policy):
    """A policy that ranks by the eviction order of `Queues`: one for each layer, or one for all in scope `global`.

    State: `E`, and `queues`, a list of `Queues`: Python objects, so it runs on the host only.
    """

    uses_scores = False
    in_cache = True
    host_only = True

    @abc.abstractmethod
    def make_queues(self, capacity):
        """Returns empty `Queues` for `capacity` slots."""

    def init(self, xp, L, E, seed):
        if xp is not np:
            raise ValueError(
                f"policy {self.name!r} keeps Python lists and runs on the host only: use transport 'callback', or back "
                "end 'numpy' in the simulator"
            )
        return {"E": E, "queues": []}

    def bound(self, xp, state, capacity, global_scope):
        slots = capacity.tolist()
        return {**state, "queues": [self.make_queues(n) for n in (slots[:1] if global_scope else slots)]}

    def _queues(self, state, layer):
        return state["queues"][layer if len(state["queues"]) > 1 else 0]

    def observe(self, xp, state, layer, need, scores, t):
        queues = self._queues(state, layer)
        for expert in reversed(np.flatnonzero(need).tolist()):
            queues.access(layer * state["E"] + expert)
        state["layer"] = int(layer)
        return state

    def priority(self, xp, state, layer, expert, t):
        order = self._queues(state, state["layer"]).eviction_order()
        place = {key: index for index, key in enumerate(order)}
        # Experts that are no candidates have no place: they leave first.
        keys = (layer * state["E"] + expert).tolist()
        return np.array([place.get(key, -1) for key in keys], np.float32)

    def commit(self, xp, state, layer, resident, t):
        scope = resident.reshape(-1) if len(state["queues"]) == 1 else resident[layer]
        base = 0 if len(state["queues"]) == 1 else layer * state["E"]
        self._queues(state, layer).settle(set((base + np.flatnonzero(scope)).tolist()))
        return state


def first(held, leaving):
    """The oldest key of the dict `held` that is in `leaving`, or None."""
    return next((key for key in held if key in leaving), None)
