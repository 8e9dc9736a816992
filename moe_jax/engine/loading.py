"""From a checkpoint to a running engine: what goes where, in which order, and what it takes."""

import dataclasses
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from host_offload.disk_tier import DiskTier
from host_offload.policy import Policy, PolicySet, get_policy
from host_offload.pool import ExpertPool
from host_offload.predictor import get_predictor
from host_offload.prefetch import Experience, ExperienceError, PrefetchSettings, StagingSettings
from host_offload.prefetch.live import GATES
from host_offload.prefetch.staging import GraphPredictor
from host_offload.store import ExpertStore, PackedRows, RowSource, StoreError
from host_offload.transport import TRANSPORTS
from host_offload.transport.prefetching import PrefetchTransport
from host_offload.transport.staged import StagedTransport
from moe_jax.checkpoint import (
    Checkpoint,
    PackedMatrix,
    PreparedCheckpoint,
    Quantization,
    WeightMap,
    conversions,
    load_params,
    load_prepared_params,
    map_checkpoint,
    packed_matrices,
)
from moe_jax.config import OffloadConfig
from moe_jax.engine.engine import Engine
from moe_jax.errors import CheckpointError, ConfigError
from moe_jax.models.config import text_settings
from moe_jax.models.registry import abstract_params, family_for, packable, targets
from moe_jax.planner import (
    MemoryPlan,
    largest_bytes,
    max_pairs,
    params_bytes,
    plan_memory,
    power_of_two,
    prefetch_rows,
    slot_budget,
    staged_rows,
    staging_budget,
)
from moe_jax.runtime import host_memory_bytes
from pallas_kernels.expert_ffn import ExpertSpec, Prefix
from pallas_kernels.expert_ffn.decode import decode_tiles
from pallas_kernels.expert_ffn.staging import choose_prefix, prefix_bytes

logger = logging.getLogger(__name__)

# Built-ins that share one compiled program in the `device` transport: a sweep over them does not recompile.
SWEEP_POLICIES = ("lru", "lfu", "lfru", "static")


@dataclass(frozen=True)
class Parts:
    """What the engine is built from; `MoE` keeps it to rebuild the cache. `store` is None once the pool is filled.

    experts: what an expert computes, with the formats of its rows. conversions: how many dense parameters were decoded
    while they were loaded or stayed packed, by what was done ("fp8 -> bfloat16", "fp8 as stored").
    """

    cfg: object
    dtype: np.dtype
    graphdef: object
    params: dict
    spec: object
    store: object
    experts: ExpertSpec
    conversions: Mapping[str, int] = field(default_factory=dict)


def device_bytes() -> int | None:
    """Memory that jax may use on the default device; None on CPU."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def compute_dtype(config: OffloadConfig, checkpoint: Checkpoint | PreparedCheckpoint) -> np.dtype:
    """The configured dtype, or the checkpoint's (config.json's `dtype` or `torch_dtype`, else that of its tensors)."""
    name = config.dtype
    if name == "auto":
        settings = text_settings(checkpoint.config)
        name = settings.get("dtype") or settings.get("torch_dtype")
    if name in (None, "auto"):
        name = checkpoint.dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype: the checkpoint says {name!r}; pass dtype='bfloat16', 'float16' or 'float32'")
    return np.dtype(jax.numpy.dtype(name))


def map_weights(checkpoint: Checkpoint, cfg) -> WeightMap:
    """Where everything that the model of `cfg` needs lies in the files. Raises CheckpointError for misfits."""
    family = family_for(checkpoint.config)
    return map_checkpoint(
        checkpoint,
        family.table(cfg),
        targets=targets(cfg),
        expert_tensors=cfg.expert_row_shapes(),
        moe_layers=list(cfg.moe_layers),
        num_experts=cfg.num_experts,
        tied=family.tied,
        experts=cfg.expert_spec(),
        quantization=Quantization.from_hf(checkpoint.config),
    )


def read_model_config(checkpoint: Checkpoint | PreparedCheckpoint):
    """The model's config; raises CheckpointError for a model that is not supported or has no experts."""
    cfg = family_for(checkpoint.config).config_cls.from_hf(checkpoint.config)
    if not cfg.moe_layers:
        raise CheckpointError("config.json: the model has no sparse layer, so there is nothing to offload")
    return cfg


