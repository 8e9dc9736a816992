"""A model's tensors as the files hold them: each plain, or packed in several file tensors that belong together.

Weight tables know the names of an unquantised checkpoint. Here the tensors of a quantised one are gathered under these
names, e.g. `X.qweight`, `X.qzeros`, `X.scales` and `X.g_idx` as the logical tensor `X.weight` of format INT4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from host_offload.parts import Part
from moe_jax.checkpoint import packing
from moe_jax.checkpoint.quantization import WHOLE_ROW, Quantization
from moe_jax.checkpoint.reader import Checkpoint
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format

Shape = tuple[int, ...]
Roles = dict[str, str]  # what a file tensor is for its logical tensor -> its name
Faults = dict[str, list[str]]  # what is wrong -> the tensors, so that a fault of all experts is one line

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT8 = (_E4M3, np.dtype(ml_dtypes.float8_e5m2))
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32)))
_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
_WORDS = (np.dtype(np.int32), np.dtype(np.uint32))
_INDICES = (np.dtype(np.int32), np.dtype(np.int64))

_PLAIN = "weight"  # the role of a tensor that has the logical tensor's own name
# (pattern of a file tensor's name, the logical tensor's name, the role); names that match none are plain.
_COMPANIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "fp8": ((r"(.+)_scale_inv", r"\1", "scale"), (r"(.+)\.scale", r"\1.weight", "scale")),
    "gptq": ((r"(.+)\.(qweight|qzeros|scales|g_idx)", r"\1.weight", r"\2"),),
    "awq": ((r"(.+)\.(qweight|qzeros|scales)", r"\1.weight", r"\2"),),
    "compressed-tensors": ((r"(.+\.weight)_(packed|scale|zero_point|shape|g_idx)", r"\1", r"\2"),),
}


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the model.

    name: as weight tables have it. shape: of its values; None if the files hold it wrongly, which was reported. format:
    the least one that holds the values. parts: suffix -> where that part lies, for every suffix that the format can
    have by its options, so that a tensor can join others that need them. files: names of its file tensors.
    """

    name: str
    shape: Shape | None
    format: Format = Dense()
    parts: Mapping[str, Part] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @classmethod
    def plain(cls, name: str, shape: Shape) -> LogicalTensor:
        """A tensor that the file holds as it is."""
        return cls(name, shape, Dense(), {"": Part(name)}, (name,))


class _Fault(Exception):
    """What is wrong with a file tensor of that name."""

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.text, self.name = text, name


def group_names(names: Iterable[str], quantization: Quantization | None, faults: Faults) -> dict[str, Roles]:
    """Logical name -> its file tensors by role; a plain tensor has the one role "weight"."""
    companions = _COMPANIONS.get(quantization.method, ()) if quantization else ()
    patterns = [(re.compile(pattern), name, role) for pattern, name, role in companions]
    groups: dict[str, Roles] = {}
    for name in names:
        logical, role = name, _PLAIN
        for pattern, logical_name, named_role in patterns:
            if match := pattern.fullmatch(name):
                logical, role = match.expand(logical_name), match.expand(named_role)
                break
        roles = groups.setdefault(logical, {})
        if role in roles:
            faults.setdefault(f"a second {role} of one tensor", []).append(name)
        roles[role] = name
    return groups


