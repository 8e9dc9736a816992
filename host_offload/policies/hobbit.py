"""HOBBIT's weighted sum of recency, frequency, importance and layer distance."""

import numpy as np

from host_offload.policies.common import check_share, from_key, truncated
from host_offload.policy import AccessPolicy, register, set_row
from host_offload.rounding import quotient

ONE = 2**20  # fixed point of a term


@register
class HOBBIT(AccessPolicy):
    """priority = w1 * R / t + w2 * F / T + w3 * H / T + w4 * (1 - ((l - l_now) mod L) / L).

    HOBBIT, arXiv 2411.01433. R is the clock of the last access, t the clock now; F the accesses and H the *important*
    ones since the request began, T the steps so far. HOBBIT serves important accesses in high precision: those where
    the experts of the event with higher scores hold at most `importance` (0.6 there) of the scores of all that it
    needs. The weights [4] are tuned by calibration there; a quarter each here.

    State: LRU's and LFU's, `important` [L, E] int32, `now` int32, `weights` [4] and `threshold` float32.
    """

    name = "hobbit"
    shares = None
    uses_scores = True

    def __init__(self, weights=(0.25, 0.25, 0.25, 0.25), importance=0.6):
        if len(weights) != 4:
            raise ValueError(
                f"hobbit policy: weights has {len(weights)} numbers, expected 4, for recency, frequency, importance "
                "and distance"
            )
        self.weights = tuple(check_share(self.name, f"weights[{i}]", w, 0, 1) for i, w in enumerate(weights))
        self.importance = check_share(self.name, "importance", importance, 0, 1)

    def init(self, xp, L, E, seed):
        return {
            **super().init(xp, L, E, seed),
            "important": xp.zeros((L, E), xp.int32),
            "now": xp.zeros((), xp.int32),
            "weights": xp.asarray(self.weights, xp.float32),
            "threshold": xp.asarray(self.importance, xp.float32),
        }

    def observe(self, xp, state, layer, need, scores, t):
        # In integers, for sums of floats differ with their order; 2^14 leaves room for chunks of 2^17 tokens.
        held = truncated(xp, xp.where(need, scores, np.float32(0)), np.float32(2**14))
        ids = xp.arange(held.shape[0])
        higher = (held[None, :] > held[:, None]) | ((held[None, :] == held[:, None]) & (ids < ids[:, None]))
        above = xp.where(higher, held[None, :], 0).sum(axis=1, dtype=xp.int32)
        important = need & (above <= truncated(xp, held.sum(dtype=xp.int32), state["threshold"]))
        seen = super().observe(xp, state, layer, need, scores, t)
        rows = set_row(xp, state["important"], layer, state["important"][layer] + important)
        return {**state, **seen, "important": rows, "now": xp.asarray(layer, xp.int32)}

    def priority(self, xp, state, layer, expert, t):
        L = state["last"].shape[0]

        def term(index, number, of):
            unit = quotient(xp, np.float32(ONE), xp.asarray(of).astype(xp.float32)) * state["weights"][index]
            return xp.minimum(truncated(xp, number[layer, expert], unit), ONE)

        steps = t // L + 1
        near = L - (layer - state["now"]) % L  # L at the running layer, 1 at the one before it
        distance = truncated(xp, state["weights"][3], np.float32(ONE)) * near // L
        recency = term(0, state["last"] + 1, t + 1)
        return from_key(xp, recency + term(1, state["count"], steps) + term(2, state["important"], steps) + distance)

    def reset(self, xp, state):
        fresh = super().reset(xp, state)
        return {**fresh, "important": xp.zeros_like(state["important"])}
