"""Arithmetic of policies that must round alike everywhere: the division, and that they use no other that may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload import rounding
from host_offload.policy import fresh_state, get_policy, list_policies
from host_offload.rounding import long_division, quotient

L, E = 3, 8
# What IEEE 754 defines to the last bit on every device, or what does not compute. Not among them: division (an
# approximation on a GPU), roots, powers, exponentials, sums and products of many.
EXACT = {
    *("add", "sub", "mul", "neg", "abs", "max", "min", "sign", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "select_n"),
    *("convert_element_type", "bitcast_convert_type", "broadcast_in_dim", "reshape", "squeeze", "transpose"),
    *("concatenate", "slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "copy", "rev", "pad"),
    *("reduce_max", "reduce_min", "argmax", "argmin", "sort", "stop_gradient"),
}
jitted = [name for name in list_policies() if not get_policy(name).host_only]

quotient_jax = jax.jit(lambda a, b: quotient(jnp, a, b))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), bits=st.tuples(st.integers(1, 31), st.integers(1, 31)))
def test_quotient_rounds_as_numpy_does(seed, bits):
    draw = np.random.default_rng(seed)
    a, b = (draw.integers(0, 2**n, 4096).astype(np.float32) for n in bits)
    b = np.maximum(b, 1)
    want = quotient(np, a, b)
    assert want.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(quotient_jax(a, b)).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("ulps", [-4, -2, -1, 1, 2, 4])
def test_quotient_does_not_depend_on_how_the_reciprocal_rounds(ulps):
    draw = np.random.default_rng(ulps + 4)
    a, b = (draw.integers(1, 2**24, 200_000).astype(np.float32) for _ in range(2))

    def wrong(number):
        return ((1 / number).view(jnp.int32) + ulps).view(jnp.float32)

    got = jax.jit(lambda a, b: long_division(jnp, a, b, wrong))(a, b)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), quotient(np, a, b).view(np.uint32))


def test_quotient_of_close_numbers_and_of_fractions():
    a = np.arange(2**24 - 64, 2**24, dtype=np.float32)
    grid = np.concatenate([a, a / 2**20, np.float32([0, 1, 2, 3, 2**-60, 2**60])])
    want = quotient(np, grid[:, None], np.maximum(grid, 2.0**-60)[None])
    got = quotient(jnp, grid[:, None], np.maximum(grid, 2.0**-60)[None])
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))


def inexact(jaxpr):
    """Names of the primitives on floats in `jaxpr`, and in what it calls, that may round otherwise on a GPU."""
    found = set()
    for equation in jaxpr.eqns:
        inner = [part for value in equation.params.values() for part in jax.tree.leaves(value) if hasattr(part, "eqns")]
        inner += [
            part.jaxpr
            for value in equation.params.values()
            for part in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "jaxpr"))
            if hasattr(part, "jaxpr")
        ]
        for part in inner:
            found |= inexact(part)
        floats = any(jnp.issubdtype(variable.aval.dtype, jnp.floating) for variable in equation.outvars)
        if floats and not inner and equation.primitive.name not in EXACT:
            found.add(equation.primitive.name)
    return found


def test_the_search_sees_a_division_inside_a_call():
    assert inexact(jax.make_jaxpr(jax.jit(lambda x: jnp.exp(x) / x))(1.0).jaxpr) == {"exp", "div"}


@pytest.mark.parametrize("name", jitted)
def test_policies_compute_with_exact_operations_only(name, monkeypatch):
    def stands_in(xp, a, b, reciprocal):  # its own tests are above: the guess within may be any
        return xp.where(a == 0, 0, b)

    monkeypatch.setattr(rounding, "long_division", stands_in)
    policy = get_policy(name)
    capacity = np.full(L, 3, np.int32)

    def event(state, need, scores, resident, t):
        layer = jnp.int32(1)
        state = policy.observe(jnp, state, layer, need, scores, t)
        expert = jnp.arange(E, dtype=jnp.int32)
        ranked = policy.priority(jnp, state, jnp.full_like(expert, 1), expert, t)
        if policy.in_cache:
            state = policy.commit(jnp, state, layer, resident, t)
        return ranked, policy.reset(jnp, state)

    state = fresh_state(policy, jnp, L, E, 0, capacity, jnp.asarray(True))
    arguments = state, jnp.ones(E, bool), jnp.ones(E, jnp.float32), jnp.ones((L, E), bool), jnp.int32(7)
    assert inexact(jax.make_jaxpr(event)(*arguments).jaxpr) == set()
