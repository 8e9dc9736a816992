"""Frequencies that fade: decayed LFU and LRFU."""

import numpy as np

from host_offload.policies.common import check_share, truncated
from host_offload.policy import ElementwisePolicy, Policy, register, set_row

ONE = 2**12  # fixed point of a count: the largest sum of a fading series stays below 2^24, where float32 is exact
TABLE = 4096  # ages of LRFU in steps; older ones count as the oldest


@register
class DecayedLFU(ElementwisePolicy):
    """Accesses that fade by the factor `decay` at every event of their layer: f <- decay * f + need; priority = f.

    Aging as in Robinson and Devarakonda, SIGMETRICS 1990, with a step for a period. State: `count` [L, E] int32, f in
    units of 2^-12; `decay` float32, from 0 to 0.999.
    """

    name = "lfu-decayed"

    def __init__(self, decay=0.9):
        self.decay = check_share(self.name, "decay", decay, 0, 0.999)

    def init(self, xp, L, E, seed):
        return {"count": xp.zeros((L, E), xp.int32), "decay": xp.asarray(self.decay, xp.float32)}

    def seen(self, xp, own, need, t):
        count = truncated(xp, own["count"], own["decay"]) + xp.where(need, ONE, 0).astype(xp.int32)
        return {**own, "count": count}

    def worth(self, xp, own, t, L):
        return own["count"].astype(xp.float32)


@register
class LRFU(Policy):
    """Between LRU and LFU: priority = sum over past accesses i of 2^(-rate * (t - t_i)), ages in steps.

    Lee et al., LRFU, IEEE Transactions on Computers 50(12), 2001: rate -> 0 gives LFU, rate 1 LRU. State: `sum` [L, E]
    int32, the sum at the last access in units of 2^-12; `last` [L, E] int32, its clock, -1 never; `weight` [4096]
    float32, 2^(-rate * age), not below 2^-100, so that nothing becomes subnormal; `rate` is from 0.001 to 1.
    """

    name = "lrfu"
    uses_scores = False

    def __init__(self, rate=0.1):
        self.rate = check_share(self.name, "rate", rate, 0.001, 1)

    def init(self, xp, L, E, seed):
        weight = np.exp2(np.maximum(-self.rate * np.arange(TABLE), -100)).astype(np.float32)
        return {
            "sum": xp.zeros((L, E), xp.int32),
            "last": xp.full((L, E), -1, xp.int32),
            "weight": xp.asarray(weight),
        }

    def _weight(self, xp, state, last, t):
        steps = (t - last) // state["last"].shape[0]
        return state["weight"][xp.clip(steps, 0, TABLE - 1)]

    def observe(self, xp, state, layer, need, scores, t):
        old, last = state["sum"][layer], state["last"][layer]
        faded = truncated(xp, old, self._weight(xp, state, last, t))
        return {
            **state,
            "sum": set_row(xp, state["sum"], layer, xp.where(need, faded + ONE, old)),
            "last": set_row(xp, state["last"], layer, xp.where(need, t, last)),
        }

    def priority(self, xp, state, layer, expert, t):
        weight = self._weight(xp, state, state["last"][layer, expert], t)
        return state["sum"][layer, expert].astype(xp.float32) * weight
