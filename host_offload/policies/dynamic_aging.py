"""LFU with dynamic aging."""

from host_offload.policies.common import from_key
from host_offload.policy import Policy, register, set_row


@register
class LFUDA(Policy):
    """In-cache frequency plus the cache's age when last used; the age is the key of the last that left.

    Dilley and Arlitt, Improving proxy cache performance, IEEE Internet Computing 3(6), 1999; all experts cost the same.
    An expert that is bypassed has left too: its key raises the age, so that newcomers win in the end.

    State: `count` [L, E] int32, accesses since insertion; `key` [L, E] int32, 0 absent; `age` [L] int32, equal for all
    layers when `global`, a bool.
    """

    name = "lfu-da"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {
            "count": xp.zeros((L, E), xp.int32),
            "key": xp.zeros((L, E), xp.int32),
            "age": xp.zeros((L,), xp.int32),
            "global": xp.zeros((), bool),
        }

    def bound(self, xp, state, capacity, global_scope):
        return {**state, "global": xp.asarray(global_scope)}

    def observe(self, xp, state, layer, need, scores, t):
        count, key = state["count"][layer] + need, state["key"][layer]
        # A newcomer has no key yet: it enters with the age that the evictions of this event leave behind.
        key = xp.where(need & (key > 0), count + state["age"][layer], key)
        return {
            **state,
            "count": set_row(xp, state["count"], layer, count),
            "key": set_row(xp, state["key"], layer, key),
        }

    def _with_newcomers(self, xp, state):
        entering = (state["count"] > 0) & (state["key"] == 0)
        return xp.where(entering, 1 + state["age"][:, None], state["key"])

    def priority(self, xp, state, layer, expert, t):
        return from_key(xp, self._with_newcomers(xp, state)[layer, expert])

    def commit(self, xp, state, layer, resident, t):
        left = xp.where(resident, 0, self._with_newcomers(xp, state)).max(axis=1)  # [L], 0 where nobody left
        left = xp.where(state["global"], left.max(), left)
        aged = {**state, "age": xp.maximum(state["age"], left)}
        return {
            **aged,
            "count": xp.where(resident, state["count"], 0),
            "key": xp.where(resident, self._with_newcomers(xp, aged), 0),
        }
