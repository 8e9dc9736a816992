"""Naive Bayes over co-occurrence tables: what the experts seen now say about those of a later layer.

For each expert e of the target layer, with S the experts that are known,

    score(e) = log P(e) + w * sum over i in S of log(P(i | e) / P(i))

P(e) is the share of tokens that needed e, P(i | e) the share of those tokens that had i in S: counts of `fit`, with
`pseudo` imagined tokens that follow P(i), so that a pair never seen says little. S is the source layer's set in the
cross-layer table, and the target layer's set of the token before in the temporal one.
"""

import numpy as np

from host_offload.policy import set_row
from host_offload.predictor import Predictor, register_predictor
from host_offload.predictors.replay import fitted_shape, request_needs

# Imagined tokens a pair. Between 0.3 and 10 the recall on real traces moves by less than 0.002.
PSEUDO = 10.0


def pair_needs(need, layer, distance):
    """Aligned sets of one request's tokens, need [T, L, E] bool: (source, before, target) [n, E] bool.

    source: what `layer` needed; target: what the layer `distance` after it needed, in the same token or, past the last
    layer, in the next; before: what the target layer had needed when `layer` ran (nothing for the first token).
    """
    T, L, E = need.shape
    target_layer, later = (layer + distance) % L, (layer + distance) // L  # later: 0 same token, 1 the next one
    source = need[: T - later, layer]
    target = need[later:, target_layer]
    before = np.zeros_like(target)
    before[1 - later :] = need[: len(target) - 1 + later, target_layer]
    return source, before, target


def log_evidence(pairs, source, target, tokens):
    """float32 [E, E]: log(P(i | e) / P(i)) at [i, e], from counts: pairs [E, E], source [E], target [E], tokens."""
    share = (source + 1) / (tokens + len(source))  # never 0: an expert that fit never saw is no evidence
    given = (pairs + PSEUDO * share[:, None]) / (target[None, :] + PSEUDO)
    return np.log(given / share[:, None]).astype(np.float32)


class TableCounts:
    """Which experts were needed together, counted over any number of requests: what the tables are made of.

    Attributes (float64 images of counts; products of 0 and 1 count exactly and run as matrix products):
      cross [lead, L, E, E]: tokens in which i was needed at the source layer and e at the layer `distance` after it, at
        [distance - 1, source layer, i, e]. source, target [lead, L, E]: the same for i and for e alone; pairs [lead,
        L]: tokens that were looked at. temporal [L, E, E]: tokens that needed e right after one that needed i; before,
        after [L, E]: the same for i and for e alone; following: tokens that have one before them. total [L, E]: tokens
        that needed e;
        tokens: how many there were.
    """

    ARRAYS = ("cross", "source", "target", "pairs", "temporal", "before", "after", "total")

    def __init__(self, L, E, lead=1, *, cross=True, temporal=True):
        if lead > L:
            raise ValueError(f"lead_layers: {lead} is more than the {L} MoE layers of the traces")
        self.lead = lead
        self.cross = np.zeros((lead if cross else 0, L, E, E))
        self.source, self.target = np.zeros((lead, L, E)), np.zeros((lead, L, E))
        self.pairs = np.zeros((lead, L))
        self.temporal = np.zeros((L if temporal else 0, E, E))
        self.before, self.after, self.total = (np.zeros((L, E)) for _ in range(3))
        self.tokens = self.following = 0

    def add(self, need, earlier=None):
        """Counts consecutive tokens of one request, need [T, L, E] bool; `earlier` [L, E] is the token before them."""
        fresh = len(need)
        if earlier is not None:
            need = np.concatenate([earlier[None], need])
        real = need.astype(np.float64)
        old = len(need) - fresh
        self.tokens += fresh
        self.total += real[old:].sum(axis=0)
        self.following += len(real) - 1
        self.before += real[:-1].sum(axis=0)
        self.after += real[1:].sum(axis=0)
        for layer in range(real.shape[1]):
            if len(self.temporal):
                self.temporal[layer] += real[:-1, layer].T @ real[1:, layer]
            for ahead in range(1, len(self.cross) + 1):
                source, _, target = pair_needs(real, layer, ahead)
                if layer + ahead < real.shape[1]:  # in the same token: the earlier one was counted with its own
                    source, target = source[old:], target[old:]
                at = ahead - 1, layer
                self.cross[at] += source.T @ target
                self.source[at] += source.sum(axis=0)
                self.target[at] += target.sum(axis=0)
                self.pairs[at] += len(source)

    def prior(self):
        """float32 [L, E]: log P(e)."""
        return np.log((self.total + 1) / (self.tokens + self.total.shape[-1])).astype(np.float32)

    def cross_evidence(self):
        """float32 [lead, L, E, E], see `log_evidence`."""
        out = np.empty(self.cross.shape, np.float32)
        for at in np.ndindex(self.cross.shape[:2]):
            out[at] = log_evidence(self.cross[at], self.source[at], self.target[at], self.pairs[at])
        return out

    def temporal_evidence(self):
        """float32 [L, E, E]."""
        sides = zip(self.temporal, self.before, self.after, strict=True)
        return np.stack([log_evidence(pairs, before, after, self.following) for pairs, before, after in sides])


