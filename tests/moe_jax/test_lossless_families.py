"""Losslessness of every family in every format: offloaded runs equal resident ones to the bit, those transformers.

Each tiny checkpoint runs twelve settings of the cache, from an empty and a warm one: chunks, rows of unequal length,
recurrent states and packed experts meet misses. `test_lossless.py` has the whole matrix of one family.
"""

import itertools

import jax
import numpy as np
import pytest
import tiny_models
from lossless_runs import (
    BATCHES,
    CONTRACTS,
    NEW_TOKENS,
    POLICIES,
    SCOPES,
    SMALL,
    Bench,
    Replay,
    check_run,
    drawn_logits,
)
from tiny_recipes_nllb import FORCED

from moe_jax import MoE
from moe_jax.engine.engine import power_of_two
from moe_jax.engine.kv_cache import create_states
from moe_jax.engine.loading import CacheBuilder
from moe_jax.models.registry import family_for

TRANSPORTS = ("device", "callback")
# Slots, of all experts: one a layer (in scope `global` one at all), or a share. With all of them nothing is left to a
# policy: a model is loaded so, and its first run is that case.
SHARES = ("least", "quarter", "half")
# Every pair of (transport, policy, share, scope, contract, batch) values occurs; checked below.
PAIRWISE = (
    ("device", "lru", "least", "global", "atomic-bypass", 3),
    ("device", "lfu", "quarter", "layer", "atomic-forced-admit", 3),
    ("device", "lfu", "half", "global", "atomic-bypass", 1),
    ("device", "lfru", "quarter", "global", "atomic-bypass", 1),
    ("device", "lfru", "half", "layer", "atomic-forced-admit", 1),
    ("device", "static", "quarter", "layer", "atomic-bypass", 3),
    ("callback", "lru", "quarter", "layer", "atomic-forced-admit", 1),
    ("callback", "lru", "half", "global", "atomic-bypass", 1),
    ("callback", "lfu", "least", "global", "atomic-bypass", 3),
    ("callback", "lfru", "least", "layer", "atomic-forced-admit", 3),
    ("callback", "static", "least", "layer", "atomic-forced-admit", 1),
    ("callback", "static", "half", "global", "atomic-forced-admit", 3),
)
# Prompts take several chunks, the longest one two.
CHUNK, LONG = 16, 128
IN_BFLOAT16 = ("mixtral_bf16_sharded",)
# Tensors of another one under other names: once loaded, nothing differs. `models/test_parity.py` compares their tokens.
SAME_ONCE_LOADED = {"mixtral_v5keys": "mixtral", "qwen3_5_moe_vl": "qwen3_5_moe"}


def batches_of_recipes() -> dict[str, tuple[int, ...]]:
    """Batch sizes of each tiny checkpoint. Each costs compilations, so the checkpoints of a family take turns."""
    families: dict[str, list[str]] = {}
    for name, recipe in tiny_models.RECIPES.items():
        if name != "mixtral" and name not in SAME_ONCE_LOADED:  # the whole matrix is mixtral's
            families.setdefault(family_for(recipe.config).name, []).append(name)
    return {
        name: BATCHES if len(names) == 1 else (BATCHES[1 - turn % 2],)
        for names in families.values()
        for turn, name in enumerate(names)
    }


RUNS = batches_of_recipes()


def test_the_settings_cover_all_pairs():
    values = (TRANSPORTS, POLICIES, SHARES, SCOPES, CONTRACTS, BATCHES)
    for a, b in itertools.combinations(range(len(values)), 2):
        seen = {(case[a], case[b]) for case in PAIRWISE}
        assert seen == set(itertools.product(values[a], values[b]))


