"""MoE-Infinity as its code does it, which is not what its paper says (see `moe_infinity_paper`)."""

import numpy as np

from host_offload.policies.common import SPAN, from_key
from host_offload.policies.frequency import LFUInCache
from host_offload.policy import Policy, register, set_row
from host_offload.rounding import quotient

FLOOR = 2.0**-20  # what MoE-Infinity's priority function adds to each factor is 1e-6


@register
class MoEInfinityCode(LFUInCache):
    """What the public engine runs: the fewest visits since insertion leave first, counters cleared at each request.

    MoE-Infinity, revision d617801, `expert_dispatcher.cpp`: a scan over all layers' experts takes the smallest visit
    count, and of equals the first. So use scope `global` and contract `atomic-forced-admit` to compare with it.
    Exact up to (7 * 2^28) / (L * E) visits, equal beyond.
    """

    name = "moeinf_code"

    def priority(self, xp, state, layer, expert, t):
        L, E = state["count"].shape
        count = xp.minimum(state["count"][layer, expert], (7 * SPAN) // (L * E) - 1)
        return from_key(xp, count * (L * E) + layer * E + expert)


def layer_weights(L):
    """[L, L] float64: the weight of layer i while layer `now` runs, row `now`, in MoE-Infinity's priority function.

    Written there for encoder-decoder models, the first L // 2 layers being the encoder: layers of the running half up
    to `now` weigh 1, other encoder layers 1 - i / half, other decoder layers j / (half + 1), j counted in the decoder.
    """
    half = L // 2
    layers = np.arange(L)
    decay = np.where(layers < half, 1 - layers / max(half, 1), (layers - half) / (half + 1))
    now = layers[:, None]
    done = (layers <= now) & ((layers < half) == (now < half))
    return np.where(done, 1.0, decay)


@register
class MoEInfinityPriority(Policy):
    """The activation-aware score in MoE-Infinity's sources: priority = layer weight * request's share * overall share.

    MoE-Infinity, revision d617801, `expert_priority_score.py` (never called there): `layer_weights`, times the
    request's activation counts normalised per layer, times all counts so far; each matrix is scaled to sum 1 and
    raised by 2^-20 (1e-6 there). A layer, or half of the layers, without counts is taken as uniform.

    State: `request`, `total` [L, E] int32 event counts; `now` int32; `weight` [L, L] float32.
    """

    name = "moeinf_priority"
    uses_scores = False

    def init(self, xp, L, E, seed):
        weight = layer_weights(L)
        weight = weight / (weight.sum(axis=1, keepdims=True) * E) + FLOOR
        return {
            "request": xp.zeros((L, E), xp.int32),
            "total": xp.zeros((L, E), xp.int32),
            "now": xp.zeros((), xp.int32),
            "weight": xp.asarray(weight, xp.float32),
        }

    def observe(self, xp, state, layer, need, scores, t):
        return {
            "request": set_row(xp, state["request"], layer, state["request"][layer] + need),
            "total": set_row(xp, state["total"], layer, state["total"][layer] + need),
            "now": xp.asarray(layer, xp.int32),
            "weight": state["weight"],
        }

    def priority(self, xp, state, layer, expert, t):
        L = state["total"].shape[0]
        request = _or_one(xp, state["request"], state["request"].sum(axis=1, keepdims=True, dtype=xp.int32))
        rows = request.sum(axis=1, dtype=xp.int32) * L  # layers sum to 1 each, all of them to L
        total = state["total"]
        halves = [_or_one(xp, part, part.sum(dtype=xp.int32)) for part in (total[: L // 2], total[L // 2 :])]
        total = xp.concatenate(halves)
        counts, of = request[layer, expert].astype(xp.float32), rows[layer].astype(xp.float32)
        share = quotient(xp, counts, of) + np.float32(FLOOR)
        # The overall share times its sum over FLOOR, which saves a division; a product with a power of two is exact,
        # so fusing it with the sum changes nothing.
        overall = total[layer, expert].astype(xp.float32) * np.float32(1 / FLOOR) + total.sum(dtype=xp.int32)
        return state["weight"][state["now"], layer] * share * overall.astype(xp.float32)

    def reset(self, xp, state):
        return {**state, "request": xp.zeros_like(state["request"])}


def _or_one(xp, counts, total):
    return xp.where(total == 0, 1, counts).astype(xp.int32)