class _Tables(Predictor):
    """What the tables share: fitting, and the state {`last` [L, E] bool, the latest set of each layer; the tables}.

    `cross` [lead, L, E, E]: evidence at [distance - 1, source layer, i, e]; `temporal` [L, E, E]: at [target layer,
    i, e]; `prior` [L, E]: log P(e).
    """

    needs_fit = True
    learned = ("prior", "cross", "temporal")
    by_layer = ("last",)
    cross_weight = temporal_weight = 0.0

    def __init__(self, **declared):
        super().__init__(**declared)
        self._prior = self._cross = self._temporal = None

    def fit(self, traces):
        traces = list(traces)
        L, E = fitted_shape(traces)
        parts = {"cross": bool(self.cross_weight), "temporal": bool(self.temporal_weight)}
        counts = TableCounts(L, E, self.lead_layers, **parts)
        for need in request_needs(traces):
            counts.add(need)
        if not counts.tokens:
            raise ValueError(f"predictor {self.name!r}: fit: the traces hold no tokens")
        self._take(counts)
        return self

    def learn(self, seen):
        if seen.counts.lead < self.lead_layers:
            raise ValueError(f"predictor {self.name!r}: lead_layers {self.lead_layers}, counted are {seen.counts.lead}")
        if seen.counts.tokens:
            self._take(seen.counts)
        return bool(seen.counts.tokens)

    def _take(self, counts):
        self._prior = counts.prior()
        self._cross = counts.cross_evidence() if self.cross_weight else None
        self._temporal = counts.temporal_evidence() if self.temporal_weight else None

    def init(self, xp, L, E, seed):
        self._check_fitted(None if self._prior is None else self._prior[None], L, E)
        state = {"last": xp.zeros((L, E), bool), "prior": xp.array(self._prior)}
        for name, table in (("cross", self._cross), ("temporal", self._temporal)):
            if table is not None:
                state[name] = xp.array(table)
        return state

    def observe(self, xp, state, layer, need, scores, t, recorded=None):
        return {**state, "last": set_row(xp, state["last"], layer, need)}

    def predict(self, xp, state, layer_now, target_layer):
        ahead = self.distance(state["last"].shape[0], layer_now, target_layer)
        score = state["prior"][target_layer]
        if self.cross_weight:
            now = state["last"][layer_now].astype(xp.float32)
            score = score + self.cross_weight * (now @ state["cross"][ahead - 1, layer_now])
        if self.temporal_weight:
            before = state["last"][target_layer].astype(xp.float32)
            score = score + self.temporal_weight * (before @ state["temporal"][target_layer])
        return score

    def reset(self, xp, state):
        return {**state, "last": xp.zeros_like(state["last"])}


@register_predictor
class CrossLayer(_Tables):
    """From the experts of the layer that has just routed (l -> l + d): one table a layer and distance."""

    name = "cross-layer"
    cross_weight = 1.0
    cost_us = 8.0


@register_predictor
class Temporal(_Tables):
    """From the experts that the target layer needed for the token before (t - 1 -> t)."""

    name = "temporal"
    temporal_weight = 1.0
    cost_us = 8.0


@register_predictor
class CrossLayerTemporal(_Tables):
    """The sum of both: one prior, the evidence of the source layer, and that of the token before at a lower weight.

    Naive Bayes takes the two as independent, which they are not; the weight corrects for part of that.
    """

    name = "cross-layer+temporal"
    cross_weight = 1.0
    temporal_weight = 0.3
    cost_us = 14.0