def plan_parts(cfg, dtype, config: OffloadConfig, spec, params) -> MemoryPlan:
    """The plan on this machine; `params` are arrays or their abstract shapes. Raises ConfigError."""
    return plan_memory(
        cfg,
        dtype,
        config,
        spec,
        dense_bytes=params_bytes(params),
        largest_dense_bytes=largest_bytes(params),
        device_bytes=device_bytes(),
        host_bytes=host_memory_bytes() or None,
    )


def map_experts(
    checkpoint: Checkpoint | PreparedCheckpoint, cfg, dtype
) -> tuple[ExpertSpec, RowSource, WeightMap | None]:
    """(what an expert computes, the source of rows, the map of weights; None if prepared) of an open checkpoint.

    Raises CheckpointError for files that do not fit the model, StoreError for experts that have no common dtype.
    """
    if isinstance(checkpoint, PreparedCheckpoint):
        checkpoint.check(cfg, targets(cfg))
        return checkpoint.experts(cfg.expert_spec()), checkpoint.store(dtype), None
    weights = map_weights(checkpoint, cfg)
    return weights.experts, ExpertStore.from_checkpoint(checkpoint, weights, dtype), weights


def find_packed(
    config: OffloadConfig, checkpoint: Checkpoint | PreparedCheckpoint, cfg, weights: WeightMap | None
) -> dict[str, PackedMatrix]:
    """The dense weights that stay packed, as `config.dense_weights` says; weights: None of a prepared checkpoint.

    Raises ConfigError where that cannot be: a prepared checkpoint's are decoded already.
    """
    if config.dense_weights == "decoded":
        return {}
    if weights is None:
        raise ConfigError(
            "dense_weights='packed': a prepared checkpoint holds decoded dense weights; load the checkpoint that it "
            "was converted from, or leave dense_weights out"
        )
    return packed_matrices(checkpoint, weights, packable(cfg))


def read_parts(checkpoint: Checkpoint | PreparedCheckpoint, config: OffloadConfig, progress: bool | None) -> Parts:
    """Config, dense parameters and the source of expert rows of an open checkpoint.

    Raises CheckpointError, or ConfigError for what does not fit this machine before anything is loaded or written.
    """
    cfg = read_model_config(checkpoint)
    check_prefetch(config, cfg)
    dtype = compute_dtype(config, checkpoint)
    try:
        experts, store, weights = map_experts(checkpoint, cfg, dtype)
        if config.prefetch and config.transport == "device":
            staged_prefix(config, experts, store.spec, dtype)
        packed = find_packed(config, checkpoint, cfg, weights)
        graphdef, abstract = abstract_params(cfg, dtype, packed)
        plan_parts(cfg, dtype, config, store.spec, abstract)
        if config.offload_path:
            store = PackedRows.open_or_build(config.offload_path, store, progress=progress)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:  # the checkpoint is mapped already: this is the directory of packed rows
        raise ConfigError(
            f"offload_path={config.offload_path!r} cannot be used: {error}. Name a directory that you may write to"
        ) from error
    if weights is None:
        params, decoded = load_prepared_params(checkpoint, abstract, progress=progress), {}
    else:
        params = load_params(checkpoint, weights, abstract, packed=packed, progress=progress)
        decoded = conversions(weights, abstract, packed)
    return Parts(cfg, dtype, graphdef, params, store.spec, store, experts, decoded)


@dataclass(frozen=True)
class Chosen:
    """The policy of a cache. policy: the object to run; select: the member in charge when that is a set; given: the
    object that the user gave, None if a name chose a built-in one."""

    policy: Policy
    select: str | None
    given: Policy | None

    @property
    def name(self) -> str:
        """For stats and trace headers."""
        return self.select or self.policy.name


