"""The paged cache on the device and the page allocator on the host."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.engine.kv_cache import (
    LayerCache,
    OutOfPages,
    PageAllocator,
    PagedKV,
    StateTensor,
    page_bytes,
    state_bytes,
    token_bytes,
)

LAYOUT = (LayerCache(paged={"k": (2, 4), "v": (2, 4)}),) * 2
# A layer of each kind: latents, states, keys and values.
MIXED = (
    LayerCache(paged={"latent": (6,), "k_rope": (2,)}),
    LayerCache(states={"conv": StateTensor((3, 5)), "ssm": StateTensor((5, 4), jnp.float32)}),
    LAYOUT[0],
)


def cache(table: list[list[int]], page_size: int = 4, dtype=jnp.float32) -> PagedKV:
    num_pages = 1 + max(max(row) for row in table)
    kv = PagedKV.create(LAYOUT, num_pages, page_size, len(table), len(table[0]), dtype)
    return replace(kv, page_table=jnp.asarray(table, jnp.int32))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_written_tokens_are_gathered_in_sequence_order():
    kv = cache([[3, 1], [2, 4]])
    k, v = numbers(2, 7, 2, 4), numbers(2, 7, 2, 5)[..., :4]
    positions = np.broadcast_to(np.arange(7), (2, 7))
    live = np.arange(7)[None] < np.array([[7], [5]])
    new = {"k": jnp.asarray(k), "v": jnp.asarray(v)}
    kv = kv.extend(jnp.asarray(live)).write(1, new, jnp.asarray(positions), live)
    assert kv.lengths.tolist() == [7, 5]
    keys, values = kv.gather(1, "k"), kv.gather(1, "v")
    assert keys.shape == (2, 8, 2, 4)
    for row, length in enumerate((7, 5)):
        np.testing.assert_array_equal(keys[row, :length], k[row, :length])
        np.testing.assert_array_equal(values[row, :length], v[row, :length])
        assert not np.any(keys[row, length:])  # dead positions reached no page of the sequence
    assert not np.any(kv.gather(0, "k"))  # nor did another layer change

    some = kv.gather(1, "k", jnp.array([[1], [0]]))
    np.testing.assert_array_equal(some[0, :3], k[0, 4:7])
    np.testing.assert_array_equal(some[1], k[1, :4])


def test_dead_positions_write_to_the_trash_page_only():
    kv = cache([[1, 2]])
    new = jnp.full((1, 3, 2, 4), 9.0)
    # Positions of dead tokens may be anything, also far outside the table.
    after = kv.write(0, {"k": new, "v": new}, jnp.array([[-5, 0, 10_000]]), jnp.zeros((1, 3), bool))
    for pool in after.pages[0].values():
        assert not np.any(pool[1:]) and np.any(pool[0])


def test_values_are_cast_to_the_pool_dtype_and_bytes_are_counted():
    kv = cache([[1]], dtype=jnp.bfloat16)
    new = jnp.full((1, 1, 2, 4), 1 / 3)
    kv = kv.write(0, {"k": new, "v": new}, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))
    assert kv.pages[0]["k"].dtype == jnp.bfloat16
    assert kv.bytes == 2 * 2 * (2 * 4 * 2 * 4) * 2  # k and v, layers, pages * P * G * H, bfloat16


@pytest.mark.fully_optimised
def test_a_loop_with_a_donated_cache_copies_no_pool():
    kv = cache([[1, 2, 3, 4, 5, 6]])
    shape = ",".join(map(str, kv.pages[0]["k"].shape))

    def fill(kv):
        def step(kv):
            live = jnp.ones((1, 1), bool)
            positions = kv.lengths[:, None]
            kv = kv.extend(live)
            for layer in range(2):
                new = kv.gather(layer, "k").sum(axis=1, keepdims=True) + 1.0
                kv = kv.write(layer, {"k": new, "v": new}, positions, live)
            return kv

        return jax.lax.while_loop(lambda kv: kv.lengths[0] < 20, step, kv)

    compiled = jax.jit(fill, donate_argnums=0).lower(kv).compile()
    copies = [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    assert not copies
    result = compiled(kv)
    assert result.lengths.tolist() == [20]
    np.testing.assert_array_equal(result.gather(0, "k")[0, :5, 0, 0], [1, 2, 4, 8, 16])


@pytest.mark.parametrize("field", ("num_pages", "page_size", "batch", "pages_per_sequence"))
def test_sizes_are_checked(field):
    sizes = {"num_pages": 3, "page_size": 4, "batch": 1, "pages_per_sequence": 2, field: 0}
    with pytest.raises(ValueError, match=f"{field} = 0"):
        PagedKV.create(LAYOUT, dtype=jnp.float32, **sizes)


def test_layers_of_all_kinds_side_by_side():
    B, num_pages, P = 2, 3, 4
    kv = PagedKV.create(MIXED, num_pages, P, B, 1, jnp.bfloat16)
    assert [sorted(layer) for layer in kv.pages] == [["k_rope", "latent"], [], ["k", "v"]]
    assert kv.page_size == P
    assert token_bytes(MIXED, jnp.bfloat16) == (6 + 2 + 2 * 2 * 4) * 2
    assert kv.bytes == num_pages * P * token_bytes(MIXED, jnp.bfloat16)
    assert state_bytes(MIXED, jnp.bfloat16) == 3 * 5 * 2 + 5 * 4 * 4
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kv.states)) == B * state_bytes(MIXED, jnp.bfloat16)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(kv.states)), "a sequence starts from zero"

    kv = replace(kv, page_table=jnp.array([[2], [1]]))
    new = {"latent": jnp.ones((B, 1, 6)), "k_rope": 2 * jnp.ones((B, 1, 2))}
    kv = kv.write(0, new, jnp.zeros((B, 1), jnp.int32), jnp.ones((B, 1), bool))
    assert kv.gather(0, "latent").shape == (B, P, 6) and np.all(kv.gather(0, "latent")[:, 0] == 1)
    assert np.all(kv.gather(0, "k_rope")[:, 0] == 2)
    kv = kv.with_states(1, {"conv": jnp.ones((B, 3, 5)), "ssm": jnp.full((B, 5, 4), 1 / 3)})
    assert kv.states[1]["conv"].dtype == jnp.bfloat16 and kv.states[1]["ssm"].dtype == jnp.float32
    assert kv.states[1]["ssm"][0, 0, 0] == np.float32(1 / 3)


@pytest.mark.parametrize(("every", "P"), ((4, 8), (4, 4), (16, 8)))
def test_entries_of_several_tokens_lie_in_the_page_of_their_first(every, P):
    layout = (LayerCache(paged={"entry": (3,)}, every=every), LayerCache(paged={"k": (2,)}))
    kv = PagedKV.create(layout, 9, P, 2, 4, jnp.float32)
    kv = replace(kv, page_table=jnp.array([[5, 2, 7, 1], [3, 8, 4, 6]]))
    entries = 4 * P // every
    values, live = numbers(2, entries, 3), np.arange(entries)[None] < np.array([[entries], [1]])
    first = np.broadcast_to(np.arange(entries) * every, (2, entries))
    kv = kv.write(0, {"entry": jnp.asarray(values)}, jnp.asarray(first), jnp.asarray(live))
    step = max(1, every // P)
    columns = jnp.broadcast_to(jnp.arange(0, 4, step), (2, 4 // step))
    seen = kv.gather(0, "entry", columns)
    assert seen.shape == (2, entries, 3)
    np.testing.assert_array_equal(seen, np.where(live[:, :, None], values, 0))
    assert kv.page_size == P
    assert token_bytes(layout, jnp.bfloat16) == int(np.ceil(2 * 2 + 3 / every * 2))
    assert kv.bytes == 9 * page_bytes(layout, P, jnp.float32)


def test_entries_must_fit_pages():
    with pytest.raises(ValueError, match="every 12 tokens: must divide page_size = 8"):
        PagedKV.create((LayerCache(paged={"entry": (3,)}, every=12),), 2, 8, 1, 1, jnp.float32)


def test_a_layer_gets_exactly_what_it_keeps():
    kv = PagedKV.create(MIXED, 2, 4, 1, 1, jnp.float32)
    position, live = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    with pytest.raises(ValueError, match="layer 0.*k_rope.*latent.*not.*k"):
        kv.write(0, {"k": jnp.ones((1, 1, 6))}, position, live)
    with pytest.raises(ValueError, match="layer 1.*conv.*ssm.*not.*conv"):
        kv.with_states(1, {"conv": jnp.ones((1, 3, 5))})
    with pytest.raises(ValueError, match="no layer stores"):
        PagedKV.create(MIXED[1:2], 2, 4, 1, 1, jnp.float32)


@given(num_pages=st.integers(2, 12), operations=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_allocator_hands_out_each_page_once(num_pages, operations):
    allocator, held = PageAllocator(num_pages), []
    for is_alloc, count in operations:
        total = sum(map(len, held))
        if is_alloc:
            if count > num_pages - 1 - total:
                with pytest.raises(OutOfPages, match=rf"{count} KV pages needed, {num_pages - 1 - total} free"):
                    allocator.alloc(count)
                continue
            pages = allocator.alloc(count)
            assert len(pages) == count
            held.append(pages)
        elif held:
            allocator.free(held.pop(count % len(held)))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) and all(0 < page < num_pages for page in taken)
        assert allocator.num_free == num_pages - 1 - len(taken)


def test_allocator_refuses_what_it_cannot_do():
    allocator = PageAllocator(5)
    pages = allocator.alloc(3)
    for wrong in ([0], [4], [pages[0], 9], [pages[0], pages[0]]):
        with pytest.raises(ValueError, match="not held|named twice"):
            allocator.free(wrong)
    assert allocator.num_free == 1  # a refused call changes nothing
    with pytest.raises(ValueError, match="-1"):
        allocator.alloc(-1)
    with pytest.raises(ValueError, match="num_pages = 1"):
        PageAllocator(1)
    allocator.free(pages)
    assert sorted(allocator.alloc(4)) == [1, 2, 3, 4]
