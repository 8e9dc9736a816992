"""Models of real layer shapes with random weights, built in memory: what the benchmarks run.

Layer outputs are scaled down, so the hidden state stays close to the token's embedding: routing then depends on the
token and is close to uniform, and the hit rate of a recency policy is close to the share of experts with a slot.
"""

import dataclasses
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from _released import CONFIGS

from host_offload.store import RowSpec
from moe_jax.engine.loading import Parts
from moe_jax.models.gpt_oss.config import GptOssConfig
from moe_jax.models.mixtral.config import MixtralConfig
from moe_jax.models.olmoe.config import OlmoeConfig
from moe_jax.models.qwen3_moe.config import Qwen3MoeConfig
from moe_jax.models.registry import abstract_params
from pallas_kernels.formats import MXFP4

# Experts in floating point, not MXFP4 as released; layers alternate, whatever their number.
_GPT_OSS = {k: v for k, v in CONFIGS["gpt-oss-20b"].items() if k not in ("quantization_config", "layer_types")}

# Family and config.json of the released models (see docs/measurements.md for what was run).
SHAPES = {
    "qwen3-30b-a3b": (Qwen3MoeConfig, CONFIGS["qwen3-30b-a3b"]),
    # Longer than the released 4096, for the timed prefill.
    "olmoe-1b-7b": (OlmoeConfig, CONFIGS["olmoe-1b-7b"] | {"max_position_embeddings": 16384}),
    "mixtral-8x7b": (MixtralConfig, CONFIGS["mixtral-8x7b"]),
    "gpt-oss-20b": (GptOssConfig, _GPT_OSS),
    "gpt-oss-20b-mxfp4": (GptOssConfig, _GPT_OSS),
}
# In what the experts of a shape are packed, if they are.
PACKED = {"gpt-oss-20b-mxfp4": MXFP4()}

# Output projections are this much smaller than usual.
QUIET = 0.02


class RandomRows:
    """A `RowSource` of random expert rows: pieces of one block of normal numbers, each from its own offset; for MXFP4
    of random words, with scales that give them the same spread.

    Filling a pool then runs at memory speed, and no two rows are equal.
    """

    def __init__(self, spec: RowSpec, seed: int = 0):
        self.spec = spec
        rng = np.random.default_rng(seed)
        self._slack = 1 << 20
        self._blocks = {}
        for name, (shape, dtype) in spec.tensors.items():
            count = int(np.prod(shape))
            down = name.startswith("down")
            if dtype == np.uint32:
                unit = rng.integers(0, 1 << 32, min(count, 1 << 22), np.uint32)
                if name.endswith("_scale"):  # bytes: 2^-9 to 2^-6, of a quiet projection 2^-15 to 2^-12
                    unit = (unit & np.uint32(0x03030303)) + np.uint32(0x70707070 if down else 0x76767676)
            else:
                unit = rng.standard_normal(min(count, 1 << 22), np.float32) * shape[-1] ** -0.5
                if down:
                    unit *= QUIET
            whole = np.resize(unit.astype(dtype), count + self._slack)
            self._blocks[name] = whole

    def read(self, layer, e, name, out):
        """Writes one row tensor into `out`."""
        offset = zlib.crc32(f"{layer}/{e}/{name}".encode()) % self._slack
        out[...] = self._blocks[name][offset : offset + out.size].reshape(out.shape)

    def fill(self, layer, name, out):
        """Writes that tensor of all experts of a layer."""
        for e in range(self.spec.E):
            self.read(layer, e, name, out[e, ...])

    def close(self):
        """Nothing to release."""


@partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key, std, *, shape, dtype):
    """Normal numbers of deviation `std`; compiled once a shape, not once a layer."""
    return (jax.random.normal(key, shape, dtype) * std).astype(dtype)


def random_parts(shape: str, layers: int | None = None, dtype="bfloat16", seed: int = 0, **changes) -> Parts:
    """`Parts` for `MoE.from_parts`: the named shape with `layers` layers (default: all), random weights on the device.

    `changes` override config fields (tests use a small model).
    """
    config_cls, values = SHAPES[shape]
    values = {**values, **changes}
    if layers is not None:
        values["num_hidden_layers"] = layers
    cfg = config_cls.from_hf(values)
    dtype = np.dtype(jnp.dtype(dtype))
    graphdef, abstract = abstract_params(cfg, dtype)
    key = jax.random.key(seed)

    def make(path, leaf):
        name = "/".join(str(k.key) for k in path)
        if "norm" in name:
            return jnp.ones(leaf.shape, leaf.dtype)
        k = jax.random.fold_in(key, zlib.crc32(name.encode()))
        std = 1.0 if name.startswith("embed") else leaf.shape[-1] ** -0.5
        if name.endswith("attn/out/weight"):
            std *= QUIET
        return normal(k, std, shape=leaf.shape, dtype=leaf.dtype)

    params = jax.tree_util.tree_map_with_path(make, abstract)
    experts = cfg.expert_spec()
    if shape in PACKED:
        experts = dataclasses.replace(experts, gate_up=PACKED[shape], down=PACKED[shape])
    rows = experts.row_tensors(cfg.expert_width, cfg.hidden_size)
    spec = RowSpec({n: (s, of or dtype) for n, (s, of) in rows.items()}, L=len(cfg.moe_layers), E=cfg.num_experts)
    return Parts(cfg, dtype, graphdef, params, spec, RandomRows(spec, seed), experts)


def small(parts_shape: str) -> dict:
    """Overrides that shrink a shape for a dry run on CPU, keeping its structure."""
    config_cls, values = SHAPES[parts_shape]
    fields = {f.name for f in dataclasses.fields(config_cls)}
    shrink = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    shrink |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in fields else {}
    shrink |= {"intermediate_size": 32} | ({"head_dim": 16} if "head_dim" in values else {})
    return shrink