@pytest.mark.parametrize(("name", "other"), SAME_ONCE_LOADED.items())
def test_what_is_left_out_is_another_one_once_loaded(name, other, tiny):
    loaded = []
    for directory in (tiny(name), tiny(other)):
        with MoE(directory, SMALL | {"transport": "device", "cache_rate": 0.5, "dtype": "float32"}) as moe:
            pool = moe._builder.pool
            assert len(pool.slabs) == pool.spec.L
            rows = [{part: np.asarray(slab).tobytes() for part, slab in layer.items()} for layer in pool.slabs]
            loaded.append((moe.model_config, pool.spec.to_dict(), rows, jax.tree.map(np.asarray, moe._engine.params)))
    (config, spec, rows, params), (its_config, its_spec, its_rows, its_params) = loaded
    assert config == its_config and spec == its_spec and rows == its_rows
    jax.tree.map(np.testing.assert_array_equal, params, its_params)


@pytest.fixture(scope="module")
def recorder():
    """What the sampler is given."""
    with drawn_logits() as seen:
        yield seen


def inputs_of(want, batch: int):
    """(ids [batch, T], options of `generate`): the oracle's prompt, and shifted copies that lack their first tokens."""
    ids = np.concatenate([np.roll(want["input_ids"], 5 * row, axis=1) for row in range(batch)])
    mask = np.ones_like(ids)
    for row in range(batch):
        mask[row, : 3 * row] = 0
    return ids, {"attention_mask": mask} | ({"forced_bos_token_id": FORCED} if "decoder_input_ids" in want else {})


def configuration(name: str, want) -> dict:
    """Compute dtype, and chunks shorter than the prompt where a model takes chunks."""
    config = {"dtype": "bfloat16" if name in IN_BFLOAT16 else "float32"}
    if "decoder_input_ids" not in want:
        config["prefill_chunk"] = LONG if want["input_ids"].shape[1] > LONG else CHUNK
    return config


def check_transformers(name: str, want, ids, logits) -> None:
    """Greedy ids of the first row and the logits that chose them."""
    np.testing.assert_array_equal(ids[0, -NEW_TOKENS:], want["gen_ids"].ravel()[:NEW_TOKENS])
    # Gated DeltaNet divides outputs by their own length, however small: float32 noise grows.
    allowed = 5e-4 if name.startswith("qwen3_5_moe") else 1e-4
    chosen = logits[1:] if "decoder_input_ids" in want else logits  # an encoder-decoder's first token is forced
    for step, (mine, theirs) in enumerate(zip(chosen, want["gen_logits"], strict=False)):
        difference = np.abs(mine[0] - theirs).max()
        assert difference <= allowed, f"step {step} differs by {difference:.2e}"


