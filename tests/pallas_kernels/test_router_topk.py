"""Router top-k: the kernel against `lax.top_k`, and against a sort in plain Python where `lax.top_k` differs (NaN)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.router_topk import router_topk

# (T, E, k): one row, few, whole programs of 16 and a rest; E a power of two and not; k from 1 to E.
SHAPES = [(1, 8, 2), (5, 60, 4), (16, 64, 8), (17, 60, 60), (33, 128, 8), (40, 7, 1), (3, 1, 1), (20, 16, 16)]


def both(scores, k):
    """(values, ids) of the kernel, and of `lax.top_k`, as NumPy arrays."""
    scores = jnp.asarray(scores, jnp.float32)
    got = router_topk(scores, k, interpret=True)
    assert [a.dtype for a in got] == [jnp.float32, jnp.int32]
    assert [a.shape for a in got] == [(scores.shape[0], k)] * 2
    return tuple(map(np.asarray, got)), tuple(map(np.asarray, jax.lax.top_k(scores, k)))


def assert_same(got, expected):
    for name, a, b in zip(("values", "ids"), got, expected, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "E", "k"), SHAPES)
def test_it_is_top_k_of_the_scores_a_router_gives(T, E, k):
    logits = np.random.default_rng([T, E, k]).normal(scale=3, size=(T, E))
    assert_same(*both(jax.nn.softmax(jnp.asarray(logits, jnp.float32)), k))


@pytest.mark.parametrize(("T", "E", "k"), SHAPES)
def test_ties_take_the_lower_id_first(T, E, k):
    scores = np.random.default_rng([T, E, k]).choice(np.float32([0.0, 0.25, 0.5, -np.inf, np.inf, -3.0]), size=(T, E))
    got, expected = both(scores, k)
    assert_same(got, expected)
    assert all(len(set(row)) == k for row in got[1].tolist())


@pytest.mark.parametrize("k", [1, 3, 60])
def test_rows_without_a_finite_score_still_give_distinct_ids(k):
    """All -inf, all NaN, or both: the lowest ids, each once."""
    scores = np.full((18, 60), -np.inf, np.float32)
    scores[1::3] = np.nan
    scores[2::3, ::2] = np.nan
    (values, ids), _ = both(scores, k)
    np.testing.assert_array_equal(values, np.full((18, k), -np.inf))
    np.testing.assert_array_equal(ids, np.tile(np.arange(k), (18, 1)))


def test_nan_counts_as_minus_infinity():
    """It comes after every number, level with -inf, and is returned as -inf."""
    scores = np.float32([[np.nan, 1.0, -np.inf, np.nan, -5.0, np.inf]])
    (values, ids), _ = both(scores, 6)
    assert ids.tolist() == [[5, 1, 4, 0, 2, 3]]
    assert values.tolist() == [[np.inf, 1.0, -5.0, -np.inf, -np.inf, -np.inf]]


def test_zeros_of_both_signs_are_equal():
    (values, ids), _ = both(np.float32([[-0.0, 0.0, -0.0, -1.0]]), 3)
    assert ids.tolist() == [[0, 1, 2]] and values.tolist() == [[0.0, 0.0, 0.0]]


# No subnormals: a platform may flush them to zero, which ties them.
SPECIAL = [0.0, 1.0, 0.5, 2e-38, -2e-38, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_it_sorts_by_score_then_by_id(data):
    """A stable descending sort, with NaN read as -inf."""
    T, E, k = data.draw(st.sampled_from([(1, 8, 2), (17, 6, 6), (2, 5, 1)]))
    scores = np.array(data.draw(st.lists(st.sampled_from(SPECIAL), min_size=T * E, max_size=T * E)), np.float32)
    scores = scores.reshape(T, E)
    (values, ids), _ = both(scores, k)
    read = np.where(np.isnan(scores), -np.inf, scores).astype(np.float32)
    for row, got_values, got_ids in zip(read, values, ids, strict=True):
        expected = sorted(range(E), key=lambda e: (-row[e], e))[:k]
        assert got_ids.tolist() == expected
        np.testing.assert_array_equal(got_values, row[expected])


@pytest.mark.parametrize("k", [0, -1, 9])
def test_more_experts_than_there_are_are_refused(k):
    with pytest.raises(ValueError, match=f"k = {k}: must be from 1 to the 8 experts"):
        router_topk(jnp.zeros((2, 8)), k, interpret=True)
