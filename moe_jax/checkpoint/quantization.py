"""What config.json says of a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from moe_jax.checkpoint.reader import raise_problems

METHODS = ("fp8", "gptq", "awq", "compressed-tensors", "mxfp4")
WHOLE_ROW = -1  # the group size of files with one scale for a row
_ABSENT = object()


@dataclass(frozen=True)
class Quantization:
    """How the packed tensors of a checkpoint are to be read; which tensors are packed, the files themselves say.

    Args:
        method: one of `METHODS`. "fp8": e4m3 values with a scale for each square block, and e2m1 values with a scale
            for 32 neighbours where a file holds bytes (DeepSeek-V4's experts). "gptq", "awq" and
            "compressed-tensors": 4-bit integers with a scale for each group of columns. "mxfp4": gpt-oss.
        size: side of an FP8 block, or columns of an INT4 group (`WHOLE_ROW`: all of a row); None for "mxfp4".
        stored_zero_offset: what GPTQ's first version has subtracted from zero points: 1, else 0.
        zero_points: GPTQ ("sym" is false) and compressed-tensors ("symmetric" is false): whether groups have zero
            points other than the middle.
        column_order: GPTQ ("desc_act") and compressed-tensors ("actorder"): whether columns may have to be sorted to
            bring their groups together. Files of GPTQ decide this and the former; a plan without files relies on them.
    """

    method: str
    size: int | None = None
    stored_zero_offset: int = 0
    zero_points: bool = False
    column_order: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self | None:
        """Reads `quantization_config` (or `compression_config`) of a config.json; None if it has neither.

        Where the language model's settings are nested (`text_config`), it may stand there. Raises `CheckpointError`
        with every field that is missing, unknown or has a value that is not supported, and what is.
        """
        for place, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
            for key in ("quantization_config", "compression_config"):
                if isinstance(place, Mapping) and place.get(key) is not None:
                    fields = _Fields(prefix + key, place[key])
                    found = _read(fields)
                    raise_problems("config.json", fields.problems)
                    return cls(**found)
        return None


class _Fields:
    """A JSON object under a name, and what is wrong with it so far."""

    def __init__(self, name: str, content: Any, problems: list[str] | None = None):
        self.name = name
        self.problems: list[str] = [] if problems is None else problems
        self.content: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
        if not isinstance(content, Mapping):
            self.problems.append(f"{name} = {content!r}: must be an object")

    def take(self, names: str | tuple[str, ...], default: Any = _ABSENT) -> Any:
        """The first of these fields that is there; the default if none is, or a problem if there is no default."""
        names = (names,) if isinstance(names, str) else names
        for name in names:
            if self.content.get(name) is not None:
                return self.content[name]
        if default is _ABSENT:
            self.problems.append(f"{self.name}.{names[0]} is missing")
        return default

    def only(self, names: str | tuple[str, ...], allowed: tuple, default: Any = _ABSENT) -> Any:
        """The field, which must be one of `allowed`."""
        value = self.take(names, default)
        # By type too: 1 and True are equal in Python but not the same setting.
        if value is not _ABSENT and not any(type(value) is type(good) and value == good for good in allowed):
            names = (names,) if isinstance(names, str) else names
            supported = " or ".join(map(repr, allowed))
            self.problems.append(f"{self.name}.{names[0]} = {value!r}: supported is {supported}")
        return value

    def group(self, names: str | tuple[str, ...]) -> int:
        """Columns of a group."""
        value = self.take(names)
        good = type(value) is int and (value == WHOLE_ROW or value > 0)
        if value is not _ABSENT and not good:
            names = (names,) if isinstance(names, str) else names
            self.problems.append(
                f"{self.name}.{names[0]} = {value!r}: must be a positive integer, or -1 for whole rows"
            )
        return value if good else WHOLE_ROW


def _read(fields: _Fields) -> dict[str, Any]:
    implied = "compressed-tensors" if fields.name.endswith("compression_config") else _ABSENT
    method = fields.take("quant_method", implied) if not fields.problems else None
    if method is None or method is _ABSENT:
        return {"method": ""}
    readers = {"fp8": _read_fp8, "gptq": _read_gptq, "awq": _read_awq, "compressed-tensors": _read_compressed}
    if method not in METHODS:
        fields.problems.append(f"{fields.name}.quant_method = {method!r}: supported are {', '.join(METHODS)}")
        return {"method": ""}
    return {"method": method, **(readers[method](fields) if method in readers else {})}


def _read_fp8(fields: _Fields) -> dict[str, Any]:
    fields.only("fmt", ("e4m3",), "e4m3")
    fields.only("activation_scheme", ("dynamic",), "dynamic")
    block = fields.take("weight_block_size")
    good = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if block is not _ABSENT and not (good and block[0] == block[1]):
        fields.problems.append(
            f"{fields.name}.weight_block_size = {block!r}: supported are two equal positive integers, such as "
            "[128, 128] (a scale for each square block)"
        )
        good = False
    return {"size": block[0] if good else None}


def _read_gptq(fields: _Fields) -> dict[str, Any]:
    fields.only("bits", (4,))
    version = fields.only("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return {
        "size": fields.group("group_size"),
        "stored_zero_offset": 1 if version == "gptq" else 0,
        "zero_points": fields.take("sym", True) is False,
        "column_order": fields.take("desc_act", False) is True,
    }


def _read_awq(fields: _Fields) -> dict[str, Any]:
    fields.only(("bits", "w_bit"), (4,))
    fields.only("zero_point", (True,), True)
    version = fields.take("version", "gemm")
    if str(version).lower() != "gemm":
        fields.problems.append(f"{fields.name}.version = {version!r}: supported is 'gemm'")
    return {"size": fields.group(("group_size", "q_group_size"))}


def _read_compressed(fields: _Fields) -> dict[str, Any]:
    fields.only("format", ("pack-quantized",))
    groups = fields.take("config_groups")
    if groups is _ABSENT:
        return {}
    name = f"{fields.name}.config_groups"
    if not isinstance(groups, Mapping) or not groups:
        fields.problems.append(f"{name} = {groups!r}: must be an object with at least one group")
        return {}
    found = [_read_compressed_group(_Fields(f"{name}.{key}", group, fields.problems)) for key, group in groups.items()]
    if any(group != found[0] for group in found[1:]):
        fields.problems.append(f"{name}: groups of different sizes or symmetry ({found}); all must be alike")
    return found[0]


def _read_compressed_group(fields: _Fields) -> dict[str, Any]:
    if fields.content.get("input_activations") is not None:
        fields.problems.append(f"{fields.name}.input_activations: supported are 4-bit weights only, so it must be null")
    weights = fields.take("weights")
    if weights is _ABSENT:
        return {}
    weights = _Fields(f"{fields.name}.weights", weights, fields.problems)
    weights.only("num_bits", (4,))
    weights.only("type", ("int",), "int")
    strategy = weights.only("strategy", ("group", "channel"))
    size = weights.group("group_size") if strategy == "group" else WHOLE_ROW
    symmetric = weights.only("symmetric", (True, False))
    # "weight" and "static" reorder columns only while weights are being quantised.
    sorts = weights.take("actorder", None) in ("group", "dynamic", True)
    return {"size": size, "zero_points": symmetric is False, "column_order": sorts}
