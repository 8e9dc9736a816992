"""The compiled programs: banks, pool and KV pages are updated in place, and a shape compiles once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.transport import callback, graph
from moe_jax import MoE

pytestmark = [pytest.mark.slow, pytest.mark.fully_optimised]

CONFIG = {
    "cache_rate": 0.5,
    "progress": False,
    "max_batch": 4,
    "max_sequence_length": 32,
    "page_size": 32,  # one page a sequence: the width of the page table is a shape, too
    "decode_chunk": 3,
}
PROMPT = np.random.default_rng(2).integers(3, 256, 10)
BATCHES = (1, 4)
HLO_NAMES = {"float32": "f32", "bfloat16": "bf16", "int32": "s32"}


def copies(text: str, arrays) -> list[str]:
    """Lines of an optimised HLO that copy a whole array of the shape and dtype of one of `arrays`."""
    shapes = {f"{HLO_NAMES[str(a.dtype)]}[{','.join(map(str, a.shape))}]" for a in arrays}
    found = []
    for line in text.splitlines():
        op = re.search(r"= (\(.*?\)|\S+) (copy|copy-start|copy-done)\(", line)
        if op and any(shape in op[1] for shape in shapes):
            found.append(line.strip())
    return found


def large_arrays(moe):
    """Everything that a step must not copy: banks, pinned slabs and KV pools."""
    return [
        *moe._engine.cache.banks.values(),
        *jax.tree.leaves(moe._builder.pool.slabs),
        *jax.tree.leaves(moe._engine._kv),
    ]


@pytest.fixture(scope="module", params=("device", "callback"))
def moe(request, tiny):
    with MoE(tiny("mixtral_swa_tied"), CONFIG | {"transport": request.param}) as moe:
        for batch in BATCHES:
            moe.generate(np.stack([PROMPT] * batch), 5, eos_token_id=[])
        yield moe


def test_no_program_copies_a_bank_a_slab_or_a_page_pool(moe):
    texts = moe._engine.programs.texts()
    assert sorted(name for name, _ in texts) == ["decode"] * 2 + ["first"] * 2 + ["prefill"] * 2
    shapes = {(array.shape, str(array.dtype)) for array in large_arrays(moe)}
    for name, text in texts:
        assert copies(text, large_arrays(moe)) == [], name
        if name != "first":  # the check would be empty if a shape were spelt in another way
            for bank in moe._engine.cache.banks.values():
                assert f"f32[{','.join(map(str, bank.shape))}]" in text
    assert len(shapes) == 5  # two tensors in a bank and in a slab each, and pages: all told apart


def test_nor_does_one_that_prefetches(tiny):
    # A budget of one row: staging then has another shape than a slab.
    config = {"transport": "device", "prefetch": "request-counts", "prefetch_budget": "48KiB", "max_batch": 1}
    with MoE(tiny("mixtral_swa_tied"), CONFIG | config) as moe:
        moe.generate(PROMPT, 8, eos_token_id=[])
        assert moe.stats()["prefetch"]["staging_rows"] == 1
        names = [name for name, _ in moe._engine.programs.texts()]
        assert names.count("decode") == 2  # with prefetch and, for the time trial, without
        for name, text in moe._engine.programs.texts():
            assert copies(text, large_arrays(moe)) == [], name


def test_banks_and_pages_stay_where_they_are(moe):
    def places():
        arrays = [*moe._engine.cache.banks.values(), *jax.tree.leaves(moe._engine._kv)]
        return [array.unsafe_buffer_pointer() for array in arrays]

    before = places()
    for batch in BATCHES:
        moe.generate(np.stack([PROMPT] * batch), 5, eos_token_id=[])
        assert places() == before


def test_a_step_that_uses_a_bank_out_of_order_is_found(moe, tiny, monkeypatch):
    """The old bank is read at a place that only the result tells, so XLA must copy the bank before it is written."""
    module = graph if moe.stats()["transport"]["name"] == "device" else callback
    original = module.expert_ffn_decode

    def broken(x, rows, src, deposit, count, banks, pool, **options):
        y, new = original(x, rows, src, deposit, count, banks, pool, **options)
        late = banks["down"][jnp.int32(jnp.sum(y) * 0), 0, 0]
        written = {name: bank.at[0, 0, 0].add(1.0) for name, bank in new.items()}
        return y + late * 0 + written["down"][0, 0, 0] * 0, written

    monkeypatch.setattr(module, "expert_ffn_decode", broken)
    with MoE(tiny("mixtral_swa_tied"), CONFIG | {"transport": moe.config.transport}) as other:
        other.generate(PROMPT, 3, eos_token_id=[])
        found = {name: copies(text, large_arrays(other)) for name, text in other._engine.programs.texts()}
    assert found["decode"] and not found["prefill"]


@pytest.mark.parametrize("broken", (False, True))
def test_the_checker_itself(broken):
    def step(bank, row, at):
        new = jax.lax.dynamic_update_index_in_dim(bank, row, at, 0)
        value = new[at] * 2
        if broken:
            value += bank[jnp.int32(value[0])]
        return new, value

    bank, row = jnp.zeros((40, 8)), jnp.ones(8)
    text = jax.jit(step, donate_argnums=0).lower(bank, row, 3).compile().as_text()
    assert bool(copies(text, [bank])) == broken
    assert copies(text, [jnp.zeros((40, 9))]) == [], "other shapes do not count"


def test_a_shape_compiles_once_and_its_time_is_told(moe):
    programs = moe._engine.programs
    compiled = programs.compilations
    assert compiled == 6 and programs.compile_seconds > 0
    for length in (1, 5, 16):  # prompts are padded to a power of two, at least 16
        for count in (1, 2, 7):
            moe.generate(np.resize(PROMPT, length), count, eos_token_id=[3, 4])
            assert moe.stats()["last"]["compilations"] == 0
    assert programs.compilations == compiled
    moe.generate(np.stack([PROMPT] * 3), 5, eos_token_id=[])  # three rows run as four
    assert programs.compilations == compiled
    moe.generate(np.resize(PROMPT, 17), 1, eos_token_id=[])
    last = moe.stats()["last"]
    assert programs.compilations - compiled == last["compilations"] >= 1
    assert 0 < last["compile_seconds"] <= programs.compile_seconds
    assert last["ttft_seconds"] < last["compile_seconds"], "TTFT leaves compilation out"
