"""First in, first out."""

from host_offload.policies.common import by_age
from host_offload.policy import Policy, register, set_row


@register
class FIFO(Policy):
    """The expert that has been in its slot longest leaves first: priority = -(t - since). The textbook rule.

    State: `since` [L, E] int32, the clock of the event that brought the expert in, -1 for absent ones. Missing experts
    count as inserted when they are observed; `commit` takes those back that got no slot.
    """

    name = "fifo"
    uses_scores = False
    in_cache = True

    def init(self, xp, L, E, seed):
        return {"since": xp.full((L, E), -1, xp.int32)}

    def observe(self, xp, state, layer, need, scores, t):
        since = state["since"][layer]
        return {"since": set_row(xp, state["since"], layer, xp.where(need & (since < 0), t, since))}

    def priority(self, xp, state, layer, expert, t):
        return by_age(xp, 0, t - state["since"][layer, expert])

    def commit(self, xp, state, layer, resident, t):
        return {"since": xp.where(resident, state["since"], -1)}
