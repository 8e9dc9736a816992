"""Routing statistics against numbers worked by hand, and their bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.bounds import belady
from host_offload.routing_stats import (
    activation_entropy,
    activation_matrices,
    adjacent_overlap,
    domain_similarity,
    segment_cache_hit_rate,
    segment_routing,
    top_share,
)
from host_offload.trace import Trace


def make_trace(experts, request=None, step=None, phase=None, E=4):
    """A trace from experts [T, L, K]; one request, one row a step and decode unless told otherwise."""
    experts = np.asarray(experts)
    T, L, K = experts.shape
    header = {
        "moe_layers": list(range(L)),
        "E": E,
        "K": K,
        "chunk": 4,
        "scope": "layer",
        "slots": L,
        "contract": "atomic-bypass",
        "policy": "lru",
        "model": "made up",
        "dtype": "float32",
    }
    columns = (np.zeros(T, int) if request is None else request, np.arange(T) if step is None else step)
    return Trace.from_rows(experts, np.ones((T, L, K)), np.ones(T, int) if phase is None else phase, *columns, header)


@st.composite
def traces(draw):
    T, L, E = draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = np.argsort(rng.random((T, L, E)), -1)[..., :2]
    return make_trace(experts, np.cumsum(rng.random(T) < 0.2), E=E)


def two_requests():
    """Two requests served together: layer 0 of request 5 reads 01, 01, 12, that of request 7 reads 23, 01."""
    return make_trace(
        [
            [[0, 1], [0, 3]],  # request 5, prefill
            [[3, 2], [2, 3]],  # request 7, prefill
            [[1, 0], [0, 3]],  # request 5
            [[0, 1], [2, 3]],  # request 7
            [[1, 2], [0, 3]],  # request 5
        ],
        request=[5, 7, 5, 7, 5],
        step=[0, 0, 1, 1, 2],
        phase=[0, 0, 1, 1, 1],
    )


def test_activation_matrices_by_hand():
    requests, matrices = activation_matrices(two_requests())
    assert requests.tolist() == [5, 7]
    assert matrices.tolist() == [[[2, 3, 1, 0], [3, 0, 0, 3]], [[1, 1, 1, 1], [0, 0, 2, 2]]]
    requests, matrices = activation_matrices(two_requests(), "prefill")
    assert matrices.tolist() == [[[1, 1, 0, 0], [1, 0, 0, 1]], [[0, 0, 1, 1], [0, 0, 1, 1]]]


def test_entropy_and_top_share_by_hand():
    counts = [[2, 2, 2, 2], [4, 4, 0, 0], [0, 0, 7, 0], [2, 1, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(activation_entropy(counts), [2, 1, 0, 1.5, np.nan])
    assert not np.signbit(activation_entropy(counts)[2])
    np.testing.assert_allclose(
        top_share(counts),
        [[0.25, 0.5, 0.75, 1], [0.5, 1, 1, 1], [1, 1, 1, 1], [0.5, 0.75, 1, 1], [np.nan] * 4],
    )


def test_adjacent_overlap_by_hand():
    # Layer 0: request 5 shares 2 of 2, then 1 of 2; request 7 shares none: 3 of 6. Layer 1 never changes: 6 of 6.
    assert adjacent_overlap(two_requests()).tolist() == [0.5, 1]
    # Two tokens apart there is one pair, 01 and 12 of request 5.
    assert adjacent_overlap(two_requests(), lag=2).tolist() == [0.5, 1]
    # Decode alone: request 5 has the pair 01, 12; request 7 has one token.
    assert adjacent_overlap(two_requests(), phase="decode").tolist() == [0.5, 1]
    assert np.isnan(adjacent_overlap(two_requests(), lag=3)).all()


def test_segment_routing_by_hand():
    # Segments of 2 in layer 0: request 5: 01 01 (0 twice, 1 twice), 01 12 (1 twice, 0 and 2 once); request 7: 23 01
    # (four once). Experts used twice: 3 of 12 pairs of (segment, expert); used once: 6. 3 * 2 * 2 = 12 activations.
    # Threshold 2: 6 right of 3 * 2 = 6 claimed: F1 = 12 / 18. Threshold 1: 12 right of 18 claimed: F1 = 24 / 30.
    found = segment_routing(two_requests(), 2)
    np.testing.assert_allclose(found.f1, [24 / 30, 1])
    np.testing.assert_allclose(found.size_ratio, [9 / 6, 1])
    assert found.segments == 3
    # Of one token everything is known; three tokens are only there in request 5: counts 2, 3, 1, 0.
    assert segment_routing(two_requests(), 1).f1.tolist() == [1, 1]
    found = segment_routing(two_requests(), 3)
    # Threshold 3: 3 right of 3: 6 / 9; threshold 2: 5 right of 6: 10 / 12; threshold 1: 6 of 9: 12 / 15.
    np.testing.assert_allclose(found.f1, [10 / 12, 1])
    np.testing.assert_allclose(found.size_ratio, [1, 1])


def test_segment_cache_by_hand():
    # One slot, 0 1 1 0 0 0, two ahead. Token 1 leaves 0 in the slot. Token 2 misses; next are 1 and 0, once each; the
    # lower id stays: token 3, a 1, misses. From then on 0 is kept: tokens 4, 5, 6 hit.
    trace = make_trace([[[e]] for e in (0, 1, 1, 0, 0, 0)])
    assert segment_cache_hit_rate(trace, 2, 1).tolist() == [3 / 6]
    # One ahead: after token 2 the next is 1, so 1 is kept and token 3 hits; token 4 misses, tokens 5 and 6 hit.
    assert segment_cache_hit_rate(trace, 1, 1).tolist() == [3 / 6]
    # 0 1 1 1, one ahead: 1 is kept after token 2. 0 1 2 1: only who looks two ahead keeps 1 after token 2.
    assert segment_cache_hit_rate(make_trace([[[e]] for e in (0, 1, 1, 1)]), 1, 1).tolist() == [2 / 4]
    assert segment_cache_hit_rate(make_trace([[[e]] for e in (0, 1, 2, 1)]), 2, 1).tolist() == [1 / 4]
    assert segment_cache_hit_rate(make_trace([[[e]] for e in (0, 1, 2, 1)]), 1, 1).tolist() == [0]
    # Two slots hold both.
    assert segment_cache_hit_rate(trace, 2, 2).tolist() == [4 / 6]
    # A request starts with nothing: the same tokens as three requests of two.
    trace = make_trace([[[e]] for e in (0, 1, 1, 0, 0, 0)], request=[0, 0, 1, 1, 2, 2])
    assert segment_cache_hit_rate(trace, 2, 2).tolist() == [1 / 6]
    # Four experts, three slots, two ahead: what the future uses more often stays, whatever its id.
    trace = make_trace([[[0, 1]], [[2, 3]], [[3, 1]], [[3, 0]], [[2, 0]]])
    # After 01: 0 1. After 23: next 31 30: 3 twice, 0 and 1 once, 2 not: 0 1 3. 31: 2 hits. Next 30 20: 0 twice, 2 and 3
    # once, but 2 is gone: 0 3 and 1. 30: 2 hits. 20: 0 hits.
    assert segment_cache_hit_rate(trace, 2, 3).tolist() == [5 / 10]


def test_domain_similarity_by_hand():
    matrices = np.array([[[1, 0], [2, 0]], [[0, 5], [1, 0]], [[2, 0], [0, 1]]])
    names, similarity = domain_similarity(matrices, ["code", "law", "code"])
    assert names == ["code", "law"]
    # code: [[3, 0], [2, 1]], law: [[0, 5], [1, 0]]: cosines 0 and 2 / sqrt(5).
    np.testing.assert_allclose(similarity, [[1, 1 / np.sqrt(5)], [1 / np.sqrt(5), 1]])


@settings(max_examples=25, deadline=None)
@given(trace=traces(), length=st.integers(1, 5), slots=st.integers(1, 6))
def test_bounds_hold(trace, length, slots):
    L, E = len(trace.header["moe_layers"]), trace.header["E"]
    slots = min(slots, E)
    requests, matrices = activation_matrices(trace)
    assert (matrices.sum(-1) == 2 * np.bincount(trace.request)[requests][:, None]).all()
    entropy = activation_entropy(matrices)
    assert (entropy >= 1 - 1e-12).all() and (entropy <= np.log2(E) + 1e-12).all()
    hit = segment_cache_hit_rate(trace, length, slots)
    optimum = belady(trace, slots_per_layer=slots).per_layer["hit_rate"]
    assert (hit <= optimum + 1e-12).all()
    if slots == E:
        np.testing.assert_allclose(hit, optimum)
    if max(np.bincount(trace.request)) >= length:
        found = segment_routing(trace, length)
        groups = brute_force_f1(trace, length)
        np.testing.assert_allclose(found.f1, groups)
        overlap = adjacent_overlap(trace)
        assert overlap.shape == found.f1.shape == (L,)


def brute_force_f1(trace, length):
    """SRP by choosing, for each number of members, the pairs of (segment, expert) with the most activations."""
    out = []
    for layer in range(len(trace.header["moe_layers"])):
        used, segments = [], 0
        for request in np.unique(trace.request):
            rows = trace.experts[trace.request == request, layer]
            for start in range(len(rows) - length + 1):
                used += np.bincount(rows[start : start + length].ravel(), minlength=trace.header["E"]).tolist()
                segments += 1
        right = np.cumsum(sorted(used, reverse=True))
        claimed = length * np.arange(1, len(used) + 1)
        out.append((2 * right / (claimed + length * 2 * segments)).max())
    return out


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda t: activation_matrices("run.npz"), "trace"),
        (lambda t: activation_matrices(t, "both"), "phase"),
        (lambda t: adjacent_overlap(t, lag=0), "lag"),
        (lambda t: segment_routing(t, 0), "length"),
        (lambda t: segment_routing(t, 4), "length: no request has 4 tokens; the longest has 3"),
        (lambda t: segment_cache_hit_rate(t, 1.5, 1), "length"),
        (lambda t: segment_cache_hit_rate(t, 1, 0), "slots"),
        (lambda t: segment_cache_hit_rate(t, 1, 5), "slots"),
        (lambda t: activation_entropy([[-1, 2]]), "counts"),
        (lambda t: top_share(np.array(["a"])), "counts"),
        (lambda t: domain_similarity(np.ones((2, 1, 3)), ["a"]), "domains"),
        (lambda t: domain_similarity(-np.ones((1, 1, 3)), ["a"]), "counts"),
    ],
)
def test_bad_values_are_named(call, field):
    with pytest.raises(ValueError, match=f"^{field}"):
        call(two_requests())


def test_no_rows():
    trace = make_trace([[[0]], [[1]]])
    requests, matrices = activation_matrices(trace, "prefill")
    assert requests.shape == (0,) and matrices.shape == (0, 1, 4)
    assert np.isnan(segment_cache_hit_rate(trace, 1, 1, phase="prefill")).all()
    assert np.isnan(adjacent_overlap(trace, phase="prefill")).all()