def gather(
    checkpoint: Checkpoint, groups: Mapping[str, Roles], quantization: Quantization | None, faults: Faults
) -> dict[str, LogicalTensor]:
    """The logical tensors of `groups` (see `group_names`), each checked: dtypes, shapes, companions, scales, order.

    Companions without weights are reported and left out. Reads all scales and column orders and the zero points of
    GPTQ, a few per cent of the file.
    """
    methods = {"fp8": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
    reader: _Read = methods.get(quantization.method, _plain) if quantization else _plain
    tensors = {}
    for name, roles in groups.items():
        try:
            shape, form, parts = reader(_Files(checkpoint, roles), quantization)
        except _Fault as fault:
            faults.setdefault(fault.text, []).append(fault.name)
            if not _WEIGHTS.isdisjoint(roles):
                tensors[name] = LogicalTensor(name, None, files=tuple(roles.values()))
        else:
            tensors[name] = LogicalTensor(name, shape, form, parts, tuple(roles.values()))
    return tensors


def scale_fault(scales: np.ndarray) -> str | None:
    """Why these scales cannot be right, one clause: NaN, infinite or negative ones, or nothing but zeros.

    A single zero is possible: a block of weights that are all zero. Read once, as unsigned integers: the bits of
    floats from 0 up to infinity are in their order, those of NaN come after, and negative ones last.
    """
    bits = scales.view(np.dtype(f"u{scales.dtype.itemsize}"))
    highest = bits.max(initial=0)
    if scales.dtype in (_E8M0, *_BYTES):  # powers of two, and one NaN
        return "NaN" if highest == 255 else None
    if highest == 0:
        return "all zero" if scales.size else None
    if highest < np.array(np.inf, scales.dtype).view(bits.dtype):
        return None
    values = scales.astype(np.float32)
    kinds = {"NaN": np.isnan(values), "infinite": np.isinf(values), "negative": values < 0}
    return " or ".join(kind for kind, found in kinds.items() if found.any()) or None  # None: only -0


# ------------------------------------------------------------------------------------- one reader for each packing

_WEIGHTS = {_PLAIN, "qweight", "packed"}
_Found = tuple[Shape, Format, dict[str, Part]]
_Read = Callable[["_Files", Quantization | None], _Found]


class _Files:
    """The file tensors of one logical tensor by role."""

    def __init__(self, checkpoint: Checkpoint, roles: Roles):
        self.checkpoint = checkpoint
        self.roles = roles

    def plain(self) -> _Found:
        """The tensor of the one role "weight", as it is."""
        name = self.roles[_PLAIN]
        info = self.checkpoint.info(name)
        if info.dtype in _FLOAT8 or name.endswith((".qweight", ".weight_packed")):
            raise _Fault(
                f"packed weights ({info.dtype}) that config.json's quantization_config does not describe", name
            )
        return info.shape, Dense(), {"": Part(name)}

    def require(self, main: str, *companions: str) -> None:
        """Refuses packed values without what belongs to them, and the other way round."""
        role, name = next(iter(self.roles.items()))
        if main not in self.roles:
            raise _Fault(f"{role} without the {main} that it belongs to", name)
        if main != _PLAIN and _PLAIN in self.roles:
            raise _Fault(f"weights that are in the file plain and as {main}", self.roles[_PLAIN])
        missing = [role for role in companions if role not in self.roles]
        if missing:
            raise _Fault(f"{main} without the {' and '.join(missing)} that belongs to it", self.roles[main])

    def matrix(self, role: str, dtypes: tuple[np.dtype, ...], axes: tuple[int, ...] = (2,)) -> Shape:
        """Shape of the packed values, which must have these dtypes and so many axes."""
        name = self.roles[role]
        dtype, shape, _ = self.checkpoint.info(name)
        if dtype not in dtypes or len(shape) not in axes or 0 in shape:
            wanted = " or ".join(map(str, dtypes))
            raise _Fault(f"{role} that is {dtype} {list(shape)}, where a matrix of {wanted} is needed", name)
        return shape

    def beside(self, role: str, dtypes: tuple[np.dtype, ...], shape: Shape, why: str) -> np.ndarray:
        """The values of a companion, which must have one of these dtypes and, as `why` says, this shape."""
        name = self.roles[role]
        info = self.checkpoint.info(name)
        if info.dtype not in dtypes:
            raise _Fault(f"{role} that is {info.dtype}, where {' or '.join(map(str, dtypes))} is needed", name)
        if info.shape != shape:
            raise _Fault(f"{role} of shape {list(info.shape)}, where {why} needs {list(shape)}", name)
        return self.checkpoint.view(name)

    def scales(self, role: str, dtypes: tuple[np.dtype, ...], shape: Shape, why: str) -> None:
        """Checks scales: dtype, shape and values."""
        fault = scale_fault(self.beside(role, dtypes, shape, why))
        if fault:
            raise _Fault(f"{role} with values that are {fault}", self.roles[role])

    def part(self, role: str, view: Callable[..., np.ndarray], *beside: str) -> Part:
        """What a view makes of a file tensor and those beside it."""
        return Part(self.roles[role], None, view, tuple(self.roles[name] for name in beside))

    def order(self, role: str, columns: int, group: int) -> bool:
        """Whether the columns must be sorted to bring their groups together; no group may be larger than others."""
        groups = self.beside(role, _INDICES, (columns,), f"a matrix of {columns} columns")
        count = columns // group
        natural = np.arange(columns, dtype=groups.dtype) // group
        if np.array_equal(groups, natural) or (groups == -1).all():  # -1: compressed-tensors' mark of an unused one
            return False
        if groups.min() < 0 or groups.max() >= count or (np.bincount(groups, minlength=count) != group).any():
            raise _Fault(f"{role} that does not put {group} columns into each of {count} groups", self.roles[role])
        return True


def _plain(files: _Files, quantization: Quantization | None) -> _Found:
    """Without quantisation, and for gpt-oss, whose weight table knows the tensors of MXFP4 by name."""
    name = files.roles[_PLAIN]
    mxfp4 = quantization is not None and name.endswith("_scales")
    if mxfp4 and (fault := scale_fault(files.checkpoint.view(name))):
        raise _Fault(f"scales with values that are {fault}", name)
    return files.plain()


def _fp8(files: _Files, quantization: Quantization) -> _Found:
    """FP8 with square blocks [.., N, K]; bytes with scales are two FP4 values each [.., N, K / 2]."""
    name = files.roles.get(_PLAIN)
    fp8 = name and files.checkpoint.info(name).dtype == _E4M3
    if files.roles.keys() == {_PLAIN} and not fp8:
        return files.plain()
    files.require(_PLAIN, "scale")
    *lead, N, K = files.matrix(_PLAIN, (_E4M3, *_BYTES), (2, 3))
    if fp8:
        form = FP8(quantization.size)
        scales = -(-N // form.block), -(-K // form.block)
        dtypes, why = (*_FLOATS, _E8M0), f"quantization_config's block of {form.block} for weights {[N, K]}"
        words, convert = packing.fp8_words, packing.fp8_scales
    else:
        form, K = MXFP4(), 2 * K
        _check_width(form, N, K, name)
        scales = N, K // form.block
        dtypes, why = (_E8M0, np.dtype(np.uint8)), f"a block of {form.block} for weights {[N, K]}"
        words, convert = packing.fp4_words, packing.fp4_scales
    files.scales("scale", dtypes, (*lead, *scales), why)
    return (*lead, N, K), form, {"": files.part(_PLAIN, words), "_scale": files.part("scale", convert)}


def _gptq(files: _Files, quantization: Quantization) -> _Found:
    """GPTQ: qweight [K / 8, N], scales [G, N], qzeros [G, N / 8], g_idx [K]."""
    if files.roles.keys() == {_PLAIN}:
        return files.plain()
    files.require("qweight", "qzeros", "scales")
    rows, N = files.matrix("qweight", _WORDS)
    K = 8 * rows
    form, why = _int4(files, quantization, N, K, "scales", 0)
    G = K // form.group
    files.scales("scales", _FLOATS, (G, N), why)
    zeros = files.beside("qzeros", _WORDS, (G, N // 8), why)
    middle = 0x11111111 * (8 - quantization.stored_zero_offset)
    order = "g_idx" in files.roles and files.order("g_idx", K, form.group)
    read_zeros = packing.gptq_zeros if quantization.stored_zero_offset else packing.gptq_v2_zeros
    parts = {
        "": files.part("qweight", packing.gptq_sorted_words, "g_idx")
        if order
        else files.part("qweight", packing.gptq_words),
        "_scale": files.part("scales", packing.transposed_scales),
        "_zero": files.part("qzeros", read_zeros),
        "_order": files.part("g_idx", packing.group_order)
        if order
        else files.part("qweight", packing.gptq_natural_order),
    }
    symmetric = (zeros.view(np.uint32) == middle).all()
    return (N, K), INT4(form.group, zeros=not symmetric, order=order), parts


def _awq(files: _Files, quantization: Quantization) -> _Found:
    """AWQ: qweight [K, N / 8], scales [G, N], qzeros [G, N / 8]."""
    if files.roles.keys() == {_PLAIN}:
        return files.plain()
    files.require("qweight", "qzeros", "scales")
    K, words = files.matrix("qweight", _WORDS)
    N = 8 * words
    form, why = _int4(files, quantization, N, K, "scales", 0)
    G = K // form.group
    files.scales("scales", _FLOATS, (G, N), why)
    files.beside("qzeros", _WORDS, (G, words), why)
    parts = {
        "": files.part("qweight", packing.awq_words),
        "_scale": files.part("scales", packing.transposed_scales),
        "_zero": files.part("qzeros", packing.awq_zeros),
    }
    return (N, K), INT4(form.group, zeros=True), parts


def _compressed(files: _Files, quantization: Quantization) -> _Found:
    """compressed-tensors: packed [N, K / 8], scale [N, G], shape [2], zero_point [N / 8, G], g_idx [K]."""
    if files.roles.keys() == {_PLAIN}:
        return files.plain()
    files.require("packed", "scale", "shape", *(("zero_point",) if quantization.zero_points else ()))
    if "zero_point" in files.roles and not quantization.zero_points:
        raise _Fault("zero_point of weights that quantization_config calls symmetric", files.roles["zero_point"])
    N, words = files.matrix("packed", _WORDS)
    K = 8 * words
    told = files.beside("shape", _INDICES, (2,), "a matrix").tolist()
    if told != [N, K]:
        raise _Fault(f"shape that says {told}, where packed holds {[N, K]}", files.roles["shape"])
    form, why = _int4(files, quantization, N, K, "scale", 1)
    G = K // form.group
    files.scales("scale", _FLOATS, (N, G), why)
    if quantization.zero_points:
        files.beside("zero_point", _WORDS, (-(-N // 8), G), why)
    order = "g_idx" in files.roles and files.order("g_idx", K, form.group)
    parts = {
        "": files.part("packed", packing.int4_sorted_words, "g_idx")
        if order
        else files.part("packed", packing.int4_words),
        "_scale": Part(files.roles["scale"]),
        "_order": files.part("g_idx", packing.group_order)
        if order
        else files.part("packed", packing.int4_natural_order),
    }
    if quantization.zero_points:
        parts["_zero"] = files.part("zero_point", packing.int4_zeros, "scale")
    return (N, K), INT4(form.group, zeros=quantization.zero_points, order=order), parts


def _int4(files: _Files, quantization: Quantization, N: int, K: int, scales: str, axis: int) -> tuple[INT4, str]:
    """(format without options, what its shapes come from) of a matrix [N, K] whose scales have groups on this axis."""
    group = K if quantization.size == WHOLE_ROW else quantization.size
    shape = files.checkpoint.info(files.roles[scales]).shape
    found = shape[axis] if len(shape) == 2 else 0
    fits = K // found if found and K % found == 0 else 0
    if fits not in (0, group) and fits & (fits - 1) == 0:  # nobody groups by other numbers than powers of two
        text = f"{scales} of {found} groups for {K} columns, where quantization_config says group_size = {group}"
        raise _Fault(f"{text} ({fits} would fit)", files.roles[scales])
    form = INT4(group)
    _check_width(form, N, K, next(name for role, name in files.roles.items() if role in _WEIGHTS))
    return form, f"group_size {group} for weights {[N, K]}"


def _check_width(form: Format, N: int, K: int, name: str) -> None:
    try:
        form.row_tensors((N,), K)
    except ValueError as error:
        raise _Fault(str(error), name) from error
