"""How a model routes: which experts, how evenly, and for how long it stays with them.

Everything here looks at tokens, not at events of a cache: a batch of requests gives the same figures as the requests
one after the other. Tokens of a request are ordered by step, then as recorded. Shape letters: T rows, L MoE layers, E
experts a layer, K experts a token, R requests.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from host_offload.trace import PHASES, Trace


def activation_matrices(trace, phase=None):
    """Returns (requests [R] int32 rising, matrices [R, L, E] int64): each request's expert activation matrix.

    An entry counts the tokens of the request that were sent to the expert (EAM of MoE-Infinity, arXiv 2401.14361), so
    every row sums to K times the request's tokens. `phase` "prefill" or "decode" leaves out the other's tokens, here
    and below. Raises ValueError for another phase.
    """
    L, E = _sizes(trace)
    parts = list(_requests(trace, phase))
    matrices = np.zeros((len(parts), L, E), np.int64)
    for matrix, (_, experts) in zip(matrices, parts, strict=True):
        matrix[:] = _chosen(experts, E).sum(0)
    return np.array([request for request, _ in parts], np.int32), matrices


def activation_entropy(counts):
    """Returns [...] float64, the entropy in bits of each row of `counts` [..., E], NaN for a row of zeros.

    log2(E) means that all experts are used alike, log2(K) that the same K always are. Raises ValueError for negative
    counts.
    """
    share = _shares(counts)
    logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
    return np.abs(-(share * logs).sum(-1))


def top_share(counts):
    """Returns [..., E] float64: entry n - 1 is the share of a row's activations that its n most used experts take.

    `counts` [..., E], such as `activation_matrices(trace)[1].sum(0)`; NaN for a row of zeros. The last entry is 1.
    Raises ValueError for negative counts.
    """
    return np.cumsum(-np.sort(-_shares(counts), axis=-1), axis=-1)


def adjacent_overlap(trace, *, lag=1, phase=None):
    """Returns [L] float64: the mean share of a token's K experts that the token `lag` earlier in its request chose too.

    K / E is what independent, uniform routing gives. NaN if no request has more than `lag` tokens. Raises ValueError
    for a lag below 1.
    """
    _check_count("lag", lag)
    L, E = _sizes(trace)
    shared, pairs = np.zeros(L, np.int64), 0
    for _, experts in _requests(trace, phase):
        chosen = _chosen(experts, E)
        shared += (chosen[lag:] & chosen[:-lag]).sum((0, 2))
        pairs += max(len(experts) - lag, 0)
    with np.errstate(invalid="ignore"):
        return shared / np.float64(pairs * trace.header["K"])


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentRouting:
    """Local routing consistency of each layer, see `segment_routing`.

    f1: [L] float64, SRP. size_ratio: [L] float64, experts of the best groups over K. segments: how many there were.
    """

    f1: np.ndarray
    size_ratio: np.ndarray
    segments: int


def segment_routing(trace, length, *, phase=None):
    """Segment routing best performance, SRP (arXiv 2505.16056): how well fixed groups of experts serve segments.

    A segment is `length` (m) consecutive tokens of a request, at every position. For each segment and layer a group of
    experts is chosen with the segment known; it is right about an activation if the expert is in the group and wrong
    about each of the group's other (token, expert) pairs. SRP is the highest F1 over all ways to choose groups,

        F1 = 2 sum_g n_g / (m sum_g 1 + m K segments),

    with n_g the tokens of the segment that use the expert and g over the experts of the groups. It is reached by the
    groups of experts with n >= x for one threshold x. SRP is 1 if the experts never change within a segment.

    Returns a `SegmentRouting`; the model's figure is the mean over layers. Raises ValueError for a length below 1 or
    longer than every request.
    """
    _check_count("length", length)
    L, E = _sizes(trace)
    K = trace.header["K"]
    histogram = np.zeros((L, length + 1), np.int64)  # how often an expert is used by n tokens of a segment
    segments, longest = 0, 0
    for _, experts in _requests(trace, phase):
        longest = max(longest, len(experts))
        if len(experts) < length:
            continue
        total = np.zeros((len(experts) + 1, L, E), np.int32)
        np.cumsum(_chosen(experts, E), axis=0, out=total[1:])
        used = total[length:] - total[:-length]  # [segments, L, E]
        segments += len(used)
        bins = np.arange(L)[:, None] * (length + 1) + used
        histogram += np.bincount(bins.ravel(), minlength=histogram.size).reshape(histogram.shape)
    if not segments:
        raise ValueError(f"length: no request has {length} tokens; the longest has {longest}")

    def at_least(values):  # [L, length]: over thresholds 1..length
        return np.cumsum(values[:, :0:-1], axis=1)[:, ::-1]

    members, right = at_least(histogram), at_least(histogram * np.arange(length + 1))
    f1 = 2 * right / (length * members + length * K * segments)
    best = f1.argmax(1)
    layers = np.arange(L)
    return SegmentRouting(f1[layers, best], members[layers, best] / (segments * K), segments)


def segment_cache_hit_rate(trace, length, slots, *, phase=None):
    """Segment cache best hit rate, SCH (arXiv 2505.16056): a cache that sees `length` tokens ahead.

    Each layer has `slots` experts (the paper's rho is slots / K), empty when a request begins. After each token it
    keeps, of those cached and those the token used, the ones that the request's next `length` tokens use most often;
    ties keep the lower id. Returns [L] float64, hits over activations, NaN without tokens. Never above
    `bounds.belady(..., slots_per_layer=slots)` of the same requests one by one. Raises ValueError for a length or a
    number of slots out of range.
    """
    _check_count("length", length)
    L, E = _sizes(trace)
    _check_count("slots", slots)
    if slots > E:
        raise ValueError(f"slots: {slots} is more than the {E} experts of a layer")
    hits, tokens = np.zeros(L, np.int64), 0
    lower_id_first = np.arange(E - 1, -1, -1)
    for _, experts in _requests(trace, phase):
        chosen = _chosen(experts, E)
        total = np.zeros((len(experts) + 1, L, E), np.int32)
        np.cumsum(chosen, axis=0, out=total[1:])
        cached = np.zeros((L, E), bool)
        for t, needed in enumerate(chosen):
            hits += (needed & cached).sum(1)
            ahead = total[min(t + 1 + length, len(experts))] - total[t + 1]
            key = np.where(cached | needed, ahead * E + lower_id_first, -1)
            cached = (key >= np.partition(key, E - slots, axis=1)[:, E - slots, None]) & (key >= 0)
        tokens += len(experts)
    with np.errstate(invalid="ignore"):
        return hits / np.float64(tokens * trace.header["K"])


def domain_similarity(matrices, domains):
    """Compares domains by the experts they use.

    Args:
        matrices: [R, L, E] counts of requests, from `activation_matrices`.
        domains: R names, one a request.

    Returns:
        (names, similarity): the distinct names in order of first appearance and [D, D] float64, the mean over layers of
        the cosine between two domains' summed counts. 1 on the diagonal; an empty layer of a domain gives NaN.

    Raises:
        ValueError: another number of names than requests, or negative counts.
    """
    matrices, domains = np.asarray(matrices), list(domains)
    if matrices.ndim != 3 or len(domains) != len(matrices):
        raise ValueError(
            f"domains: {len(domains)} names for matrices of shape {matrices.shape}; expected one for each of [R, L, E]"
        )
    _check_counts(matrices)
    names = list(dict.fromkeys(domains))
    of_domain = np.zeros((len(names), *matrices.shape[1:]), np.float64)
    np.add.at(of_domain, [names.index(domain) for domain in domains], matrices)
    with np.errstate(invalid="ignore"):
        unit = of_domain / np.linalg.norm(of_domain, axis=-1, keepdims=True)
    return names, np.einsum("ale,ble->abl", unit, unit).mean(-1)


def _requests(trace, phase) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (request, experts [tokens, L, K]) by rising request number, tokens in order."""
    if phase is not None and phase not in PHASES:
        raise ValueError(f"phase: expected None, 'prefill' or 'decode', got {phase!r}")
    rows = np.arange(len(trace.phase)) if phase is None else np.flatnonzero(trace.phase == PHASES[phase])
    rows = rows[np.lexsort((trace.step[rows], trace.request[rows]))]
    cuts = np.flatnonzero(np.diff(trace.request[rows])) + 1
    for group in np.split(rows, cuts) if len(rows) else ():
        yield int(trace.request[group[0]]), trace.experts[group]


def _sizes(trace):
    if not isinstance(trace, Trace):
        raise ValueError(
            f"trace: expected a host_offload.trace.Trace, got {type(trace).__name__}; Trace.load reads one"
        )
    return len(trace.header["moe_layers"]), trace.header["E"]


def _chosen(experts, E):
    """[tokens, L, E] bool from ids [tokens, L, K]."""
    chosen = np.zeros((*experts.shape[:2], E), bool)
    np.put_along_axis(chosen, experts.astype(np.int64), True, axis=2)
    return chosen


def _shares(counts):
    counts = np.asarray(counts)
    _check_counts(counts)
    with np.errstate(invalid="ignore"):
        return counts / counts.sum(-1, keepdims=True, dtype=np.float64)


def _check_counts(counts):
    if counts.dtype.kind not in "iuf" or not (counts >= 0).all():
        raise ValueError("counts: expected numbers of at least 0")


def _check_count(name, value):
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name}: {value!r} is not an integer of at least 1")
