"""Routing: the kernel against NumPy in float64, and against the plain XLA path that other platforms take."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.router_topk import Routing, route

# What the families use, with and without the parts that are optional.
WAYS = {
    "mixtral": Routing(2, norm=1),
    "qwen3": Routing(4, norm=1, weights="bfloat16"),
    "olmoe": Routing(4, weights="bfloat16"),
    "gpt_oss": Routing(4, over_chosen=True, weights="bfloat16"),
    "dbrx": Routing(4, rounded="bfloat16", norm=1, weights="bfloat16"),
    "dbrx_p": Routing(3, norm=3),
    "dbrx_2": Routing(3, norm=2),
    "deepseek_v2": Routing(6, scale=16.0),
    "deepseek_v3": Routing(5, "sigmoid", norm=1, epsilon=1e-20, scale=2.5),
    "deepseek_v4": Routing(6, "sqrt_softplus", norm=1, epsilon=1e-20, scale=1.5, weights="bfloat16"),
}
BIASED = ("deepseek_v3", "deepseek_v4")
SHAPES = [(1, 60), (17, 33)]


def wide(logits, bias, how):
    """(ids, weights, scores) in float64; the choice sees what float32 and `rounded` leave of the scores."""
    z = np.asarray(logits, np.float64)
    power = np.exp(z - z.max(axis=-1, keepdims=True))
    scores = {
        "softmax": power / power.sum(axis=-1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-z)),
        "sqrt_softplus": np.sqrt(np.logaddexp(0, z)),
    }[how.score]
    values = z if how.over_chosen else scores
    if how.rounded:
        values = np.asarray(jnp.asarray(values, jnp.float32).astype(how.rounded), np.float64)
    choice = values + (0 if bias is None else np.asarray(bias, np.float64))
    picked = np.argsort(-choice, axis=-1, kind="stable")[:, : how.k]
    of_picked = np.take_along_axis(values, picked, axis=-1)
    order = np.lexsort((picked, -of_picked), axis=-1)
    ids, weights = np.take_along_axis(picked, order, axis=-1), np.take_along_axis(of_picked, order, axis=-1)
    if how.over_chosen:
        weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
    if how.norm is not None:
        weights = weights / ((weights**how.norm).sum(axis=-1, keepdims=True) ** (1 / how.norm) + how.epsilon)
    return ids, weights * how.scale, scores


def case(name, T, E, seed=0, dtype=np.float32):
    """Logits without near-ties, so that every precision chooses alike, and the bias of those that have one."""
    rng = np.random.default_rng([T, E, seed])
    logits = np.stack([rng.permutation(E) for _ in range(T)]) / E * 6 - 3
    bias = (rng.permutation(E) / E).astype(np.float32) if name in BIASED else None
    return jnp.asarray(logits, dtype), None if bias is None else jnp.asarray(bias)


@pytest.mark.parametrize(("T", "E"), SHAPES)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("name", WAYS)
def test_equals_float64(name, implementation, T, E):
    logits, bias = case(name, T, E)
    how = WAYS[name]
    ids, weights, scores = route(logits, how, bias=bias, implementation=implementation)
    assert (ids.dtype, weights.dtype, scores.dtype) == (jnp.int32, jnp.dtype(how.weights), jnp.float32)
    wanted = wide(logits, bias, how)
    np.testing.assert_allclose(scores, wanted[2], rtol=2e-6)
    if how.rounded is None:
        np.testing.assert_array_equal(ids, wanted[0])
    np.testing.assert_allclose(weights, wanted[1], rtol=1e-5 if how.weights == "float32" else 1e-2)


def test_16_bit_logits_are_widened_first():
    logits, _ = case("qwen3", 5, 60, dtype=jnp.bfloat16)
    a, b = (route(x, WAYS["qwen3"], implementation="interpret") for x in (logits, logits.astype(jnp.float32)))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["qwen3", "gpt_oss", "dbrx", "deepseek_v4"]),
    st.sampled_from([(3, 7)]),
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.5, -30.0, 30.0]), min_size=32, max_size=32),
)
def test_ties_fall_as_in_plain_xla(name, shape, values):
    T, E = shape
    logits = jnp.asarray(values[: T * E], jnp.float32).reshape(T, E)
    bias = jnp.asarray(np.arange(E) % 3 / 4, jnp.float32) if name in BIASED else None
    (a, u, s), (b, v, r) = (route(logits, WAYS[name], bias=bias, implementation=i) for i in ("interpret", "xla"))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(np.float32(u), np.float32(v), rtol=1e-2)
    np.testing.assert_allclose(s, r, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt_oss"])
def test_nan_and_inf_reach_the_weights(name, bad):
    """A softmax with one has NaN everywhere; the other rows stay as they are, and ids are distinct all the same."""
    logits, _ = case(name, 3, 8)
    clean = route(logits, WAYS[name], implementation="interpret")
    ids, weights, scores = route(logits.at[1, 2].set(bad), WAYS[name], implementation="interpret")
    assert np.isnan(scores[1]).all() and len(set(np.asarray(ids[1]).tolist())) == WAYS[name].k
    if name != "gpt_oss" or np.isposinf(bad):
        assert np.isnan(np.float32(weights[1])).any()
    for row in (0, 2):
        np.testing.assert_array_equal(weights[row], clean[1][row])


def test_bad_arguments_are_refused():
    for kwargs, message in [
        (dict(k=0), "k = 0"),
        (dict(k=2, score="softmin"), "softmin"),
        (dict(k=2, norm=-1.0), "norm = -1.0"),
        (dict(k=2, over_chosen=True, norm=1), "over_chosen"),
    ]:
        with pytest.raises(ValueError, match=message):
            Routing(**kwargs)
    with pytest.raises(ValueError, match="k = 9: must be from 1 to the 8 experts"):
        route(jnp.zeros((1, 8)), Routing(9))
    with pytest.raises(ValueError, match="implementation = 'cuda'"):
        route(jnp.zeros((1, 8)), Routing(2), implementation="cuda")
