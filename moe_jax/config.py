"""Configuration of an offloaded model: what may be set, what is allowed, and errors that say so.

`OffloadConfig.parse` is the one door: it takes None (defaults), a dict, a path to a JSON file or a ready
`OffloadConfig`. `offload_path` and `device_memory_ratio` carry the names and meaning that users of MoE-Infinity know.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_offload.pinned import REGISTERED
from host_offload.pinned import WAYS as PINNED_WAYS
from moe_jax.errors import ConfigError

TRANSPORTS = ("auto", "device", "callback", "resident")
SCOPES = ("layer", "global")
CONTRACTS = ("atomic-bypass", "atomic-forced-admit")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DENSE_WEIGHTS = ("decoded", "packed")
CACHE_SIZE_KEYS = ("expert_slots", "cache_rate", "expert_cache_bytes")
# Keys that only mean something beside `prefetch`, and what they are without.
_PREFETCH_KEYS = (("prefetch_budget", "auto"), ("prefetch_shutoff", True), ("warm_start", None))

_BYTE_UNITS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((f"{letter}b", 1000), (f"{letter}ib", 1024))
}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def bad_value(key: str, value: Any, allowed: str) -> ConfigError:
    """The error for a known key with a value that is not allowed; `allowed` completes "it must be ..."."""
    return ConfigError(f"{key}={value!r} is not allowed: it must be {allowed}")


def unknown_key(key: str, known: Sequence[str], what: str) -> ConfigError:
    """The error for an unknown key: names the nearest known one if there is any, else all of them."""
    near = difflib.get_close_matches(str(key).lower(), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return ConfigError(f"unknown {what} key {key!r}; {hint}")


def unknown_setting(name: str) -> ConfigError:
    """The error for a keyword that `MoE.set_cache` does not have."""
    known = ("policy", "slots", "cache_rate", "expert_cache_bytes", "scope", "transport", "contract")
    known += ("prefetch", "prefetch_budget")
    near = ["slots"] if name in ("expert_slots", "slots_per_layer") else difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}; the rest is set when loading"
    return ConfigError(f"set_cache() has no setting {name!r}; {hint}")


def integer(key: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as a Python int in [low, high]; bool and float are refused. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise bad_value(key, value, _int_range(low, high))
    if value < low or (high is not None and value > high):
        raise bad_value(key, value, _int_range(low, high))
    return int(value)


def real(key: str, value: Any, allowed: str, accept: Callable[[float], bool]) -> float:
    """`value` as a finite float for which `accept` holds; bool is refused. Raises ConfigError naming `allowed`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise bad_value(key, value, allowed)
    if not accept(float(value)):
        raise bad_value(key, value, allowed)
    return float(value)


def parse_bytes(key: str, value: Any) -> int:
    """A positive number of bytes from an int or from text such as "12GB" (10^9) or "512MiB" (2^20)."""
    allowed = 'a positive number of bytes: an integer, or text with a unit such as "12GB" or "512MiB"'
    if isinstance(value, str):
        match = _BYTES.fullmatch(value)
        if match is None or match[2].lower() not in _BYTE_UNITS:
            raise bad_value(key, value, allowed)
        count = int(float(match[1]) * _BYTE_UNITS[match[2].lower()])
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        count = int(value)
    else:
        raise bad_value(key, value, allowed)
    if count < 1:
        raise bad_value(key, value, allowed)
    return count


def _int_range(low: int, high: int | None) -> str:
    return f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"


def _choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise bad_value(key, value, "one of " + ", ".join(repr(c) for c in choices) + hint)


