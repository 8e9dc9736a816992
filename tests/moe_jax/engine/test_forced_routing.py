"""The override alone: given positions have the given routing, others the router's."""

import jax.numpy as jnp
import numpy as np

from moe_jax.engine.forced_routing import ForcedRouting, force

B, S, L, K, E = 2, 4, 3, 2, 5


def forced(scores=None):
    rng = np.random.default_rng(0)
    ids = rng.random((B, S, L, E)).argsort(-1)[..., :K].astype(np.int16)
    given = np.zeros((B, S), bool)
    given[0, 1] = given[1, 3] = True
    weights = np.sort(rng.random((B, S, L, K)))[..., ::-1].astype(np.float16)
    return ForcedRouting(given, ids, weights, scores)


def routed(routing, positions, layer=1):
    """What reaches `experts` of a router that chooses 0 and 1 everywhere: ids, weights, scores by row of B * T."""
    N = positions.size
    ids = jnp.tile(jnp.arange(K, dtype=jnp.int32), (N, 1))
    weights, scores = jnp.full((N, K), 0.5, jnp.bfloat16), jnp.full((N, E), 0.2, jnp.float32)

    def experts(layer, x, ids, weights, scores, live, token_ids, state):
        return (ids, weights, scores), state

    call = force(experts, routing, jnp.asarray(positions))
    (out, state) = call(layer, None, ids, weights, scores, None, None, "state")
    assert state == "state"
    assert [array.dtype for array in out] == [jnp.int32, jnp.bfloat16, jnp.float32]
    return [np.asarray(array, np.float32) for array in out]


def test_given_positions_are_forced_and_others_are_not():
    routing = forced()
    ids, weights, scores = routed(routing, np.array([[1], [2]]))
    np.testing.assert_array_equal(ids, [routing.ids[0, 1, 1], [0, 1]])
    np.testing.assert_array_equal(
        weights[0], np.asarray(jnp.asarray(routing.weights[0, 1, 1], jnp.bfloat16), np.float32)
    )
    assert weights[1].tolist() == [0.5, 0.5]
    expected = np.zeros(E, np.float32)
    expected[routing.ids[0, 1, 1]] = routing.weights[0, 1, 1]
    np.testing.assert_array_equal(scores[0], expected)
    np.testing.assert_array_equal(scores[1], np.full(E, 0.2, np.float32))


def test_rows_of_several_tokens_and_given_scores():
    told = np.random.default_rng(1).random((B, S, L, E)).astype(np.float16)
    routing = forced(told)
    ids, _, scores = routed(routing, np.array([[0, 1], [2, 3]]), layer=2)
    np.testing.assert_array_equal(ids, [[0, 1], routing.ids[0, 1, 2], [0, 1], routing.ids[1, 3, 2]])
    np.testing.assert_array_equal(scores[[1, 3]], told[[0, 1], [1, 3], 2].astype(np.float32))


def test_without_routing_nothing_is_wrapped():
    def experts():
        """Any callable."""

    assert force(experts, None, jnp.zeros((1, 1))) is experts