def make_policy(name_or_policy, transport: str, given: Policy | None = None) -> Chosen:
    """The policy of a cache: named built-ins come as one `PolicySet` where compiled. Raises ConfigError.

    given: the object that the cache runs with until now. A name of a member of a set selects it.
    """
    if isinstance(given, PolicySet) and name_or_policy in given.names:
        return Chosen(given, name_or_policy, given)
    try:
        policy = get_policy(name_or_policy)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    if isinstance(policy, PolicySet):
        return Chosen(policy, policy.names[0], policy)
    if not isinstance(name_or_policy, str):
        return Chosen(policy, None, policy)
    if transport == "device" and name_or_policy in SWEEP_POLICIES:
        return Chosen(PolicySet(SWEEP_POLICIES), name_or_policy, None)
    return Chosen(policy, None, None)


def make_host_policy(name: str) -> Policy:
    """The policy of a disk tier. Raises ConfigError for an unknown name, or one that needs what a tier does not see."""
    try:
        policy = get_policy(name)
    except ValueError as error:
        raise ConfigError(f"host_{error}") from error  # it begins with "policy: "
    if policy.uses_scores:
        raise ConfigError(
            f"host_policy={name!r} uses the router's scores, and host memory sees only what the device missed: choose "
            "one with uses_scores = False, such as 'lru'"
        )
    return policy


def check_policy(policy: Policy, transport: str, spec) -> None:
    """Raises ConfigError if the policy does not fit the model, such as a frequency table of another shape, or the
    transport, as one that runs on the host only."""
    if transport == "resident":
        return
    if policy.host_only and transport != "callback":
        raise ConfigError(
            f"policy {policy.name!r} keeps more than arrays and runs on the host only: use transport='callback', not "
            f"{transport!r}"
        )
    try:
        policy.init(np if transport == "callback" else jax.numpy, spec.L, spec.E, 0)
    except ValueError as error:
        raise ConfigError(f"policy {policy.name!r}: {error}") from error


def check_prefetch(config: OffloadConfig, cfg=None) -> None:
    """Raises ConfigError for a predictor that is not known or cannot run live; with `cfg`, in this model."""
    if config.prefetch is None:
        return
    try:
        get_predictor(config.prefetch).learn(Experience(1, 1))
        if config.transport == "device":
            GraphPredictor(config.prefetch, Experience(1, 1))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"prefetch={config.prefetch!r}: {error}") from error
    if cfg is not None and cfg.encoder_decoder and config.prefetch in GATES:
        raise ConfigError(
            f"prefetch={config.prefetch!r} asks routers about states of other layers, and an encoder-decoder's do not "
            "answer: choose a predictor such as 'cross-layer+temporal'"
        )


