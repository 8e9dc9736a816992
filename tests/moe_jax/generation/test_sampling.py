"""Parameters, parity with transformers' logits processors, and the drawn distribution."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracle
import scipy.stats

from moe_jax.errors import ConfigError
from moe_jax.generation.sampling import (
    SamplingParams,
    initial_seen,
    mark_seen,
    process_logits,
    sample,
    sampler_arrays,
    switches,
)

process = jax.jit(process_logits, static_argnames="sort")
draw = jax.jit(sample, static_argnames=("greedy", "sort"))


def draws(logits, params, n, *, seed=0, seen=None, first_position=0):
    """n draws from one row of logits at positions first_position, +1, ... as one batch."""
    batch = np.broadcast_to(logits, (n, len(logits)))
    return np.asarray(
        draw(
            batch,
            sampler_arrays([params] * n),
            seed=np.full(n, seed, np.uint32),
            sequence=np.zeros(n, np.int32),
            position=np.arange(first_position, first_position + n, dtype=np.int32),
            seen=seen,
            greedy=params.greedy,
            sort=params.needs_sort,
        )
    )


# parameters


def test_defaults_are_those_of_transformers():
    params = SamplingParams.resolve({}, {})
    assert (params.max_new_tokens, params.do_sample, params.temperature) == (20, False, 1.0)
    assert (params.top_k, params.top_p, params.min_p) == (50, 1.0, 0.0)
    assert params.repetition_penalty == 1.0 and params.eos_token_id == () and params.stop == ()
    assert params.greedy


def test_argument_beats_generation_config_beats_model_config():
    generation_config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [5, 6], "top_p": None}
    model_config = {"eos_token_id": 2, "pad_token_id": 1, "top_k": 3}
    params = SamplingParams.resolve(generation_config, model_config, top_k=7, top_p=None)
    assert (params.do_sample, params.temperature, params.top_k, params.top_p) == (True, 0.6, 7, 1.0)
    assert params.eos_token_id == (5, 6) and params.pad_token_id == 1
    assert SamplingParams.resolve(None, model_config).eos_token_id == (2,)
    assert SamplingParams.resolve(generation_config, model_config, eos_token_id=[]).eos_token_id == ()
    assert SamplingParams.resolve(generation_config, model_config, eos_token_id=9).eos_token_id == (9,)


@pytest.mark.parametrize(
    ("name", "value"), (("pad_token_id", -1), ("eos_token_id", [[1]]), ("temperature", "hot"), ("do_sample", 1))
)
def test_a_bad_value_of_a_file_is_laid_to_the_file_and_can_be_replaced(name, value):
    with pytest.raises(ConfigError, match=rf"^in generation_config.json or config.json, {name}=.*pass another$"):
        SamplingParams.resolve({name: value}, top_k=3)
    with pytest.raises(ConfigError, match="^top_k=-1 is not allowed"):
        SamplingParams.resolve({name: value}, top_k=-1)
    good = {"pad_token_id": 0, "eos_token_id": 1, "temperature": 0.5, "do_sample": True}
    assert SamplingParams.resolve({name: value}, **(good | {"top_k": 3})).top_k == 3


def test_pad_falls_back_to_the_first_eos():
    assert SamplingParams(eos_token_id=[7, 8]).pad_token_id == 7
    assert SamplingParams().pad_token_id is None and SamplingParams().fill_token_id == 0
    assert SamplingParams(eos_token_id=7, pad_token_id=3).fill_token_id == 3


def test_stop_strings_of_generation_config():
    assert SamplingParams.resolve({"stop_strings": ["a", "b", "a"]}).stop == ("a", "b")
    assert SamplingParams.resolve({"stop_strings": "a"}, stop="c").stop == ("c",)


def test_max_length_counts_the_prompt():
    from_file = SamplingParams.resolve({"max_length": 100})
    assert from_file.max_new_tokens is None and from_file.new_tokens(30) == 70
    assert SamplingParams.resolve({"max_length": 100, "max_new_tokens": 5}).new_tokens(30) == 5
    assert SamplingParams.resolve({"max_length": 10}, max_new_tokens=4).new_tokens(30) == 4
    assert SamplingParams.resolve({"max_new_tokens": 5}, max_length=100).new_tokens(30) == 70
    assert SamplingParams().new_tokens(30) == 20
    with pytest.raises(ConfigError, match="max_length=30 .*30 tokens: pass max_new_tokens"):
        SamplingParams.resolve({"max_length": 30}).new_tokens(30)


def test_temperature_zero_is_greedy():
    params = SamplingParams(do_sample=True, temperature=0)
    assert params.greedy and not params.needs_sort


def test_idle_arguments_warn_but_defaults_of_the_file_do_not():
    with pytest.warns(UserWarning, match="temperature=0.7 has no effect because do_sample is False"):
        SamplingParams.resolve({}, {}, temperature=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams.resolve({"temperature": 0.7}, {})
        SamplingParams.resolve({}, {}, temperature=0.7, do_sample=True)
        SamplingParams.resolve({}, {}, temperature=0)
        SamplingParams.resolve({}, {}, temperature=1.0, top_k=50, top_p=1.0, min_p=0.0)


def test_setting_that_is_not_implemented_warns():
    with pytest.warns(UserWarning, match="num_beams=4"):
        SamplingParams.resolve({"num_beams": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams.resolve({"num_beams": 1, "typical_p": 1.0, "transformers_version": "5", "bos_token_id": 0})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, ">= 1"),
        ("max_new_tokens", 2.5, ">= 1"),
        ("max_length", 0, ">= 1"),
        ("do_sample", "yes", "True or False"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "hot", "finite"),
        ("top_k", -1, ">= 0"),
        ("top_k", 1.5, ">= 0"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", float("nan"), "0 to 1"),
        ("min_p", -0.5, "0 to 1"),
        ("repetition_penalty", 0, "> 0"),
        ("eos_token_id", "2", ">= 0"),
        ("eos_token_id", [2, -1], ">= 0"),
        ("pad_token_id", -1, ">= 0"),
        ("stop", "", "none of them empty"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", 3, "none of them empty"),
        ("seed", 2**32, "4294967295"),
        ("seed", -1, "4294967295"),
    ],
)
def test_bad_parameter_names_field_value_and_range(field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        SamplingParams.resolve({}, {}, **{field: value})
    assert str(caught.value).startswith(f"{field}=") and allowed in str(caught.value)


def test_unknown_parameter_names_the_near_match():
    with pytest.raises(ConfigError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams.resolve({}, {}, temprature=1)


# distribution


def test_process_logits_equals_transformers():
    with np.load(sampling_oracle.DATA) as stored:
        data = dict(stored)
    for name, value in sampling_oracle.inputs().items():
        np.testing.assert_array_equal(data[name], value)
    np.testing.assert_array_equal(data["settings"], sampling_oracle.settings())
    V = data["logits"].shape[1]
    prompts = [row[keep == 1] for row, keep in zip(data["prompts"], data["mask"], strict=True)]
    seen = initial_seen(prompts, V)
    for row, expected in zip(data["settings"], data["processed"], strict=True):
        chosen = dict(zip(sampling_oracle.SETTING_NAMES, row.tolist(), strict=True)) | {"top_k": int(row[2])}
        arrays = sampler_arrays(SamplingParams(do_sample=True, **chosen))
        got = np.asarray(process(data["logits"], arrays, seen=seen, sort=True))
        known = ~np.isnan(expected)
        np.testing.assert_array_equal(np.isneginf(got)[known], np.isneginf(expected)[known], err_msg=str(chosen))
        finite = known & np.isfinite(expected)
        np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-6, atol=1e-6, err_msg=str(chosen))


def test_rows_have_their_own_parameters():
    logits = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    params = [
        SamplingParams(do_sample=True, top_k=5),
        SamplingParams(do_sample=True, top_k=0, top_p=0.4, temperature=2.0),
        SamplingParams(do_sample=True, top_k=0, min_p=0.3, repetition_penalty=1.5),
    ]
    seen = np.random.default_rng(1).random((3, 40)) < 0.3
    together = process(logits, sampler_arrays(params), seen=seen)
    for i, alone in enumerate(params):
        row = process(logits[i : i + 1], sampler_arrays(alone), seen=seen[i : i + 1])
        np.testing.assert_array_equal(together[i], row[0])
    assert int(np.isfinite(together[0]).sum()) == 5


def test_ties_at_the_edge_of_top_p_keep_the_lower_ids():
    logits = np.log(np.array([[0.1, 0.3, 0.3, 0.3]], np.float32))
    kept = process(logits, sampler_arrays(SamplingParams(do_sample=True, top_k=0, top_p=0.5)))
    np.testing.assert_array_equal(np.isfinite(kept), [[False, True, True, False]])


def test_without_sort_equals_with_sort_when_nothing_is_ranked():
    logits = np.random.default_rng(0).normal(size=(2, 30)).astype(np.float32)
    arrays = sampler_arrays(SamplingParams(do_sample=True, top_k=0, min_p=0.2, temperature=0.5))
    np.testing.assert_array_equal(process(logits, arrays, sort=False), process(logits, arrays, sort=True))


@pytest.mark.parametrize(
    "chosen",
    [{"top_k": 0}, {"top_k": 0, "temperature": 0.5, "min_p": 0.05}, {"top_k": 9, "top_p": 0.9}],
    ids=["plain", "min_p", "top_k_top_p"],
)
def test_draws_have_the_processed_distribution(chosen):
    """Chi-square; the seed is fixed, so the test either always passes or never does."""
    n = 20_000
    logits = np.random.default_rng(5).normal(0, 1.5, 12).astype(np.float32)
    params = SamplingParams(do_sample=True, **chosen)
    probs = np.asarray(jax.nn.softmax(process(logits[None], sampler_arrays(params))))[0].astype(np.float64)
    counts = np.bincount(draws(logits, params, n, seed=11), minlength=12)
    assert counts[probs == 0].sum() == 0
    expected = n * probs[probs > 0]
    assert expected.min() > 5  # where the chi-square approximation holds
    assert scipy.stats.chisquare(counts[probs > 0], expected, sum_check=False).pvalue > 0.001


def test_a_draw_depends_on_seed_sequence_and_position_only():
    rng = np.random.default_rng(0)
    B, V = 7, 50
    logits = rng.normal(size=(B, V)).astype(np.float32)
    seed = rng.integers(0, 2**32, B).astype(np.uint32)
    sequence, position = np.arange(B, dtype=np.int32), rng.integers(0, 99, B).astype(np.int32)
    arrays = sampler_arrays(SamplingParams(do_sample=True, top_k=20, top_p=0.9))
    together = draw(logits, arrays, seed=seed, sequence=sequence, position=position)
    for i in range(B):
        row = slice(i, i + 1)
        alone = draw(logits[row], arrays, seed=seed[row], sequence=sequence[row], position=position[row])
        assert int(alone[0]) == int(together[i])


def test_each_of_seed_sequence_and_position_changes_the_draws():
    V, n = 1000, 16
    logits = np.zeros((n, V), np.float32)
    arrays = sampler_arrays(SamplingParams(do_sample=True, top_k=0))
    zero, count = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    call = partial(draw, logits, arrays, sort=False)
    results = [
        call(seed=count.astype(np.uint32), sequence=zero, position=zero),
        call(seed=zero.astype(np.uint32), sequence=count, position=zero),
        call(seed=zero.astype(np.uint32), sequence=zero, position=count),
    ]
    for tokens in results:
        assert len(set(np.asarray(tokens).tolist())) > n // 2
    assert len({tuple(np.asarray(tokens).tolist()) for tokens in results}) == 3


def test_draws_of_a_seed_never_change():
    """Recorded once: a seed must give the same text in every version."""
    got = draws(np.linspace(0, 2, 16, dtype=np.float32), SamplingParams(do_sample=True, top_k=0), 8, seed=42)
    assert got.tolist() == [15, 8, 3, 12, 12, 2, 11, 9]


def test_greedy_takes_the_first_of_equal_logits():
    logits = np.array([[0, 3, 3, 1], [5, 5, 5, 5]], np.float32)
    arrays = sampler_arrays(SamplingParams())
    row = {"seed": np.zeros(2, np.uint32), "sequence": np.zeros(2, np.int32), "position": np.zeros(2, np.int32)}
    assert draw(logits, arrays, greedy=True, **row).tolist() == [1, 0]
    assert draw(logits, arrays, greedy=False, **row).tolist() == [1, 0]  # greedy rows in a batch that also samples


def test_greedy_with_repetition_penalty():
    logits = np.array([[2.0, 1.9, -1.0], [-0.5, -0.6, -9.0]], np.float32)
    seen = initial_seen([np.array([0]), np.array([0, 0])], 3)
    arrays = sampler_arrays([SamplingParams(repetition_penalty=1.5)] * 2)
    row = {"seed": np.zeros(2, np.uint32), "sequence": np.zeros(2, np.int32), "position": np.zeros(2, np.int32)}
    for greedy in (True, False):
        assert draw(logits, arrays, seen=seen, greedy=greedy, **row).tolist() == [1, 1]


def test_greedy_neither_sorts_nor_draws():
    args = (jnp.zeros((2, 64), jnp.bfloat16), sampler_arrays(SamplingParams()))
    row = {"seed": np.zeros(2, np.uint32), "sequence": np.zeros(2, np.int32), "position": np.zeros(2, np.int32)}
    text = str(jax.make_jaxpr(partial(sample, greedy=True))(*args, **row))
    assert "sort" not in text and "threefry" not in text and "exp" not in text
    assert "sort" not in str(jax.make_jaxpr(partial(sample, sort=False))(*args, **row))


def test_changing_a_value_does_not_recompile():
    traced = []

    @jax.jit
    def step(logits, arrays, row):
        traced.append(1)
        return sample(logits, arrays, **row)

    row = {"seed": np.zeros(1, np.uint32), "sequence": np.zeros(1, np.int32), "position": np.zeros(1, np.int32)}
    for temperature, top_k, top_p in ((0.5, 3, 0.5), (1.5, 0, 1.0), (0.0, 9, 0.1)):
        params = SamplingParams(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
        step(np.zeros((1, 20), np.float32), sampler_arrays([params]), row)
    assert len(traced) == 1


@pytest.mark.parametrize("greedy", [True, False])
def test_rows_with_nan_or_infinity_give_the_largest_finite_logit(greedy):
    inf, nan = np.inf, np.nan
    logits = np.array([[nan, 1, 2, 0], [1, inf, 0, 3], [nan, nan, nan, nan], [-inf, -inf, 4, -inf]], np.float32)
    row = {"seed": np.arange(4, dtype=np.uint32), "sequence": np.zeros(4, np.int32), "position": np.zeros(4, np.int32)}
    arrays = sampler_arrays(SamplingParams(do_sample=not greedy))
    assert draw(logits, arrays, greedy=greedy, **row).tolist() == [2, 3, 0, 2]


def test_seen_is_marked_on_live_rows_only():
    seen = mark_seen(jnp.zeros((3, 4), bool), jnp.array([1, 2, 3]), jnp.array([True, False, True]))
    np.testing.assert_array_equal(seen, [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    kept = mark_seen(seen, jnp.array([1, 1, 3]), jnp.array([False, False, False]))
    np.testing.assert_array_equal(kept, seen)


def test_switches_of_a_batch():
    greedy, plain = SamplingParams(), SamplingParams(do_sample=True, top_k=0)
    assert switches([greedy]) == {"greedy": True, "sort": False, "seen": False}
    assert switches([greedy, plain]) == {"greedy": False, "sort": False, "seen": False}
    ranked = SamplingParams(do_sample=True, repetition_penalty=1.1)
    assert switches([greedy, ranked]) == {"greedy": False, "sort": True, "seen": True}
