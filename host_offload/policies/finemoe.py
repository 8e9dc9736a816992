"""FineMoE: the gate's distributions of the pass that went most alike so far."""

import numpy as np

from host_offload.policies.common import check_count
from host_offload.policy import Policy, register


@register
class FineMoE(Policy):
    """Evicts the highest 1 / (p * frequency): priority = p * accesses since the request began.

    FineMoE, arXiv 2502.05370. p is the expert's score in the *expert map* (router scores [L, E] of one forward pass)
    that matches the running pass best: cosine over the layers that ran so far. The paper also searches by the
    prompt's embedding, which a policy does not see. Up to `maps` maps are kept; a new one then replaces its most
    similar. Before the first map p is 1.

    State: `maps` [maps, L, E] float32, of which `size` are filled; `dot`, `norm` [maps] float64, sums over the layers
    of the running pass; `current` [L, E] float32, its scores; `now`, its layer; `count` [L, E] int32. Host only: it
    searches.
    """

    name = "finemoe"
    host_only = True

    def __init__(self, maps=128):
        self.maps = check_count(self.name, "maps", maps)

    def init(self, xp, L, E, seed):
        if xp is not np:
            raise ValueError(
                "policy 'finemoe' searches a store on the host only: use transport 'callback', or back end 'numpy' in "
                "the simulator"
            )
        return {
            "maps": np.zeros((self.maps, L, E), np.float32),
            "size": 0,
            "dot": np.zeros(self.maps),
            "norm": np.zeros(self.maps),
            "current": np.zeros((L, E), np.float32),
            "now": L,
            "count": np.zeros((L, E), np.int32),
        }

    def observe(self, xp, state, layer, need, scores, t):
        if layer <= state["now"]:  # a pass begins: the last one becomes a map
            self._store(state)
        state["now"] = int(layer)
        state["count"][layer] += need
        state["current"][layer] = scores
        rows = state["maps"][: state["size"], layer].astype(np.float64)
        state["dot"][: state["size"]] += rows @ scores.astype(np.float64)
        state["norm"][: state["size"]] += (rows * rows).sum(axis=1)
        return state

    def _store(self, state):
        current = state["current"]
        if current.any():
            if state["size"] < self.maps:
                at, state["size"] = state["size"], state["size"] + 1
            else:  # the whole pass is compared by now, with one norm in common
                at = int(np.argmax(_cosine(state["dot"], state["norm"])))
            state["maps"][at] = current
        current.fill(0)
        state["dot"].fill(0)
        state["norm"].fill(0)

    def priority(self, xp, state, layer, expert, t):
        count = state["count"][layer, expert].astype(np.float32)
        if state["size"] == 0:
            return count
        best = int(np.argmax(_cosine(state["dot"], state["norm"])[: state["size"]]))
        return state["maps"][best, layer, expert] * count

    def reset(self, xp, state):
        state["count"].fill(0)
        return state


def _cosine(dot, norm):
    """[n] dot / sqrt(norm), 0 where the norm is 0; the other vector's norm is common to all."""
    return dot / np.sqrt(np.where(norm > 0, norm, np.inf))
