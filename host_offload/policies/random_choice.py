"""Random eviction."""

import numpy as np

from host_offload.policy import Policy, register


@register
class RandomChoice(Policy):
    """Anyone may leave: priority = hash(seed, layer * E + expert, t), new at every event. The textbook's null policy.

    The hash is a 32-bit multiply-and-shift mixer, of which the upper 24 bits count, so that a compiled program, the
    host and a replay with the same seed keep the same experts. Newcomers draw like residents.
    """

    name = "random"
    uses_scores = False

    def init(self, xp, L, E, seed):
        return {"seed": xp.asarray(int(seed) % 2**32, xp.uint32), "experts": xp.asarray(E, xp.int32)}

    def observe(self, xp, state, layer, need, scores, t):
        return state

    def priority(self, xp, state, layer, expert, t):
        ids = (layer * state["experts"] + expert).astype(xp.uint32)
        word = ids * np.uint32(0x9E3779B1) + xp.full_like(ids, state["seed"])
        for more in (xp.zeros_like(ids) + xp.asarray(t).astype(xp.uint32), ids):
            word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
            word = (word ^ (word >> 15)) * np.uint32(0x846CA68B) + more
        word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
        return (word >> 8).astype(xp.float32)
