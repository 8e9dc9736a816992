"""Paged key/value cache: one pool of pages a layer on the device, and the host-side allocator of pages."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from moe_jax.errors import MoEJaxError

TRASH_PAGE = 0


class KVShape(Protocol):
    """What the cache needs to know of a model."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "page_table", "lengths"], meta_fields=[])
@dataclass(frozen=True)
class PagedKV:
    """Keys and values of B sequences, stored in pages of P tokens.

    Token s of sequence b lies in page `page_table[b, s // P]` at offset `s % P`. Page 0 belongs to nobody: unused
    entries of the table point to it and dead positions write to it, so its content is never meaningful.
    All methods are pure; donate the old value at the jit boundary and the pools are updated in place.
    """

    k: tuple[Array, ...]  # a layer: [num_pages, P, G, H]
    v: tuple[Array, ...]  # a layer: [num_pages, P, G, H]
    page_table: Array  # [B, pages] int32
    lengths: Array  # [B] int32, tokens stored

    @classmethod
    def create(
        cls, cfg: KVShape, num_pages: int, page_size: int, batch: int, pages_per_sequence: int, dtype
    ) -> "PagedKV":
        """Empty cache of zeros on the default device; page 0 is counted in `num_pages`.

        Raises ValueError if a size is below its minimum (two pages: the trash page and one to use).
        """
        for name, value, least in (
            ("num_pages", num_pages, 2),
            ("page_size", page_size, 1),
            ("batch", batch, 1),
            ("pages_per_sequence", pages_per_sequence, 1),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        shape = (num_pages, page_size, cfg.num_key_value_heads, cfg.head_dim)
        layers = range(cfg.num_hidden_layers)
        return cls(
            k=tuple(jnp.zeros(shape, dtype) for _ in layers),
            v=tuple(jnp.zeros(shape, dtype) for _ in layers),
            page_table=jnp.zeros((batch, pages_per_sequence), jnp.int32),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.k[0].shape[1]

    @property
    def bytes(self) -> int:
        """Device bytes of all pools (the page table and the lengths are left out: a few kB)."""
        return sum(pool.size * pool.dtype.itemsize for pool in (*self.k, *self.v))

    def extend(self, live: Array) -> "PagedKV":
        """Count the live new tokens, live [B, T] bool, as stored; each layer's `write` then fills them in."""
        return replace(self, lengths=self.lengths + jnp.sum(live, axis=1, dtype=jnp.int32))

    def write(self, layer: int, k: Array, v: Array, positions: Array, live: Array) -> "PagedKV":
        """Store k, v [B, T, G, H] of `layer` (static) at positions [B, T] where live [B, T]; the rest is discarded.

        The caller promises that the page table covers every live position.
        """
        P = self.page_size
        last_page = self.page_table.shape[1] - 1
        page_number = jnp.clip(positions // P, 0, last_page)
        pages = jnp.take_along_axis(self.page_table, page_number, axis=1)  # [B, T]
        pages = jnp.where(live, pages, TRASH_PAGE)
        offsets = positions % P
        new_k = self.k[layer].at[pages, offsets].set(k.astype(self.k[layer].dtype), mode="promise_in_bounds")
        new_v = self.v[layer].at[pages, offsets].set(v.astype(self.v[layer].dtype), mode="promise_in_bounds")
        return replace(
            self,
            k=(*self.k[:layer], new_k, *self.k[layer + 1 :]),
            v=(*self.v[:layer], new_v, *self.v[layer + 1 :]),
        )

    def gather(self, layer: int, page_numbers: Array | None = None) -> tuple[Array, Array]:
        """Keys and values of `layer` in sequence order, [B, pages * P, G, H] each.

        `page_numbers` [B, n] selects columns of the page table (n pages a sequence) in place of all of them.
        Positions at or past `lengths` hold whatever the pages hold: mask them.
        """
        table = self.page_table
        if page_numbers is not None:
            table = jnp.take_along_axis(table, page_numbers, axis=1, mode="clip")
        B, n = table.shape
        _, P, G, H = self.k[layer].shape
        keys = self.k[layer].at[table].get(mode="promise_in_bounds")  # [B, n, P, G, H]
        values = self.v[layer].at[table].get(mode="promise_in_bounds")
        return keys.reshape(B, n * P, G, H), values.reshape(B, n * P, G, H)


class OutOfPages(MoEJaxError, RuntimeError):
    """More KV pages were asked for than are free."""


class PageAllocator:
    """Free list of KV pages, host side, one owner thread. Page 0 (trash) is never handed out.

    Invariant: a page is either free or held, never both; `free` of a page that is not held is an error.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages = {num_pages}: must be at least 2 (page 0 is reserved)")
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))  # a stack: the lowest page leaves first
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can still give."""
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages; all or none. Raises OutOfPages with the numbers needed and free."""
        if count < 0:
            raise ValueError(f"count = {count}: cannot allocate a negative number of pages")
        if count > len(self._free):
            raise OutOfPages(
                f"{count} KV pages needed, {len(self._free)} free of {len(self._free) + len(self._held)}: "
                "shorten the sequences, lower the batch size or give the cache more pages"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back; all or none. Raises ValueError if one is not held or is named twice."""
        pages = list(pages)
        wrong = sorted(set(pages) - self._held)
        if wrong:
            raise ValueError(f"pages {wrong} are not held, so they cannot be freed")
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice in {pages}")
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))
