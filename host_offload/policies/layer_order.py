"""Recency that knows in which order the layers run."""

from host_offload.policies.common import by_age, check_count
from host_offload.policy import AccessPolicy, register


@register
class LayerAwareLRU(AccessPolicy):
    """LRU that spares the running layer and the next `ahead` ones: those, then the others, each by recency.

    As in MoE-Infinity's layer-aware LRU (arXiv 2401.14361), where the next two layers are spared. After the last
    layer comes the first of the next step. In scope `layer` only one layer competes, so it is LRU there. State:
    LRU's, and `now` int32, the layer of the event.
    """

    name = "lru-layer-aware"
    shares = None

    def __init__(self, ahead=2):
        self.ahead = check_count(self.name, "ahead", ahead)

    def init(self, xp, L, E, seed):
        now = {"now": xp.zeros((), xp.int32), "ahead": xp.asarray(self.ahead, xp.int32)}
        return {**super().init(xp, L, E, seed), **now}

    def observe(self, xp, state, layer, need, scores, t):
        return {**state, **super().observe(xp, state, layer, need, scores, t), "now": xp.asarray(layer, xp.int32)}

    def priority(self, xp, state, layer, expert, t):
        distance = (layer - state["now"]) % state["last"].shape[0]
        return by_age(xp, (distance <= state["ahead"]).astype(xp.int32), t - state["last"][layer, expert])


@register
class LeastStale(AccessPolicy):
    """Experts that this forward pass has not touched leave first, each group by recency.

    SpecMD, arXiv 2602.03921. Without prefetch this *is* LRU: every access of this pass is later than any of an
    earlier pass (noted in arXiv 2608.07911). State: LRU's; `now`, the layer of the event; `began` int32, the clock at
    which the pass began, seen by the layer number not rising.
    """

    name = "least-stale"
    shares = None

    def init(self, xp, L, E, seed):
        return {**super().init(xp, L, E, seed), "now": xp.asarray(L, xp.int32), "began": xp.zeros((), xp.int32)}

    def observe(self, xp, state, layer, need, scores, t):
        layer = xp.asarray(layer, xp.int32)
        began = xp.where(layer <= state["now"], t, state["began"]).astype(xp.int32)
        return {**super().observe(xp, state, layer, need, scores, t), "now": layer, "began": began}

    def priority(self, xp, state, layer, expert, t):
        last = state["last"][layer, expert]
        return by_age(xp, (last >= state["began"]).astype(xp.int32), t - last)
