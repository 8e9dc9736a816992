"""The sequence cache: pages of per-token tensors and per-sequence states on the device, and the allocator of pages.

What a layer keeps is the model's affair and is described by `LayerCache`: keys and values, latents of MLA, or the
states of a recurrent layer. Pages and the page table are the same for all of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moe_jax.errors import MoEJaxError

TRASH_PAGE = 0


@dataclass(frozen=True)
class StateTensor:
    """A tensor that a layer keeps once a sequence: its shape, and its dtype (None: the cache's)."""

    shape: tuple[int, ...]
    dtype: Any = None


@dataclass(frozen=True)
class LayerCache:
    """What one decoder layer keeps of the past.

    paged: name -> shape of what it stores for every token, such as {"k": (G, H), "v": (G, H)}.
    states: name -> what it stores once a sequence, however long; all zero before the first token.
    every: tokens that one entry of `paged` stands for, a power of two; more than 1 where tokens are compressed.
    source: in an encoder-decoder, name -> shape of what it stores for every token of the source, once a request.
    """

    paged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    states: Mapping[str, StateTensor] = field(default_factory=dict)
    every: int = 1
    source: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def page_entries(self, page_size: int) -> int:
        """Entries of this layer in a page of `page_size` tokens: an entry lies in the page of its first token.

        Entries of more tokens than a page get a place in each page all the same, of which they use the first.
        """
        return max(1, page_size // self.every)


def token_bytes(layout: Sequence[LayerCache], dtype) -> int:
    """Bytes that one token adds to the pages of all layers in the long run, rounded up."""
    numbers = sum(math.prod(shape) / layer.every for layer in layout for shape in layer.paged.values())
    return math.ceil(numbers * jnp.dtype(dtype).itemsize)


def page_bytes(layout: Sequence[LayerCache], page_size: int, dtype) -> int:
    """Bytes of one page of `page_size` tokens over all layers."""
    numbers = sum(
        math.prod(shape) * layer.page_entries(page_size) for layer in layout for shape in layer.paged.values()
    )
    return numbers * jnp.dtype(dtype).itemsize


def state_bytes(layout: Sequence[LayerCache], dtype) -> int:
    """Bytes of the states of one sequence over all layers."""
    states = [state for layer in layout for state in layer.states.values()]
    return sum(math.prod(state.shape) * jnp.dtype(state.dtype or dtype).itemsize for state in states)


def source_bytes(layout: Sequence[LayerCache], dtype) -> int:
    """Bytes that one token of a source takes over all layers."""
    numbers = sum(math.prod(shape) for layer in layout for shape in layer.source.values())
    return numbers * jnp.dtype(dtype).itemsize


def create_states(layout: Sequence[LayerCache], batch: int, dtype) -> tuple[dict[str, Array], ...]:
    """Zero states of `batch` sequences, a dict a layer: name -> [B, *shape]."""
    return tuple(
        {name: jnp.zeros((batch, *state.shape), state.dtype or dtype) for name, state in layer.states.items()}
        for layer in layout
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "states", "page_table", "lengths", "source_lengths"],
    meta_fields=["page_size"],
)
@dataclass(frozen=True)
class PagedKV:
    """What B sequences keep of their past: tensors of every token, in pages of P tokens, and states.

    Token s of sequence b lies in page `page_table[b, s // P]` at offset `s % P`; where a layer stores an entry for
    every m tokens, that is the page of the entry's first token and a page has P / m places (at least one). Page 0
    belongs to nobody: unused entries of the table point to it and dead positions write to it, so its content is never
    meaningful. States belong to the rows of the batch, and a layer must leave the state of a row alone where the row
    has no live token.
    In an encoder-decoder the states also hold what layers keep of the source, padded to the longest of the batch.
    All methods are pure; donate the old value at the jit boundary and pages and states are updated in place.
    """

    pages: tuple[dict[str, Array], ...]  # a layer: name -> [num_pages, page_entries, *shape]
    states: tuple[dict[str, Array], ...]  # a layer: name -> [B, *shape]
    page_table: Array  # [B, pages] int32
    lengths: Array  # [B] int32, tokens stored
    page_size: int  # P, tokens a page (static)
    source_lengths: Array | None = None  # [B] int32, tokens of each source; None without an encoder

    @classmethod
    def create(
        cls,
        layout: Sequence[LayerCache],
        num_pages: int,
        page_size: int,
        batch: int,
        pages_per_sequence: int,
        dtype,
    ) -> "PagedKV":
        """Empty cache of zeros on the default device; page 0 is counted in `num_pages`.

        Raises ValueError if a size is below its minimum (two pages: the trash page and one to use), if no layer
        stores anything a token, or if a layer's entries and the pages do not fit together.
        """
        for name, value, least in (
            ("num_pages", num_pages, 2),
            ("page_size", page_size, 1),
            ("batch", batch, 1),
            ("pages_per_sequence", pages_per_sequence, 1),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        if not any(layer.paged for layer in layout):
            raise ValueError(f"layout = {layout}: no layer stores anything in pages; at least one must")
        for every in {layer.every for layer in layout if layer.paged}:
            if every < 1 or (page_size % every and every % page_size):
                raise ValueError(
                    f"an entry for every {every} tokens: must divide page_size = {page_size} or be divided"
                )
        return cls(
            pages=tuple(
                {
                    name: jnp.zeros((num_pages, layer.page_entries(page_size), *shape), dtype)
                    for name, shape in layer.paged.items()
                }
                for layer in layout
            ),
            states=create_states(layout, batch, dtype),
            page_table=jnp.zeros((batch, pages_per_sequence), jnp.int32),
            lengths=jnp.zeros((batch,), jnp.int32),
            page_size=page_size,
        )

    @property
    def bytes(self) -> int:
        """Device bytes of all pages (states, the page table and the lengths are left out)."""
        return sum(pool.nbytes for pool in jax.tree.leaves(self.pages))

    def extend(self, live: Array) -> "PagedKV":
        """Count the live new tokens, live [B, T] bool, as stored; each layer's `write` then fills them in."""
        return replace(self, lengths=self.lengths + jnp.sum(live, axis=1, dtype=jnp.int32))

    def write(self, layer: int, tensors: Mapping[str, Array], positions: Array, live: Array) -> "PagedKV":
        """Store what `layer` (static) keeps of new tokens where live [B, T]; the rest is discarded.

        tensors: name -> [B, T, *shape], all names of the layer; positions: [B, T] int32, of each token, or of the first
        token of each entry. The caller promises that the page table covers every live position.
        """
        P = self.page_size
        last_page = self.page_table.shape[1] - 1
        page_number = jnp.clip(positions // P, 0, last_page)
        pages = jnp.take_along_axis(self.page_table, page_number, axis=1)  # [B, T]
        pages = jnp.where(live, pages, TRASH_PAGE)
        pools = self.pages[layer]
        if tensors.keys() != pools.keys():
            raise ValueError(f"layer {layer} stores {sorted(pools)} for each token, not {sorted(tensors)}")
        new = {
            name: pools[name]
            .at[pages, positions % P * pools[name].shape[1] // P]
            .set(value.astype(pools[name].dtype), mode="promise_in_bounds")
            for name, value in tensors.items()
        }
        return self.with_pages(layer, new)

    def settled(self, layer: int) -> "PagedKV":
        """The same cache, with the pages of `layer` (static) kept whole between what wrote and what reads them.

        XLA may fuse a write of one token into the gather that follows, which then reads the old pool while the write
        updates it: it copies the pool, twice (seen on CPU with latents; the optimised HLO of keys and values has none).
        """
        return self.with_pages(layer, jax.lax.optimization_barrier(self.pages[layer]))

    def with_pages(self, layer: int, pools: Mapping[str, Array]) -> "PagedKV":
        """The same cache with new pools of `layer` (static): name -> [num_pages, page_entries, *shape], all names."""
        old = self.pages[layer]
        if pools.keys() != old.keys():
            raise ValueError(f"layer {layer} has the pools {sorted(old)}, not {sorted(pools)}")
        return replace(self, pages=(*self.pages[:layer], dict(pools), *self.pages[layer + 1 :]))

    def gather(self, layer: int, name: str, page_numbers: Array | None = None) -> Array:
        """The tensor `name` of `layer` in sequence order, [B, pages * page_entries, *shape].

        `page_numbers` [B, n] selects columns of the page table (n pages a sequence) in place of all of them.
        Positions at or past `lengths` hold whatever the pages hold: mask them.
        """
        table = self.page_table
        if page_numbers is not None:
            table = jnp.take_along_axis(table, page_numbers, axis=1, mode="clip")
        B, n = table.shape
        pool = self.pages[layer][name]
        _, entries, *shape = pool.shape
        return pool.at[table].get(mode="promise_in_bounds").reshape(B, n * entries, *shape)

    def gather_entries(self, layer: int, name: str, every: int) -> Array:
        """`gather` where `layer` stores an entry for `every` tokens: entry w of a sequence comes at index w."""
        if every <= self.page_size:
            return self.gather(layer, name)
        B, pages = self.page_table.shape
        columns = jnp.arange(0, pages, every // self.page_size, dtype=jnp.int32)
        return self.gather(layer, name, jnp.broadcast_to(columns, (B, columns.size)))

    def take(self, layer: int, name: str, positions: Array) -> Array:
        """What `write` stored at positions [B, n]: [B, n, *shape]. Positions must be covered by the page table."""
        P, pool = self.page_size, self.pages[layer][name]
        pages = jnp.take_along_axis(self.page_table, positions // P, axis=1, mode="clip")
        return pool.at[pages, positions % P * pool.shape[1] // P].get(mode="promise_in_bounds")

    def with_source(self, kept: Sequence[Mapping[str, Array]], lengths: Array) -> "PagedKV":
        """The same cache with what the layers keep of the sources.

        kept: a layer: name -> [B, S, *shape], all names of its `LayerCache.source`; lengths [B] int32, at most S.
        """
        states = tuple({**old, **new} for old, new in zip(self.states, kept, strict=True))
        return replace(self, states=states, source_lengths=lengths)

    def with_states(self, layer: int, states: Mapping[str, Array]) -> "PagedKV":
        """The same cache with new states of `layer` (static): name -> [B, *shape], all names of the layer."""
        old = self.states[layer]
        if states.keys() != old.keys():
            raise ValueError(f"layer {layer} has the states {sorted(old)}, not {sorted(states)}")
        new = {name: value.astype(old[name].dtype) for name, value in states.items()}
        return replace(self, states=(*self.states[:layer], new, *self.states[layer + 1 :]))


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
