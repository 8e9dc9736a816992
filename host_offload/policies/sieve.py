"""SIEVE: lazy promotion, quick demotion."""

from host_offload.policies.common import SPAN, age_key, by_age, competing, in_scope, put_back
from host_offload.policy import Policy, register, set_row

BEHIND, VISITED, ABSENT = 1, 2, 4


@register
class SIEVE(Policy):
    """FIFO queue in which nothing moves: a hand sweeps from old to new, spares visited experts once, evicts the rest.

    Zhang et al., SIEVE is simpler than LRU, NSDI 2024. The hand clears the bits it passes, stays where it evicted, and
    begins at the old end again after the new one. Unlike CLOCK, spared experts keep their place, so newcomers meet
    the hand soon.

    Nothing moves, so the place in the queue is the time of insertion, and by falling expert among those that came
    together. Who leaves next is found without a walk: first by whether the hand meets it before a second round, then
    before it turns, then by age. Exact for ages below 2^28 ticks.

    State: `since` [L, E] int32, the clock of the event that brought the expert in, -1 absent; `tier` [L, E] int32, 0 if
    the hand will come to the expert before it turns, 1 if after, 2 more if visited, 4 absent; `global` bool, one queue
    for all layers, missing if the scope is known to be `layer`.
    """

    name = "sieve"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {"since": xp.full((L, E), -1, xp.int32), "tier": xp.full((L, E), ABSENT, xp.int32)}

    def bound(self, xp, state, capacity, global_scope):
        return state if global_scope is False else {**state, "global": xp.asarray(global_scope)}

    def observe(self, xp, state, layer, need, scores, t):
        tier = state["tier"][layer]
        tier = xp.where(need & (tier != ABSENT), tier | VISITED, tier)
        return {**state, "tier": set_row(xp, state["tier"], layer, tier)}

    def priority(self, xp, state, layer, expert, t):
        return by_age(xp, state["tier"][layer, expert], t - state["since"][layer, expert])

    def commit(self, xp, state, layer, resident, t):
        since, tier, resident = (competing(state, layer, a) for a in (state["since"], state["tier"], resident))
        scope = in_scope(xp, state, layer, since.shape[0])
        expert = xp.arange(since.shape[1], dtype=xp.int32)
        old = tier != ABSENT
        left = old & ~resident
        # In the order in which the hand takes them: the last one that it took, -1 if nobody left.
        key = age_key(xp, tier, t - since)
        last = xp.where(left, key, -1).max()
        last_expert = xp.where(left & (key == last), expert, expert.shape[0]).min()
        again = last >= VISITED * SPAN  # it came round to where it began, and has cleared every bit
        moved = scope & (last >= 0)

        def until_last(size):
            """Who comes before the last one or is it, by the key modulo `size`, a power of two."""
            mine, other = key & (size - 1), last & (size - 1)
            return (mine < other) | ((mine == other) & (expert >= last_expert))

        visited = (tier >= VISITED) & ~(moved & (until_last(VISITED * SPAN) | again))
        behind = until_last(SPAN)  # by place in the queue, wherever the hand was before
        at_end = ~(scope & old & resident & ~behind).any()
        behind = xp.where(moved, behind & ~at_end, (tier & BEHIND) != 0)
        stay = xp.where(old, VISITED * visited + BEHIND * behind, 0)
        rows = {
            "since": xp.where(resident, xp.where(old, since, t), -1),
            "tier": xp.where(resident, stay, ABSENT).astype(xp.int32),
        }
        return {**state, **{name: put_back(xp, state, layer, state[name], row) for name, row in rows.items()}}
