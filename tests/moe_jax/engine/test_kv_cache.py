"""The paged cache on the device and the page allocator on the host."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.engine.kv_cache import OutOfPages, PageAllocator, PagedKV


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 4


def cache(table: list[list[int]], page_size: int = 4, dtype=jnp.float32) -> PagedKV:
    num_pages = 1 + max(max(row) for row in table)
    kv = PagedKV.create(Shape(), num_pages, page_size, len(table), len(table[0]), dtype)
    return PagedKV(kv.k, kv.v, jnp.asarray(table, jnp.int32), kv.lengths)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_written_tokens_are_gathered_in_sequence_order():
    kv = cache([[3, 1], [2, 4]])
    k, v = numbers(2, 7, 2, 4), numbers(2, 7, 2, 5)[..., :4]
    positions = np.broadcast_to(np.arange(7), (2, 7))
    live = np.arange(7)[None] < np.array([[7], [5]])
    kv = kv.extend(jnp.asarray(live)).write(1, jnp.asarray(k), jnp.asarray(v), jnp.asarray(positions), live)
    assert kv.lengths.tolist() == [7, 5]
    keys, values = kv.gather(1)
    assert keys.shape == (2, 8, 2, 4)
    for row, length in enumerate((7, 5)):
        np.testing.assert_array_equal(keys[row, :length], k[row, :length])
        np.testing.assert_array_equal(values[row, :length], v[row, :length])
        assert not np.any(keys[row, length:])  # dead positions reached no page of the sequence
    assert not np.any(kv.gather(0)[0])  # nor did another layer change

    some, _ = kv.gather(1, jnp.array([[1], [0]]))
    np.testing.assert_array_equal(some[0, :3], k[0, 4:7])
    np.testing.assert_array_equal(some[1], k[1, :4])


def test_dead_positions_write_to_the_trash_page_only():
    kv = cache([[1, 2]])
    new = jnp.full((1, 3, 2, 4), 9.0)
    # Positions of dead tokens may be anything, also far outside the table.
    after = kv.write(0, new, new, jnp.array([[-5, 0, 10_000]]), jnp.zeros((1, 3), bool))
    assert not np.any(after.k[0][1:]) and not np.any(after.v[0][1:])
    assert np.any(after.k[0][0])


def test_values_are_cast_to_the_pool_dtype_and_bytes_are_counted():
    kv = cache([[1]], dtype=jnp.bfloat16)
    new = jnp.full((1, 1, 2, 4), 1 / 3)
    kv = kv.write(0, new, new, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))
    assert kv.k[0].dtype == jnp.bfloat16
    assert kv.bytes == 2 * 2 * (2 * 4 * 2 * 4) * 2  # k and v, layers, pages * P * G * H, bfloat16


def test_a_loop_with_a_donated_cache_copies_no_pool():
    kv = cache([[1, 2, 3, 4, 5, 6]])
    shape = ",".join(map(str, kv.k[0].shape))

    def fill(kv):
        def step(kv):
            live = jnp.ones((1, 1), bool)
            positions = kv.lengths[:, None]
            kv = kv.extend(live)
            for layer in range(2):
                new = kv.gather(layer)[0].sum(axis=1, keepdims=True) + 1.0
                kv = kv.write(layer, new, new, positions, live)
            return kv

        return jax.lax.while_loop(lambda kv: kv.lengths[0] < 20, step, kv)

    compiled = jax.jit(fill, donate_argnums=0).lower(kv).compile()
    copies = [line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    assert not copies
    result = compiled(kv)
    assert result.lengths.tolist() == [20]
    np.testing.assert_array_equal(result.gather(0)[0][0, :5, 0, 0], [1, 2, 4, 8, 16])


@pytest.mark.parametrize("field", ("num_pages", "page_size", "batch", "pages_per_sequence"))
def test_sizes_are_checked(field):
    sizes = {"num_pages": 3, "page_size": 4, "batch": 1, "pages_per_sequence": 2, field: 0}
    with pytest.raises(ValueError, match=f"{field} = 0"):
        PagedKV.create(Shape(), dtype=jnp.float32, **sizes)


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
