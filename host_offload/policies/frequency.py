"""Least frequently used, in its variants: counts of all accesses or since insertion, forgotten at a request or not."""

from host_offload.policy import LFU, Policy, register, set_row


@register
class LFUPersistent(LFU):
    """`lfu` that never forgets: priority = accesses since the cache was made, resident or not. The textbook rule."""

    name = "lfu-persistent"
    shares = None

    def reset(self, xp, state):
        return state


@register
class LFUInCachePersistent(Policy):
    """Least frequently used since it came in: the count ends with the eviction. The textbook rule of most real caches.

    State: `count` [L, E] int32, accesses since insertion, the inserting one included; 0 for absent experts.
    """

    name = "lfu-incache-persistent"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {"count": xp.zeros((L, E), xp.int32)}

    def observe(self, xp, state, layer, need, scores, t):
        return {"count": set_row(xp, state["count"], layer, state["count"][layer] + need)}

    def priority(self, xp, state, layer, expert, t):
        return state["count"][layer, expert].astype(xp.float32)

    def commit(self, xp, state, layer, resident, t):
        return {"count": xp.where(resident, state["count"], 0)}


@register
class LFUInCache(LFUInCachePersistent):
    """Least frequently used since it came in or since the request began, whichever is later."""

    name = "lfu-incache"

    def reset(self, xp, state):
        return {"count": xp.zeros_like(state["count"])}