def staged_prefix(config: OffloadConfig, experts: ExpertSpec, spec, dtype) -> Prefix:
    """How much of a row the transport `device` stages by `config`.

    Raises ConfigError for experts without a kernel, whose rows are fetched whole, and for a budget below what one
    program of the kernels reads.
    """
    if reason := experts.without_kernel():
        raise ConfigError(
            f"prefetch={config.prefetch!r} in transport='device' is the work of its expert kernels, and {reason}: use "
            "transport='callback', or leave prefetch out"
        )
    tensors = spec.tensors
    width, model = experts.outs("gate_up", tensors["gate_up"][0][0])[0], tensors["down"][0][0]
    # Whole blocks of every batch: powers of two, so the largest holds the others.
    sizes = [decode_tiles(width, model, B, dtype.itemsize, experts) for B in (1, power_of_two(config.max_batch))]
    blocks = {name: max(tiles[name]["block_out"] for tiles in sizes) for name in ("gate_up", "down")}
    budget = staging_budget(config)
    prefix = choose_prefix(experts, tensors, budget // staged_rows(spec, budget), blocks)
    if not prefix.down:
        least = prefix_bytes(Prefix(0, blocks["down"]), experts, tensors)
        raise ConfigError(
            f"prefetch_budget={config.prefetch_budget}: the least that can be staged of an expert is {least} bytes "
            f"({blocks['down']} output rows of its down projection); give at least that, or 'auto'"
        )
    return prefix


class CacheBuilder:
    """Makes transports over one pool, for `MoE` at load and for `MoE.set_cache`.

    experience: what predictors have seen of the model's routing; it outlasts changes of the cache.
    """

    def __init__(self, parts: Parts, config: OffloadConfig, plan: MemoryPlan, fingerprint: str = ""):
        self.experience = self._recall(parts.spec, config, fingerprint)
        self._fingerprint = fingerprint
        self.parts, self.config, self.plan = parts, config, plan
        # "interpret" (tests) runs the GPU's kernels in Pallas' interpreter.
        self.implementation = "pallas" if jax.devices()[0].platform == "gpu" else "xla"
        self.pool: ExpertPool | DiskTier | None = None

    def budget(self, config: OffloadConfig):
        """`SlotBudget` of a configuration (its transport resolved) beside all else that is planned; ConfigError."""
        reserved = self.plan.reserved_bytes + self.plan.spare_bytes
        if config.prefetch:  # set later, or for another transport: not all of its rows were planned
            planned, rows = (prefetch_rows(self.parts.cfg, c, self.parts.spec) for c in (self.config, config))
            reserved += max(0, rows - planned) * self.parts.spec.row_bytes
        return slot_budget(config, self.parts.spec, reserved, self.plan.device_bytes)

    def open_pool(self, progress):
        """Makes the pinned pool: filled with every expert, or an empty disk tier where the plan says so."""
        spec, store, config, plan = self.parts.spec, self.parts.store, self.config, self.plan
        if plan.disk_why is not None:
            options = {"seed": config.seed, "threads": config.load_threads, "why": plan.disk_why}
            options["pinned"] = config.pinned_memory
            try:
                self.pool = DiskTier(spec, store, plan.host_rows, make_host_policy(config.host_policy), **options)
            except StoreError as error:
                raise CheckpointError(str(error)) from error
            return
        pool = ExpertPool(spec, config.pinned_memory)
        try:
            pool.fill(store, config.load_threads, progress)
        except BaseException:
            pool.close()
            raise
        self.pool = pool

    @staticmethod
    def _recall(spec, config: OffloadConfig, fingerprint: str) -> Experience:
        """What a warm start begins with; empty without one, or at its first run. Raises ConfigError."""
        path = config.warm_start
        if path is None:
            return Experience(spec.L, spec.E)
        if not fingerprint:
            raise ConfigError(
                f"warm_start={path!r} belongs to a checkpoint, and this model did not come from files: leave it out"
            )
        directory = os.path.dirname(path) or "."
        if not os.path.isdir(directory):
            raise ConfigError(f"warm_start={path!r}: there is no directory {directory}: create it first")
        try:  # tried, not asked of the permission bits: those do not bind root
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(
                f"warm_start={path!r} is written when the model is closed, and {directory} cannot be written to "
                f"({error.strerror}): name a file elsewhere"
            ) from error
        try:
            seen = Experience.load(path, spec.L, spec.E, fingerprint)
        except FileNotFoundError:
            logger.info("warm start: %s is not there yet; it is written when the model is closed", path)
            return Experience(spec.L, spec.E)
        except (ExperienceError, OSError) as error:
            raise ConfigError(f"warm_start: {error}") from error
        logger.info("warm start: %d requests, %d tokens from %s", seen.requests, seen.counts.tokens, path)
        return seen

    def keep_experience(self):
        """Writes what was seen, if the configuration names a file; logs a warning if it cannot be written."""
        path = self.config.warm_start
        if path is None:
            return
        try:
            self.experience.save(path, self._fingerprint)
        except OSError as error:  # the model is closed and its results are out: nothing else is lost
            logger.warning("warm start: %s could not be written (%s); what this run learned is lost", path, error)

    def warm_host(self):
        """Has a disk tier begin to read the experts that were needed most often, as many as it holds."""
        if isinstance(self.pool, DiskTier):
            hot = self.experience.hot()[: self.pool.rows]
            for layer in np.unique(hot[:, 0]).tolist():
                self.pool.read_ahead(layer, hot[hot[:, 0] == layer, 1].tolist())

    def prefetch(self, config: OffloadConfig) -> PrefetchSettings | StagingSettings | None:
        """What a configuration (its transport resolved) asks for. Raises ConfigError for a budget that is too small."""
        if config.prefetch is None:
            return None
        if config.transport == "device":
            spec, budget = self.parts.spec, staging_budget(config)
            return StagingSettings(
                predictor=config.prefetch,
                budget=budget,
                auto=config.prefetch_budget == "auto",
                rows=staged_rows(spec, budget),
                prefix=staged_prefix(config, self.parts.experts, spec, self.parts.dtype),
                shutoff=config.prefetch_shutoff,
                experience=self.experience,
            )
        return PrefetchSettings(
            predictor=config.prefetch,
            budget=None if config.prefetch_budget == "auto" else config.prefetch_budget,
            shutoff=config.prefetch_shutoff,
            reserve=prefetch_rows(self.parts.cfg, config, self.parts.spec),
            experience=self.experience,
        )

    def release_store(self):
        """Closes the source of rows, from which all have been read; a disk tier goes on reading and closes it."""
        if not isinstance(self.pool, DiskTier):
            self.parts.store.close()
        self.parts = dataclasses.replace(self.parts, store=None)

    def transport(self, config: OffloadConfig, chosen: Chosen, bank_rows: int = 0):
        """An unfilled `Transport` for `config` (its transport resolved). Raises ConfigError."""
        if isinstance(self.pool, DiskTier) and config.transport != "callback":
            raise ConfigError(
                f"transport={config.transport!r} needs every expert in host memory, but {self.pool.why}: keep "
                "transport 'callback', which reads the others from disk"
            )
        prefetch = self.prefetch(config)
        cls = TRANSPORTS[config.transport]
        if prefetch is not None:
            cls = StagedTransport if config.transport == "device" else PrefetchTransport
            cls = partial(cls, prefetch=prefetch)
        budget = self.budget(config)
        logger.info("cache: %s, %d slots of %s", config.transport, budget.total, budget.source)
        if prefetch is not None:
            logger.info(
                "prefetch: %s, budget %s, shut-off %s, %s",
                config.prefetch,
                config.prefetch_budget,
                "on" if config.prefetch_shutoff else "off",
                f"{prefetch.rows} rows staged, of each {prefetch.prefix}"
                if config.transport == "device"
                else f"{prefetch.reserve} rows of reserve",
            )
        return cls(
            self.parts.spec,
            None if config.transport == "resident" else self.pool,
            budget,
            chosen.policy,
            select=chosen.select,
            forced_admit=config.contract == "atomic-forced-admit",
            max_pairs=max_pairs(self.parts.cfg, self.config),
            implementation=self.implementation,
            experts=self.parts.experts,
            seed=config.seed,
            bank_rows=bank_rows,
            starts=(0, self.parts.cfg.encoder_moe_layers),
            lookahead_rows=self.plan.staging_bytes // self.parts.spec.row_bytes,
        )

    def state(self, transport, config: OffloadConfig):
        """The cache state of a new transport: empty, or with all experts when resident."""
        state = transport.create_state()
        if config.transport != "resident":
            return state
        if self.pool is not None:
            return transport.load(state, self.pool_fill, again=True)
        return transport.load(state, self.parts.store.fill, again=False)

    def pool_fill(self, layer, name, out):
        """As `RowSource.fill`, from the pool."""
        out[...] = self.pool.view(layer, name)


def build_engine(parts: Parts, config: OffloadConfig, transport, state, pages: int) -> Engine:
    """The engine over loaded parts."""
    return Engine(
        parts.graphdef,
        parts.params,
        parts.cfg,
        parts.dtype,
        transport,
        state,
        kv_pages=pages,
        page_size=config.page_size,
        prefill_chunk=config.prefill_chunk,
        decode_chunk=config.decode_chunk,
    )
