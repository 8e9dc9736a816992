"""`turn_heads`: the kernel and the plain path against NumPy in float64; the rest of the pools stays as it is."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.row_norm import RowNorm
from pallas_kernels.turn_heads import HeadNorm, turn_heads

PAGE, PAGES = 4, 7


def operands(B=2, N=4, G=2, H=8, R=4, *, kind=None, over_all=False, step=1, clip=None, dtype="float32", seed=0):
    rng = np.random.default_rng([B, N, G, H, R, seed])

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    norm = kind and HeadNorm(RowNorm(1e-5, kind), over_all)
    weights = {name: draw(n * H if over_all else H) for name, n in (("q_weight", N), ("k_weight", G))} if norm else {}
    angles = rng.uniform(-3, 3, (B, R))
    return dict(
        heads=draw(B, N * step + 2 * G, H),
        keys=draw(PAGES, PAGE, G, H),
        values=draw(PAGES, PAGE, G, H),
        page_table=jnp.asarray(rng.permutation(np.arange(1, PAGES))[: 3 * B].reshape(B, -1), jnp.int32),
        positions=jnp.asarray(rng.integers(0, 3 * PAGE // 2, B), jnp.int32),
        live=jnp.ones(B, jnp.int32),
        cos=jnp.asarray(np.cos(angles), dtype) if R else None,
        sin=jnp.asarray(np.sin(angles), dtype) if R else None,
        query_heads=N,
        step=step,
        norm=norm,
        clip=clip,
        **weights,
    )


def wide(given):
    """(q, keys, values) in float64 without roundings in between."""
    arrays = {k: np.asarray(v, np.float64) for k, v in given.items() if isinstance(v, jnp.ndarray)}
    heads, N, step, norm = arrays["heads"], given["query_heads"], given["step"], given["norm"]
    G = given["keys"].shape[2]
    parts = {"q": heads[:, : N * step : step].copy(), "k": heads[:, -2 * G : -G].copy(), "v": heads[:, -G:].copy()}
    for name in ("q", "k") if norm else ():
        x, w = parts[name], arrays[f"{name}_weight"]
        axes = (1, 2) if norm.over_all else (2,)
        w = w.reshape(x.shape[1:]) if norm.over_all else w
        w = 1 + w if norm.row.kind == "zero_centred" else w
        parts[name] = x / np.sqrt(np.mean(x**2, axis=axes, keepdims=True) + norm.row.eps) * w
    if given["clip"] is not None:
        parts = {k: np.clip(x, -given["clip"], given["clip"]) for k, x in parts.items()}
    if given["cos"] is not None:
        cos, sin = arrays["cos"][:, None], arrays["sin"][:, None]
        R = cos.shape[-1]
        for name in ("q", "k"):
            x = parts[name]
            a, b = x[..., :R].copy(), x[..., R : 2 * R].copy()
            x[..., :R], x[..., R : 2 * R] = a * cos - b * sin, b * cos + a * sin
    keys, values = arrays["keys"].copy(), arrays["values"].copy()
    for b, position in enumerate(np.asarray(given["positions"])):
        page = int(given["page_table"][b, position // PAGE]) if given["live"][b] else 0
        keys[page, position % PAGE], values[page, position % PAGE] = parts["k"][b], parts["v"][b]
    return parts["q"], keys, values


def check(given, implementation="interpret"):
    got = turn_heads(**given, implementation=implementation)
    dtype = given["heads"].dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for name, a, b in zip(("q", "keys", "values"), got, wide(given), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(np.float64(a), b, rtol=tolerance, atol=tolerance, err_msg=name)
    return got


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "what",
    [
        dict(),
        dict(R=0),
        dict(kind="narrow"),
        dict(kind="wide", over_all=True),
        dict(kind="zero_centred", step=2, R=2),
        dict(clip=0.5, kind="narrow", over_all=True),
    ],
    ids=str,
)
def test_what_families_use(what, dtype, implementation):
    check(operands(**what, dtype=dtype), implementation)


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([(1, 4, 2, 8, 4), (2, 3, 3, 6, 2), (1, 5, 1, 20, 7), (1, 1, 1, 3, 0)]),
    st.sampled_from([None, "narrow", "zero_centred"]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 0.7]),
)
def test_odd_sizes(shape, kind, over_all, step, clip):
    check(operands(*shape, kind=kind, over_all=over_all, step=step, clip=clip))


def test_dead_rows_write_to_page_0_only():
    given = operands()
    given["live"] = jnp.asarray([1, 0], jnp.int32)
    _, keys, values = check(given)
    for new, old in ((keys, given["keys"]), (values, given["values"])):
        changed = np.flatnonzero((np.asarray(new) != np.asarray(old)).any(axis=(1, 2, 3)))
        assert set(changed) == {0, int(given["page_table"][0, given["positions"][0] // PAGE])}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_in_their_head(bad):
    given = operands(kind="narrow", clip=1.0)
    clean = turn_heads(**given, implementation="interpret")
    given["heads"] = given["heads"].at[0, 1, 2].set(bad)
    q, keys, _ = turn_heads(**given, implementation="interpret")
    assert np.isnan(q[0, 1]).any()
    np.testing.assert_array_equal(np.delete(q[0], 1, axis=0), np.delete(clean[0][0], 1, axis=0))
    np.testing.assert_array_equal(keys, clean[1])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(implementation="cuda"), "implementation = 'cuda'"),
        (dict(query_heads=5), r"heads \(2, 8, 8\)"),
        (dict(sin=None), "sin None"),
        (dict(norm=HeadNorm(RowNorm(1e-5))), r"q_weight None: must be \(8,\)"),
        (dict(q_weight=jnp.zeros(8)), "must be None"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        turn_heads(**{**operands(), "implementation": "interpret", **change})
