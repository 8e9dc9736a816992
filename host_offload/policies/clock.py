"""Second chance."""

from host_offload.policies.common import SPAN, competing, count_before, from_key, in_scope, put_back
from host_offload.policy import Policy, register, set_row


@register
class CLOCK(Policy):
    """FIFO in which a hit earns one more round: the hand passes an expert with its bit set, clears the bit, goes on.

    Corbato, A paging experiment with the Multics system, 1968. Kept as the equivalent queue: what the hand passes
    goes to its end. Newcomers enter behind, with the bit clear. Eviction order: clear bits in queue order, then (second
    round of the hand) set ones in queue order.

    State: `place` [L, E] int32 in the layer's queue, 0 is the head, -1 absent; `used` [L, E] bool; `global` bool, one
    queue for all layers, missing if the scope is known to be `layer`.
    """

    name = "clock"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {"place": xp.full((L, E), -1, xp.int32), "used": xp.zeros((L, E), bool)}

    def bound(self, xp, state, capacity, global_scope):
        return state if global_scope is False else {**state, "global": xp.asarray(global_scope)}

    def observe(self, xp, state, layer, need, scores, t):
        used = state["used"][layer] | (need & (state["place"][layer] >= 0))
        return {**state, "used": set_row(xp, state["used"], layer, used)}

    def priority(self, xp, state, layer, expert, t):
        place, used = state["place"][layer, expert], state["used"][layer, expert]
        return from_key(xp, xp.where(place < 0, 2 * SPAN, used * SPAN + place))

    def commit(self, xp, state, layer, resident, t):
        newcomer = resident[layer] & (state["place"][layer] < 0)
        place, used, resident = (competing(state, layer, a) for a in (state["place"], state["used"], resident))
        scope = in_scope(xp, state, layer, place.shape[0])
        old = scope & (place >= 0)
        left = old & ~resident
        round_two = (left & used).any()  # then the first round has cleared every bit
        last = xp.where(left & (used | ~round_two), place, -1).max()
        passed = old & resident & (place < last)
        used = resident & used & ~(passed | (scope & round_two))
        # Who left makes room; who was passed, now at the head, goes behind the others; newcomers follow by falling id.
        stay = old.sum(dtype=xp.int32) - left.sum(dtype=xp.int32)
        rank = place - count_before(xp, place, left)
        rank = rank + xp.where(passed, stay, 0) - passed.sum(dtype=xp.int32)
        ids = xp.arange(newcomer.shape[0])
        behind = stay + (newcomer[None, :] & (ids[None, :] > ids[:, None])).sum(axis=1, dtype=xp.int32)
        place = xp.where(old, rank, xp.where(place < 0, behind, place))
        rows = {"place": xp.where(resident, place, -1), "used": used}
        return {**state, **{name: put_back(xp, state, layer, state[name], row) for name, row in rows.items()}}
