"""The collection of `moeinf_paper`: match, proximity, replacement, saving; numbers worked by hand."""

import numpy as np
import pytest

from host_offload.policies import MoEInfinityPaper
from host_offload.policies.moe_infinity_paper import activation_matrices
from host_offload.trace import Trace

# Two requests that begin with different experts in layer 0 and then differ in layers 1 and 2.
LEFT = [[4, 0], [3, 1], [1, 3]]
RIGHT = [[0, 4], [1, 3], [4, 0]]


def observed(policy, needs, state=None):
    state = policy.init(np, 3, 2, 0) if state is None else state
    for layer, need in enumerate(needs):
        policy.observe(np, state, layer, np.array(need, bool), np.zeros(2), np.int32(layer))
    return state


def test_match_over_the_layers_that_ran():
    policy = MoEInfinityPaper(matches=1, collection=np.array([LEFT, RIGHT]))
    state = observed(policy, [[0, 1]])  # like RIGHT: cosine 1, against 0
    np.testing.assert_allclose(policy.predicted(state), [[0, 1], [0.25, 0.75], [1, 0]])
    both = MoEInfinityPaper(matches=2, collection=np.array([LEFT, RIGHT]))
    np.testing.assert_allclose(both.predicted(observed(both, [[0, 1]])), [[0.5, 0.5], [0.5, 0.5], [0.625, 0.375]])


def test_near_layers_weigh_more():
    policy = MoEInfinityPaper(matches=1, collection=np.array([LEFT, RIGHT]))
    state = observed(policy, [[0, 1]])  # layer 0 runs: 1 is next, 2 after it, 0 last
    layer, expert = np.array([0, 1, 2]), np.array([1, 1, 0])
    np.testing.assert_allclose(policy.priority(np, state, layer, expert, 0), [1 / 3, 0.75, 2 / 3], rtol=1e-6)


def test_a_finished_request_joins_and_then_replaces_its_most_similar(tmp_path):
    policy = MoEInfinityPaper(capacity=2, collection=np.array([LEFT]))
    state = policy.reset(np, observed(policy, [[0, 1], [0, 1], [1, 0]]))  # joins, as the second
    assert state["size"] == 2 and state["collection"][1].tolist() == [[0, 1], [0, 1], [1, 0]]
    assert not state["request"].any()
    policy.reset(np, observed(policy, [[1, 0], [1, 1], [0, 1]], state))  # cosine to LEFT 11/12, to the other 1/sqrt(12)
    assert state["collection"].tolist() == [[[1, 0], [1, 1], [0, 1]], [[0, 1], [0, 1], [1, 0]]]
    policy.save(state, tmp_path / "requests.npz")
    again = MoEInfinityPaper(collection=tmp_path / "requests.npz").init(np, 3, 2, 0)
    np.testing.assert_array_equal(again["collection"][: again["size"]], state["collection"])
    with pytest.raises(ValueError, match=r"collection has \[L, E\] = \(3, 2\), the model needs \(3, 4\)"):
        MoEInfinityPaper(collection=tmp_path / "requests.npz").init(np, 3, 4, 0)


def test_an_empty_request_leaves_the_collection_alone():
    policy = MoEInfinityPaper()
    assert policy.reset(np, policy.init(np, 3, 2, 0))["size"] == 0


def test_collection_of_a_trace():
    header = {"moe_layers": [0, 1], "E": 3, "K": 1, "chunk": 4, "scope": "layer", "slots": 2}
    header |= {"contract": "atomic-bypass", "policy": "lru", "model": "hand", "dtype": "float32"}
    experts = np.array([[[0], [1]], [[0], [2]], [[0], [1]], [[2], [1]]])  # request 0: a chunk of two tokens, one more
    trace = Trace.from_rows(experts, np.ones((4, 2, 1)), [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 1, 2], header)
    assert activation_matrices(trace).tolist() == [[[2, 0, 0], [0, 2, 1]], [[0, 0, 1], [0, 1, 0]]]
    assert MoEInfinityPaper(collection=trace).init(np, 2, 3, 0)["size"] == 2
