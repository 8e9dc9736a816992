"""SIEVE: lazy promotion, quick demotion."""

from host_offload.policies.common import SPAN, from_key, in_scope, requeue
from host_offload.policy import Policy, register, set_row


@register
class SIEVE(Policy):
    """FIFO queue in which nothing moves: a hand sweeps from old to new, spares visited experts once, evicts the rest.

    Zhang et al., SIEVE is simpler than LRU, NSDI 2024. The hand clears the bits it passes, stays where it evicted, and
    begins at the old end again after the new one. Unlike CLOCK, spared experts keep their place, so newcomers meet
    the hand soon.

    State: `place` [L, E] int32 in the queue, -1 absent; `visited`, `ahead` [L, E] bool, whether the hand will come to
    the expert before it turns; `global` bool, one queue for all layers.
    """

    name = "sieve"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {
            "place": xp.full((L, E), -1, xp.int32),
            "visited": xp.zeros((L, E), bool),
            "ahead": xp.ones((L, E), bool),
            "global": xp.zeros((), bool),
        }

    def bound(self, xp, state, capacity, global_scope):
        return {**state, "global": global_scope}

    def observe(self, xp, state, layer, need, scores, t):
        visited = state["visited"][layer] | (need & (state["place"][layer] >= 0))
        return {**state, "visited": set_row(xp, state["visited"], layer, visited)}

    def priority(self, xp, state, layer, expert, t):
        place, visited = state["place"][layer, expert], state["visited"][layer, expert]
        tier = 2 * visited + ~state["ahead"][layer, expert]
        return from_key(xp, xp.where(place < 0, 4 * SPAN, tier * SPAN + place))

    def commit(self, xp, state, layer, resident, t):
        place, visited, ahead = state["place"], state["visited"], state["ahead"]
        scope, n = in_scope(xp, state, layer), place.size
        left = (place >= 0) & ~resident
        again = (left & visited).any()  # the hand came round to where it began: every bit is clear
        sweep = place + xp.where(ahead, 0, n)  # order in which the hand meets the residents
        last = xp.where(left & (visited | ~again), sweep, -1).max()
        visited = resident & visited & ~(scope & (again | ((place >= 0) & (sweep < last))))
        hand = last % n
        moved = scope & (last >= 0)
        still_ahead = (place > hand) & resident
        turned = ~(still_ahead & scope).any()
        ahead = xp.where(moved, still_ahead | turned | (place < 0), ahead) | ~resident
        return {
            **state,
            "place": requeue(xp, place, resident, resident & False),
            "visited": visited,
            "ahead": ahead,
        }
