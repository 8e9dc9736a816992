"""LFU with dynamic aging."""

from host_offload.policies.common import competing, from_key, put_back
from host_offload.policy import Policy, register, set_row


@register
class LFUDA(Policy):
    """In-cache frequency plus the cache's age when last used; the age is the key of the last that left.

    Dilley and Arlitt, Improving proxy cache performance, IEEE Internet Computing 3(6), 1999; all experts cost the same.
    An expert that is bypassed has left too: its key raises the age, so that newcomers win in the end.

    State: `count` [L, E] int32, accesses since insertion; `key` [L, E] int32, 0 absent; `age` [L] int32, equal for all
    layers when `global`, a bool that is missing if the scope is known to be `layer`.
    """

    name = "lfu-da"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {
            "count": xp.zeros((L, E), xp.int32),
            "key": xp.zeros((L, E), xp.int32),
            "age": xp.zeros((L,), xp.int32),
        }

    def bound(self, xp, state, capacity, global_scope):
        return state if global_scope is False else {**state, "global": xp.asarray(global_scope)}

    def observe(self, xp, state, layer, need, scores, t):
        count, key = state["count"][layer] + need, state["key"][layer]
        # A newcomer has no key yet: it enters with the age that the evictions of this event leave behind.
        key = xp.where(need & (key > 0), count + state["age"][layer], key)
        return {
            **state,
            "count": set_row(xp, state["count"], layer, count),
            "key": set_row(xp, state["key"], layer, key),
        }

    def priority(self, xp, state, layer, expert, t):
        return from_key(xp, _with_newcomers(xp, state["count"], state["key"], state["age"])[layer, expert])

    def commit(self, xp, state, layer, resident, t):
        arrays = (state["count"], state["key"], state["age"], resident)
        count, key, age, resident = (competing(state, layer, array) for array in arrays)
        left = xp.where(resident, 0, _with_newcomers(xp, count, key, age)).max(axis=1)  # [R], 0 where nobody left
        if "global" in state:
            left = xp.where(state["global"], left.max(), left)
        age = xp.maximum(age, left)
        rows = {
            "age": age,
            "count": xp.where(resident, count, 0),
            "key": xp.where(resident, _with_newcomers(xp, count, key, age), 0),
        }
        return {**state, **{name: put_back(xp, state, layer, state[name], row) for name, row in rows.items()}}


def _with_newcomers(xp, count, key, age):
    """`key` [R, E] with the keys that newcomers get at `age` [R]."""
    return xp.where((count > 0) & (key == 0), 1 + age[:, None], key)
