"""Every family against transformers (float32, eager), module by module and through the paged cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

NAMES = (
    "mixtral",
    "mixtral_swa_tied",
    "mixtral_bf16_sharded",
    "mixtral_v5keys",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "jamba",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "dbrx",
    "qwen3_5_moe",
    "qwen3_5_moe_vl",
    "qwen3_5_moe_released",
    "deepseek_v4",
)
# `Decoder` takes the last live token of a row after the last layer, in one way for all families.
LAST_OF_A_BATCH = ("qwen3_moe", "jamba")
RECURRENT = ("jamba", "qwen3_5_moe", "deepseek_v4")
# Scores that do not sum to one.
UNNORMALISED_ROUTERS = ("deepseek_v3", "deepseek_v4")
TOLERANCE = 1e-4  # logits have a standard deviation of about 2.5
# Float32 noise grows in recurrent layers that divide by a length, however small: Gated DeltaNet its outputs, Jamba's
# Mamba what it draws from each token. Jamba on an Intel Xeon with AMX: 1.1e-4, of logits up to 8.8; its own runs at
# other padded shapes differ from each other by up to 5e-5.
NOISY = {"qwen3_5_moe": 5e-4, "jamba": 2e-4}


def close(name: str, actual, wanted, what: str) -> None:
    difference = np.max(np.abs(np.asarray(actual, np.float64) - np.asarray(wanted, np.float64)))
    allowed = next((value for family, value in NOISY.items() if name.startswith(family)), TOLERANCE)
    assert difference <= allowed, f"{what}: differs by {difference:.2e}"


@pytest.mark.fully_optimised
@pytest.mark.parametrize("name", NAMES)
def test_every_module_equals_transformers(name, load_tiny, expected):
    tiny, want = load_tiny(name), expected(name)
    ids = want["input_ids"]
    T = ids.shape[1]
    logits, kv, calls, seen = tiny(ids, np.arange(T)[None], np.ones((1, T)), tiny.cache([T]), capture=True)

    layers = tiny.cfg.num_hidden_layers
    for i in range(layers + 1):
        close(name, seen[f"hidden/{i}"], want[f"hidden/{i}"], f"hidden/{i}")
    for i in range(layers):
        close(name, seen[f"attn/{i}"], want[f"attn/{i}"], f"attn/{i}")
        close(name, seen[f"mlp/{i}"], want[f"moe/{i}"], f"mlp/{i}")
    sparse = [i for i in range(layers) if f"router/{i}/indices" in want]
    assert list(tiny.cfg.moe_layers) == sparse
    for i in sparse:
        np.testing.assert_array_equal(seen[f"router/{i}/ids"], want[f"router/{i}/indices"])
        close(name, seen[f"router/{i}/weights"], want[f"router/{i}/weights"], f"router/{i}/weights")
        if name not in UNNORMALISED_ROUTERS:
            close(name, jnp.sum(seen[f"router/{i}/scores"], axis=-1), np.ones(T), f"router/{i}/scores")
    close(name, logits, want["logits"], "logits")
    assert logits.dtype == jnp.float32
    assert int(calls) == len(sparse)
    assert kv.lengths.tolist() == [T]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_decode_through_the_cache_equals_transformers(name, load_tiny, expected):
    tiny, want = load_tiny(name), expected(name)
    ids, steps = want["input_ids"], len(want["gen_ids"].ravel())
    T = ids.shape[1]
    logits, kv, _, _ = tiny(ids, np.arange(T)[None], np.ones((1, T)), tiny.cache([T + steps]), last_only=True)
    assert logits.shape[:2] == (1, 1)
    close(name, logits[0, 0], want["gen_logits"][0], "first step")

    @jax.jit
    def decode(params, slabs, logits, kv):
        def step(carry):
            i, logits, kv, all_logits, all_ids = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [B]
            all_logits, all_ids = all_logits.at[i].set(logits[0]), all_ids.at[i].set(token[0])
            logits, kv, _, _ = tiny.apply(
                params, slabs, token[:, None], kv.lengths[:, None], jnp.ones((1, 1), bool), kv, last_only=True
            )
            return i + 1, logits[:, 0], kv, all_logits, all_ids

        start = (0, logits, kv, jnp.zeros((steps, logits.shape[-1])), jnp.zeros(steps, jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[0] < steps, step, start)

    _, _, kv, all_logits, all_ids = decode(tiny.params, tiny.slabs, logits[:, 0], kv)
    np.testing.assert_array_equal(all_ids, want["gen_ids"].ravel())
    close(name, all_logits, want["gen_logits"], "gen_logits")
    assert kv.lengths.tolist() == [T + steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    (
        "mixtral_swa_tied",
        "qwen3_moe",
        "olmoe",
        "deepseek_v2_lite",
        "deepseek_v3",
        "jamba",
        "gpt_oss",
        "dbrx",
        "qwen3_5_moe",
        "deepseek_v4",
    ),
)
def test_batch_of_unequal_prompts_equals_the_left_padded_batch(name, load_tiny, expected):
    tiny, want = load_tiny(name), expected(name)
    mask = want["batch_attention_mask"].astype(bool)
    lengths = mask.sum(axis=1)
    T = mask.shape[1]
    live = np.arange(T)[None] < lengths[:, None]
    tokens = np.zeros_like(want["batch_input_ids"])
    for row in range(2):
        tokens[row, : lengths[row]] = want["batch_input_ids"][row, mask[row]]
    positions = np.broadcast_to(np.arange(T), live.shape)
    logits, kv, _, _ = tiny(tokens, positions, live, tiny.cache([T, T]))
    assert kv.lengths.tolist() == lengths.tolist()
    for row in range(2):
        close(name, logits[row, : lengths[row]], want["batch_logits"][row, mask[row]], f"row {row}")

    if name not in LAST_OF_A_BATCH:
        return
    last, _, _, _ = tiny(tokens, positions, live, tiny.cache([T, T]), last_only=True)
    for row in range(2):
        close(name, last[row, 0], want["batch_logits"][row, mask[row]][-1], f"last of row {row}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ("mixtral_swa_tied", "qwen3_moe", "deepseek_v2", "jamba", "gpt_oss", "qwen3_5_moe_vl", "deepseek_v4")
)
def test_prefill_in_padded_chunks_equals_one_pass(name, load_tiny, expected):
    tiny, want = load_tiny(name), expected(name)
    ids = want["input_ids"]
    T, chunk = ids.shape[1], 7
    kv = tiny.cache([T])
    for start in range(0, T, chunk):
        count = min(chunk, T - start)
        tokens = np.zeros((1, chunk), np.int32)
        tokens[:, :count] = ids[:, start : start + count]
        live = np.arange(chunk)[None] < count
        logits, kv, _, _ = tiny(tokens, start + np.arange(chunk)[None], live, kv)
        close(name, logits[:, :count], want["logits"][:, start : start + count], f"chunk at {start}")
    assert kv.lengths.tolist() == [T]


@pytest.mark.slow
@pytest.mark.parametrize("name", ("qwen3_moe", "jamba", "qwen3_5_moe", "deepseek_v4"))
def test_a_finished_row_changes_nothing_for_the_others(name, load_tiny, expected):
    tiny, want = load_tiny(name), expected(name)
    ids = np.concatenate([want["input_ids"], want["input_ids"][:, ::-1]])
    T = ids.shape[1]
    positions = np.broadcast_to(np.arange(T), ids.shape)
    _, kv, _, _ = tiny(ids, positions, np.ones((2, T)), tiny.cache([T + 1, T + 1]))
    second_row = [np.asarray(pool)[np.asarray(kv.page_table[1])] for pool in jax.tree.leaves(kv.pages)]
    states = [np.asarray(state[1]) for state in jax.tree.leaves(kv.states)]
    assert bool(states) == (name in RECURRENT) and all(np.any(state) for state in states)

    token = want["gen_ids"].reshape(-1, 1)[:1]
    step = np.concatenate([token, token])
    logits, kv, _, _ = tiny(step, np.full((2, 1), T), np.array([[True], [False]]), kv)
    close(name, logits[0, 0], want["gen_logits"][1], "live row")
    assert kv.lengths.tolist() == [T + 1, T]
    for before, pool in zip(second_row, jax.tree.leaves(kv.pages), strict=True):
        np.testing.assert_array_equal(before, np.asarray(pool)[np.asarray(kv.page_table[1])])
    for before, state in zip(states, jax.tree.leaves(kv.states), strict=True):
        np.testing.assert_array_equal(before, state[1])
        assert np.any(before != np.asarray(state[0])), "the live row moved on"


@pytest.mark.slow
@pytest.mark.fully_optimised
@pytest.mark.parametrize("tokens", (1, 8), ids=("decode", "prefill"))
@pytest.mark.parametrize("name", ("qwen3_moe", "deepseek_v2_lite", "jamba", "qwen3_5_moe", "deepseek_v4"))
def test_pools_are_updated_in_place(name, tokens, load_tiny):
    tiny = load_tiny(name)
    kv = tiny.cache([52])  # 14 pages: no other array of the step has a pool's shape
    shapes = {",".join(map(str, pool.shape)) for pool in jax.tree.leaves(kv.pages)}
    arrays = (
        jnp.zeros((1, tokens), jnp.int32),
        jnp.arange(tokens, dtype=jnp.int32)[None],
        jnp.ones((1, tokens), bool),
    )
    compiled = tiny.jitted.lower(tiny.params, tiny.slabs, *arrays, kv).compile()
    text = compiled.as_text()
    for shape in shapes:
        assert f"f32[{shape}]" in text
        assert not [line.strip() for line in text.splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    states = sum(state.nbytes for state in jax.tree.leaves(kv.states))
    assert bool(states) == (name in RECURRENT)
    assert compiled.memory_analysis().alias_size_in_bytes >= kv.bytes + states


def test_capture_needs_all_positions(load_tiny, expected):
    tiny, want = load_tiny("mixtral"), expected("mixtral")
    ids = want["input_ids"][:, :4]
    with pytest.raises(ValueError, match="last_only=False"):
        tiny(ids, np.arange(4)[None], np.ones((1, 4)), tiny.cache([4]), capture=True, last_only=True)
