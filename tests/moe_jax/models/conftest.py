"""A tiny checkpoint as parameters, a dense reference for its experts, and jitted calls of its model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from host_offload.store import ExpertStore
from host_offload.transport.base import joined
from moe_jax.checkpoint.loading import load_params
from moe_jax.checkpoint.reader import Checkpoint
from moe_jax.engine.kv_cache import PageAllocator, PagedKV
from moe_jax.engine.loading import map_weights, read_model_config
from moe_jax.models.config import DecoderConfig
from moe_jax.models.registry import abstract_params
from pallas_kernels.expert_ffn import ExpertSpec


def dense_experts(slabs: dict[str, list[jax.Array]], spec: ExpertSpec) -> Callable:
    """The `experts` callable that runs every expert on every row: slow, obvious, the reference of these tests.

    Its state counts the calls, which shows that the model threads it through.
    """

    def experts(layer, x, ids, weights, scores, live, token_ids, state, **onward):
        def bias(name):
            return slabs[f"{name}_bias"][layer] if spec.biases else 0

        gate_up, down = slabs["gate_up"][layer], slabs["down"][layer]
        gate, up = jnp.split(jnp.einsum("td,efd->tef", x, gate_up) + bias("gate_up"), 2, axis=-1)
        if spec.limit is not None:
            gate, up = jnp.minimum(gate, spec.limit), jnp.clip(up, -spec.limit, spec.limit)
        if spec.activation == "clamped_swiglu":
            hidden = (up + 1) * gate * jax.nn.sigmoid(spec.alpha * gate)
        else:
            hidden = jax.nn.silu(gate) * up
        outputs = jnp.einsum("tef,edf->ted", hidden, down) + bias("down")  # [T, E, D]
        chosen = jnp.take_along_axis(outputs, ids[:, :, None], axis=1)  # [T, K, D]
        return joined(jnp.sum(chosen * weights[:, :, None], axis=1), **onward), state + 1

    return experts


def _decoded_experts(store, spec: ExpertSpec, D: int, F: int) -> dict[str, list[jax.Array]]:
    """The weights and biases of all experts in float32, by name a list of the layers' [E, ...]."""
    slabs = {}
    for tensor, width in (("gate_up", D), ("down", F)):
        form, slabs[tensor] = getattr(spec, tensor), []
        rows = {name: store.spec.tensors[name] for name in spec.parts(tensor)}
        for layer in range(store.spec.L):
            filled = {name: np.empty((store.spec.E, *shape), dtype) for name, (shape, dtype) in rows.items()}
            for name, out in filled.items():
                store.fill(layer, name, out)
            outs = spec.outs(tensor, rows[tensor][0][0])
            parts = {suffix: jnp.asarray(filled[tensor + suffix]) for suffix in form.suffixes}
            slabs[tensor].append(form.decode(parts, outs, width, jnp.float32))
            if spec.biases:
                slabs.setdefault(f"{tensor}_bias", []).append(jnp.asarray(filled[f"{tensor}_bias"], jnp.float32))
    return slabs


@dataclass
class TinyModel:
    """A loaded tiny checkpoint in float32."""

    cfg: DecoderConfig
    graphdef: nnx.GraphDef
    params: dict
    slabs: dict[str, list[jax.Array]]

    def cache(self, lengths: list[int], page_size: int = 4) -> PagedKV:
        """An empty cache for sequences of up to `lengths` tokens whose pages lie out of order in the pool."""
        B, pages = len(lengths), -(-max(lengths) // page_size)
        allocator = PageAllocator(B * pages + 1)
        order = np.random.default_rng(0).permutation(allocator.alloc(B * pages)).reshape(B, pages)
        kv = PagedKV.create(self.cfg.cache_layout(), B * pages + 1, page_size, B, pages, jnp.float32)
        return replace(kv, page_table=jnp.asarray(order, jnp.int32))

    def apply(
        self, params, slabs, tokens, positions, live, kv, *, capture: bool = False, last_only: bool = False,
        attention: str = "xla",
    ):  # fmt: skip
        """(logits, kv, state, captured values) of one call; traceable."""
        model = nnx.merge(self.graphdef, params)
        seen: dict[str, Any] | None = {} if capture else None
        hidden, kv, state = model(
            tokens,
            positions,
            live,
            kv,
            dense_experts(slabs, self.cfg.expert_spec()),
            jnp.int32(0),
            last_only=last_only,
            attention=attention,
            capture=seen,
        )
        return model.logits(hidden), kv, state, seen

    @cached_property
    def jitted(self) -> Callable:
        """`apply` compiled, with the cache donated."""
        return jax.jit(self.apply, static_argnames=("capture", "last_only"), donate_argnums=5)

    def __call__(self, tokens: np.ndarray, positions: np.ndarray, live: np.ndarray, kv: PagedKV, **static):
        arrays = (jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32), jnp.asarray(live, bool))
        return self.jitted(self.params, self.slabs, *arrays, kv, **static)


@pytest.fixture(scope="session")
def decoded_experts() -> Callable:
    """`decoded_experts(store, spec, D, F)`: see `_decoded_experts`."""
    return _decoded_experts


@pytest.fixture(scope="session")
def load_tiny(tiny) -> Callable[[str], TinyModel]:
    """`load_tiny(name)` is that tiny checkpoint through the family's weight table; loaded once a session."""
    loaded: dict[str, TinyModel] = {}

    def load(name: str) -> TinyModel:
        if name not in loaded:
            with Checkpoint.open(tiny(name)) as checkpoint:
                cfg = read_model_config(checkpoint)
                weight_map = map_weights(checkpoint, cfg)
                graphdef, abstract = abstract_params(cfg, jnp.float32)
                params = load_params(checkpoint, weight_map, abstract, progress=False)
                store = ExpertStore.from_checkpoint(checkpoint, weight_map, np.float32)
                slabs = _decoded_experts(store, weight_map.experts, cfg.hidden_size, cfg.expert_width)
            loaded[name] = TinyModel(cfg, graphdef, params, slabs)
        return loaded[name]

    return load