def _flag(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise bad_value(key, value, "True or False")


@dataclass(frozen=True)
class OffloadConfig:
    """How a model is loaded, cached and run. Immutable; every field is validated on construction.

    At most one of `expert_slots`, `cache_rate` and `expert_cache_bytes` may be given; with none, the cache takes what
    `device_memory_ratio` leaves after dense weights, KV pages and workspace.

    Args:
        offload_path: directory where packed expert rows are kept between runs; None keeps none.
        device_memory_ratio: share of device memory the model may use, 0 to 1.
        kv_cache_ratio: share of device memory that KV pages may take, 0 to 1; one longest sequence always fits, and no
            more than `max_batch` of them are kept. On a CPU, which has no device memory, pages take up to 1 GiB.
        expert_slots: expert slots over all MoE layers, or a sequence with the slots of each MoE layer.
        cache_rate: share of all experts that have a slot, 0 < rate <= 1.
        expert_cache_bytes: device bytes for expert slots, an int or text such as "12GB" or "512MiB" (kept as int).
        host_memory_bytes: most pinned host memory for expert rows, an int or text; None: 90 % of the host's memory, or
            80 % if not all fit, less what XLA keeps for transfers to a GPU. If not all fit, host memory holds as many
            as do, and the others are read from disk when the device misses them (transport `callback`).
        host_policy: registered name of the policy that decides which experts stay in host memory then; one that uses no
            router scores.
        pinned_memory: "allocated" by jax, or "registered": made by threads and registered with CUDA, which took a
            26th of the time on an H200 (26 GB/s).
        transport: how a missing expert reaches the device; "auto" chooses by hardware.
        policy: registered name of the cache policy.
        prefetch: registered name of the predictor by which experts are fetched ahead of need in the transports
            `callback` and `device`, or None ("none" means the same).
        prefetch_budget: most bytes that one layer's event may prefetch, an int or text such as "32MiB"; "auto": what
            begins to move before it is needed, in the transport `device` 2 MiB.
        prefetch_shutoff: leave prefetch off for the layers that it does not help: `callback` times them with and
            without; `device` counts how many of the fetched rows were used, and times whole calls with and without.
        warm_start: file with what predictors have learned of this checkpoint: read when the model is loaded, if it is
            there, and written when it is closed; None learns anew each time.
        scope: "layer" (each MoE layer has its own slots) or "global" (one pool).
        contract: what an event may leave in the cache, see docs/architecture.md.
        dtype: compute dtype; "auto" is the checkpoint's.
        dense_weights: of a quantised checkpoint: "decoded" to the compute dtype when it is loaded, or "packed", held as
            the files have them and decoded in every product, which takes a half (FP8) to a quarter of the memory.
        seed: default seed of sampling and of random policies, 0 to 2^32 - 1.
        prefill_chunk: prompt tokens a prefill step; None chooses by hardware.
        lookahead_rows: expert rows of the next layer that a long prompt moves before its router has run; None: 128 MiB
            of them on a GPU, none on a CPU or with experts on disk.
        decode_chunk: decode steps a jit call, which is also how often streaming and stop strings look at the output;
            None chooses by transport: 8 where one call starts before the last is over, else 16.
        page_size: tokens a KV page, a power of two from 8 to 256.
        max_sequence_length: longest prompt + new tokens, in tokens; None is the model's own limit.
        max_batch: most sequences that run together.
        load_threads: threads that fill host memory while loading, or read from disk while generating; None chooses.
        progress: show progress bars while loading.
        trace: record the routing of every call.

    Raises:
        ConfigError: a value is not allowed, or more than one cache size is given.
    """

    offload_path: str | None = None
    device_memory_ratio: float = 0.75
    kv_cache_ratio: float = 0.1
    expert_slots: int | tuple[int, ...] | None = None
    cache_rate: float | None = None
    expert_cache_bytes: int | str | None = None
    host_memory_bytes: int | str | None = None
    host_policy: str = "lru"
    pinned_memory: str = REGISTERED
    transport: str = "auto"
    policy: str = "lru"
    prefetch: str | None = None
    prefetch_budget: int | str = "auto"
    prefetch_shutoff: bool = True
    warm_start: str | None = None
    scope: str = "layer"
    contract: str = "atomic-bypass"
    dtype: str = "auto"
    dense_weights: str = "decoded"
    seed: int = 0
    prefill_chunk: int | None = None
    lookahead_rows: int | None = None
    decode_chunk: int | None = None
    page_size: int = 64
    max_sequence_length: int | None = None
    max_batch: int = 8
    load_threads: int | None = None
    progress: bool = True
    trace: bool = False

    def __post_init__(self):
        if self.offload_path is not None:
            if not isinstance(self.offload_path, str | os.PathLike) or not os.fspath(self.offload_path):
                raise bad_value("offload_path", self.offload_path, "a directory path or None")
            self._set("offload_path", os.fspath(self.offload_path))
            if os.path.exists(self.offload_path) and not os.path.isdir(self.offload_path):
                raise bad_value("offload_path", self.offload_path, "a directory, but a file of that name exists")
        for key in ("device_memory_ratio", "kv_cache_ratio"):
            self._set(key, real(key, getattr(self, key), "a number from 0 to 1", lambda v: 0 <= v <= 1))
        self._check_cache_size()
        if self.host_memory_bytes is not None:
            self._set("host_memory_bytes", parse_bytes("host_memory_bytes", self.host_memory_bytes))
        _choice("pinned_memory", self.pinned_memory, PINNED_WAYS)
        _choice("transport", self.transport, TRANSPORTS)
        for key in ("policy", "host_policy"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise bad_value(key, getattr(self, key), 'the name of a registered policy such as "lru"')
        self._check_prefetch()
        _choice("scope", self.scope, SCOPES)
        _choice("contract", self.contract, CONTRACTS)
        _choice("dtype", self.dtype, DTYPES)
        _choice("dense_weights", self.dense_weights, DENSE_WEIGHTS)
        self._set("seed", integer("seed", self.seed, 0, 2**32 - 1))
        self._set("max_batch", integer("max_batch", self.max_batch, 1))
        for key in ("prefill_chunk", "decode_chunk", "max_sequence_length", "load_threads"):
            if getattr(self, key) is not None:
                self._set(key, integer(key, getattr(self, key), 1))
        if self.lookahead_rows is not None:
            self._set("lookahead_rows", integer("lookahead_rows", self.lookahead_rows, 0))
        page_size = integer("page_size", self.page_size, 8, 256)
        if page_size & (page_size - 1):
            raise bad_value("page_size", self.page_size, "a power of two from 8 to 256")
        self._set("page_size", page_size)
        _flag("progress", self.progress)
        _flag("trace", self.trace)

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)  # the only way to normalise a field of a frozen dataclass

    def _check_prefetch(self) -> None:
        if self.prefetch is not None and (not isinstance(self.prefetch, str) or not self.prefetch):
            raise bad_value(
                "prefetch", self.prefetch, 'the name of a predictor such as "cross-layer+temporal", or None'
            )
        if self.prefetch == "none":
            self._set("prefetch", None)
        if self.prefetch_budget != "auto":
            self._set("prefetch_budget", parse_bytes("prefetch_budget", self.prefetch_budget))
        _flag("prefetch_shutoff", self.prefetch_shutoff)
        if self.warm_start is not None:
            if not isinstance(self.warm_start, str | os.PathLike) or not os.fspath(self.warm_start):
                raise bad_value("warm_start", self.warm_start, "the path of a file, or None")
            self._set("warm_start", os.fspath(self.warm_start))
        if self.prefetch is None:
            given = [f"{key}={getattr(self, key)!r}" for key, plain in _PREFETCH_KEYS if getattr(self, key) != plain]
            if given:
                verb = "has" if len(given) == 1 else "have"
                raise ConfigError(
                    f"{' and '.join(given)} {verb} no effect without a predictor: name one as prefetch, such as "
                    "'cross-layer+temporal', or leave it out"
                )
        elif self.transport == "resident":
            raise ConfigError(
                f"prefetch={self.prefetch!r} does not go with transport='resident', which misses no expert: use "
                "transport='device' or 'callback', or leave prefetch out"
            )

    def _check_cache_size(self) -> None:
        given = [key for key in CACHE_SIZE_KEYS if getattr(self, key) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(f'{key}={getattr(self, key)!r}' for key in given)} all set the size of the expert "
                f"cache: keep one of {', '.join(CACHE_SIZE_KEYS)}"
            )
        if self.expert_slots is not None:
            slots = self.expert_slots
            if isinstance(slots, Sequence) and not isinstance(slots, str):
                if not slots:
                    raise bad_value("expert_slots", slots, "an integer or a list with the slots of each MoE layer")
                slots = tuple(integer(f"expert_slots[{i}]", n, 1) for i, n in enumerate(slots))
                if self.scope == "global":
                    raise ConfigError(
                        f"expert_slots={list(slots)!r} gives slots for each layer, but scope='global' has one pool: "
                        "give the total as an integer, or use scope='layer'"
                    )
                self._set("expert_slots", slots)
            else:
                self._set("expert_slots", integer("expert_slots", slots, 1))
        if self.cache_rate is not None:
            rate = real("cache_rate", self.cache_rate, "a number with 0 < cache_rate <= 1", lambda v: 0 < v <= 1)
            self._set("cache_rate", rate)
        if self.expert_cache_bytes is not None:
            self._set("expert_cache_bytes", parse_bytes("expert_cache_bytes", self.expert_cache_bytes))

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Names of all configuration keys, in the order of the fields."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def parse(cls, config: None | Mapping[str, Any] | OffloadConfig | str | os.PathLike = None) -> OffloadConfig:
        """Builds a validated configuration.

        Args:
            config: None for the defaults, a mapping of keys, a path to a JSON file with one object of keys, or an
                OffloadConfig (returned as it is).

        Raises:
            ConfigError: unknown key (names the nearest known one), bad value, or a file that cannot be read as JSON.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if isinstance(config, str | os.PathLike):
            return cls._from_mapping(_read_json(Path(config)), f"{os.fspath(config)}: ")
        if isinstance(config, Mapping):
            return cls._from_mapping(config, "")
        raise ConfigError(
            f"config of type {type(config).__name__} is not understood: "
            "give None, a dict, an OffloadConfig or the path of a JSON file"
        )

    @classmethod
    def _from_mapping(cls, config: Mapping[str, Any], where: str) -> OffloadConfig:
        known = cls.keys()
        for key in config:
            if key not in known:
                raise ConfigError(f"{where}{unknown_key(key, known, 'configuration')}")
        try:
            return cls(**config)
        except ConfigError as error:
            if not where:
                raise
            raise ConfigError(f"{where}{error}") from error

    def replace(self, **changes: Any) -> OffloadConfig:
        """A copy with some keys changed, validated again.

        Setting one cache size to a value (not None) clears the other two, so that a sweep need not know which one the
        configuration started with.

        Raises:
            ConfigError: as `parse`.
        """
        merged = self.to_dict()
        if any(changes.get(key) is not None for key in CACHE_SIZE_KEYS):
            merged |= dict.fromkeys(CACHE_SIZE_KEYS)
        return self._from_mapping(merged | changes, "")

    def to_dict(self) -> dict[str, Any]:
        """All keys with JSON-ready values; `parse(to_dict())` equals the original."""
        result = dataclasses.asdict(self)
        if isinstance(self.expert_slots, tuple):
            result["expert_slots"] = list(self.expert_slots)
        return result


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror or error}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ConfigError(f"configuration file {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} must hold one JSON object, not a {type(content).__name__}")
    return content
