"""Minus recent score, HybriMoE's rule."""

import numpy as np

from host_offload.policies.common import check_count, check_share, truncated
from host_offload.policy import Policy, register, set_row

ONE = 2**16  # fixed point of a score; a prefill chunk may sum up to 2^15 of them


@register
class MRS(Policy):
    """Router scores, averaged over the recent past: S <- rate * g + (1 - rate) * S, where g is the score if it is among
    the layer's `top` highest of the event, else 0; priority = S.

    HybriMoE, arXiv 2504.05897: `rate` 0.5; `top` is twice the experts a token in the paper, 12 in its code. Scores are
    those of the event, summed over its rows. State: `score` [L, E] int32, S in units of 2^-16; `rate` float32.
    """

    name = "mrs"

    def __init__(self, rate=0.5, top=12):
        self.rate = check_share(self.name, "rate", rate, 0, 1)
        self.top = check_count(self.name, "top", top)

    def init(self, xp, L, E, seed):
        return {
            "score": xp.zeros((L, E), xp.int32),
            "rate": xp.asarray(self.rate, xp.float32),
            "top": xp.asarray(self.top, xp.int32),
        }

    def observe(self, xp, state, layer, need, scores, t):
        # The order of ties is stable: the lower id counts.
        ids = xp.arange(scores.shape[0])
        higher = (scores[None, :] > scores[:, None]) | ((scores[None, :] == scores[:, None]) & (ids < ids[:, None]))
        top = higher.sum(axis=1, dtype=xp.int32) < state["top"]
        gain = truncated(xp, xp.where(top, scores * np.float32(ONE), np.float32(0)), state["rate"])
        score = gain + truncated(xp, state["score"][layer], 1 - state["rate"])
        return {**state, "score": set_row(xp, state["score"], layer, score)}

    def priority(self, xp, state, layer, expert, t):
        return state["score"][layer, expert].astype(xp.float32)