def check_memory(moe) -> None:
    """What the plan says of pages and states is what is there."""
    memory = moe.stats()["memory"]
    assert memory["kv_bytes"] == sum(pool.nbytes for pool in jax.tree.leaves(moe._engine._kv)) > 0
    if not moe.model_config.encoder_decoder:
        states = create_states(moe.model_config.cache_layout(), SMALL["max_batch"], moe.dtype)
        assert memory["state_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(states))


def check_nothing_is_copied(name: str, moe, batch: int) -> None:
    """No program copies the pages of a pool, nor the decode loop the banks."""
    engine = moe._engine
    pages = {pool.shape for pool in jax.tree.leaves(engine._kv)}
    kept = {bank.shape for bank in jax.tree.leaves(engine.cache.banks) if bank.ndim > 2}
    if name.startswith("qwen3_5_moe"):  # megabytes a layer and sequence in real models; XLA copies smaller states
        states = create_states(moe.model_config.cache_layout(), power_of_two(batch), moe.dtype)
        kept |= {state.shape for state in jax.tree.leaves(states) if state.ndim == 4}
    for program, text in engine.programs.texts():
        copies = [line for line in text.splitlines() if " copy(" in line]
        for shape in pages | (kept if program == "decode" else set()):
            sizes = ",".join(map(str, shape))
            assert not any(f"[{sizes}]" in line for line in copies), f"{program} copies an array of {shape}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [(name, batch) for name, sizes in RUNS.items() for batch in sizes])
def test_offloaded_equals_resident_and_transformers(name, batch, tiny, expected, recorder):
    want = expected(name)
    config = configuration(name, want)
    ids, options = inputs_of(want, batch)
    with Bench(tiny(name), "resident", recorder, **config) as one:
        wanted = one.generate(ids, **options)
        # The oracle ran the first row alone; an encoder-decoder's experts have room for a share of the whole batch.
        if config["dtype"] == "float32" and (batch == 1 or "decoder_input_ids" not in want):
            check_transformers(name, want, *wanted)
        check_memory(one.moe)
    cases = [case[:-1] for case in PAIRWISE if len(RUNS[name]) == 1 or case[-1] == batch]
    packed = "quantization_config" in tiny_models.recipe(name).config
    for transport in TRANSPORTS:
        with Bench(tiny(name), transport, recorder, **config) as one:
            stats = one.moe.stats()
            assert set(stats["kernel"]) == {f"{transport}/xla"}
            assert all((form != "dense") == packed for form in stats["experts"]["format"].values())
            L, total = stats["experts"]["layers"], stats["experts"]["layers"] * stats["experts"]["per_layer"]
            check_run(one, ids, wanted, f"{transport}, all slots", replay_of(one.moe), **options)
            misses = 0
            for _, policy, share, scope, contract in (case for case in cases if case[0] == transport):
                slots = {"least": L if scope == "layer" else 1, "quarter": total // 4, "half": total // 2}[share]
                one.moe.set_cache(policy, slots=slots, scope=scope, contract=contract)
                replay = replay_of(one.moe)
                for turn in ("empty", "warm"):
                    what = f"{transport} {policy} {slots} {scope} {contract}, {turn} cache"
                    check_run(one, ids, wanted, what, replay, **options)
                    misses += one.moe.stats()["last"]["decode"]["misses"]
            assert misses > 0, "this is about offloaded experts"
            # A chunk, the first token and the decode loop, or an encoder, a start token and so on: for all settings.
            assert one.moe._engine.programs.compilations == (4 if one.moe.model_config.encoder_decoder else 3)
            check_nothing_is_copied(name, one.moe, batch)


def replay_of(moe) -> Replay | None:
    """None of an encoder-decoder: a trace holds the decoder's layers only."""
    return None if moe.model_config.encoder_decoder else Replay(moe)


# ---------------------------------------------------------------------------------------------- the GPU's kernels
ACT_ORDER = "xla (no kernel undoes the column order of int4 rows)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "path"),
    [
        ("mixtral_swa_tied", 3, "pallas-interpret"),
        ("gpt_oss", 1, "pallas-interpret"),
        ("gpt_oss_mxfp4", 1, "pallas-interpret"),
        ("qwen3_moe_fp8", 3, "pallas-interpret"),
        ("mixtral_awq", 3, "pallas-interpret"),
        ("nllb_moe", 1, "pallas-interpret"),
        ("qwen3_moe_gptq_actorder", 1, ACT_ORDER),
    ],
)
def test_a_gpus_code_path_in_the_interpreter(name, batch, path, tiny, expected, monkeypatch):
    """Slot plans and copies are kernels for every format; experts that the kernels do not serve say so in stats."""
    original = CacheBuilder.__init__

    def interpreted(self, *args):
        original(self, *args)
        self.implementation = "interpret"

    monkeypatch.setattr(CacheBuilder, "__init__", interpreted)
    want = expected(name)
    ids, options = inputs_of(want, batch)
    config = SMALL | {"transport": "device", "cache_rate": 0.25, "dtype": "float32"}
    with MoE(tiny(name), config) as moe:
        assert set(moe.stats()["kernel"]) == {f"device/{path}"}
        new = moe.generate(ids, max_new_tokens=4, eos_token_id=[], **options)[0, -4:]
        np.testing.assert_array_equal(new, want["gen_ids"].ravel()[:4])
        assert moe.stats()["last"]["decode"]["misses"] > 0
        moe.verify_slots()
