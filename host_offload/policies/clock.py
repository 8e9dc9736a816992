"""Second chance."""

from host_offload.policies.common import SPAN, from_key, in_scope, requeue
from host_offload.policy import Policy, register, set_row


@register
class CLOCK(Policy):
    """FIFO in which a hit earns one more round: the hand passes an expert with its bit set, clears the bit, goes on.

    Corbato, A paging experiment with the Multics system, 1968. Kept as the equivalent queue: what the hand passes
    goes to its end. Newcomers enter behind, with the bit clear. Eviction order: clear bits in queue order, then (second
    round of the hand) set ones in queue order.

    State: `place` [L, E] int32 in the queue, -1 absent; `used` [L, E] bool; `global` bool, one queue for all layers.
    """

    name = "clock"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {
            "place": xp.full((L, E), -1, xp.int32),
            "used": xp.zeros((L, E), bool),
            "global": xp.zeros((), bool),
        }

    def bound(self, xp, state, capacity, global_scope):
        return {**state, "global": global_scope}

    def observe(self, xp, state, layer, need, scores, t):
        used = state["used"][layer] | (need & (state["place"][layer] >= 0))
        return {**state, "used": set_row(xp, state["used"], layer, used)}

    def priority(self, xp, state, layer, expert, t):
        place, used = state["place"][layer, expert], state["used"][layer, expert]
        return from_key(xp, xp.where(place < 0, 2 * SPAN, used * SPAN + place))

    def commit(self, xp, state, layer, resident, t):
        place, used, scope = state["place"], state["used"], in_scope(xp, state, layer)
        left = (place >= 0) & ~resident
        round_two = (left & used).any()  # then the first round has cleared every bit
        last = xp.where(left & (used | ~round_two), place, -1).max()
        passed = scope & resident & (place >= 0) & (place < last)
        used = resident & used & ~(passed | (scope & round_two))
        return {**state, "place": requeue(xp, place, resident, passed), "used": used}
