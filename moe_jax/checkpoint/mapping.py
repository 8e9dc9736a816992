"""From the names in a checkpoint's files to the model's parameters and expert rows.

A family's table is a list of `Rule` (dense parameters), `ExpertRule` (rows of the offloaded experts) and `Ignore`
(tensors the model does not use). Patterns are regular expressions that must match the *whole* name of a logical tensor:
of a file tensor, or of several that hold one packed tensor (`logical.py`), so a table knows nothing of quantisation.
One table may hold several layouts of the same family, e.g. experts one by one and experts stacked: a target counts as
filled by whichever layout the file uses. `map_checkpoint` accounts for every name of the file and every target of the
model and reports all that does not fit in one error.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from host_offload.parts import Part, View, ViewError
from moe_jax.checkpoint.logical import Faults, LogicalTensor, gather, group_names
from moe_jax.checkpoint.quantization import Quantization
from moe_jax.checkpoint.reader import Checkpoint, listed, raise_problems
from pallas_kernels.expert_ffn import SILU, ExpertSpec
from pallas_kernels.formats import INT4, Dense, Format

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """A dense tensor of the file fills a parameter, or one part of it.

    `pattern`: regular expression over file names (full match); `target`: dotted path in the parameter tree, a template
    in which `\\1`, `\\2`, ... stand for the pattern's groups, e.g. `r"layers.\\1.attn.qkv"`; `part = (i, n)`: the
    target is the concatenation along axis 0 of n file tensors, this one is the i-th (from 0).
    """

    pattern: str
    target: str
    part: tuple[int, int] | None = None

    def __post_init__(self):
        re.compile(self.pattern)
        _check_part(self.part, self)


@dataclass(frozen=True)
class ExpertRule:
    """An expert tensor of the file fills the row tensor `tensor` ("gate_up", "down"), or one part of it.

    Group 1 of `pattern` is the decoder layer's number, group 2 the expert's. With `stacked=True` there is no group 2:
    the tensor's first axis is the expert, `[E, ...]`; with `stacked="rows"` its first axis holds the rows of all
    experts one after another, `[E * rows, ...]`. `part = (i, n)`: each row tensor is the concatenation along its
    axis 0 of n parts, this one is the i-th (from 0): the gate is `(0, 2)`, the up projection `(1, 2)` of "gate_up".
    `views`: how one expert's share of the file tensor is seen (`host_offload.parts`), such as transposed; several views
    of it follow each other along axis 0, such as the even and then the odd rows where gate and up alternate.
    `first`: added to the layer's number, for a stack of layers whose numbers follow those of another stack.
    """

    pattern: str
    tensor: str
    part: tuple[int, int] | None = None
    stacked: bool | str = False
    views: tuple[View | None, ...] = (None,)
    first: int = 0

    def __post_init__(self):
        if self.stacked not in (False, True, "rows"):
            raise ValueError(f"{self}: stacked must be False, True or 'rows'")
        if not self.views:
            raise ValueError(f"{self}: views must not be empty; (None,) takes the tensor as it is")
        groups, wanted = re.compile(self.pattern).groups, 1 if self.stacked else 2
        if groups != wanted:
            raise ValueError(
                f"{self}: the pattern has {groups} groups, not {wanted}: (layer)"
                + ("" if self.stacked else ", (expert)")
            )
        _check_part(self.part, self)


@dataclass(frozen=True)
class Ignore:
    """File tensors that the model does not use; `why` is one clause for the reader. Wins over every other rule."""

    pattern: str
    why: str

    def __post_init__(self):
        re.compile(self.pattern)


def _check_part(part: tuple[int, int] | None, rule: object) -> None:
    if part is not None and not 0 <= part[0] < part[1]:
        raise ValueError(f"{rule}: part must be (i, n) with 0 <= i < n")


@dataclass(frozen=True)
class WeightMap:
    """Where each parameter and each expert row lies in the files; `map_checkpoint` builds it, complete and checked.

    `params[path]`: the tensors whose concatenation along axis 0 is the parameter.
    `expert_sources[tensor][i][e]`: the `Part`s, in order, of that row tensor of expert `e` of MoE layer `i`: the
    structure `host_offload.store.ExpertStore` reads.
    `expert_shapes[tensor]`: shape of a row tensor. `packed`: those row tensors that are parts of a packed format, whose
    dtype does not depend on the compute dtype. `ignored[name]`: why a file tensor is not used.
    `experts`: what an expert computes, with the formats that the files hold.
    """

    params: Mapping[str, tuple[LogicalTensor, ...]]
    expert_sources: Mapping[str, Sequence[Sequence[tuple[Part, ...]]]]
    expert_shapes: Mapping[str, Shape]
    ignored: Mapping[str, str] = field(default_factory=dict)
    packed: frozenset[str] = frozenset()
    experts: ExpertSpec = SILU


def map_checkpoint(
    checkpoint: Checkpoint,
    table: Sequence[Rule | ExpertRule | Ignore],
    *,
    targets: Mapping[str, Shape],
    expert_tensors: Mapping[str, Shape],
    moe_layers: Sequence[int],
    num_experts: int,
    tied: Iterable[tuple[str, str]] = (),
    experts: ExpertSpec = SILU,
    quantization: Quantization | None = None,
) -> WeightMap:
    """Maps every tensor of `checkpoint` by `table`, and checks that all targets are filled once with the right shape.

    Args:
        targets: dotted path -> shape of each dense parameter.
        expert_tensors: name -> shape of the tensors of one expert row, as `experts` stores them. Where the files hold
            packed weights for one of them, the parts of their format take its place.
        moe_layers: the decoder layer's number of each MoE layer, in order.
        num_experts: E.
        tied: pairs (path, twin): `path` is no parameter since it shares the weights of the parameter `twin` (a tied
            output head). Files usually leave such a tensor out; one that is there must hold the twin's values. A pair
            whose `path` is in `targets` (an untied model) has no effect.
        experts: what an expert computes.
        quantization: how packed tensors of the file are read.

    Raises `CheckpointError` listing all tensors without a place, all targets filled twice, not at all or in part, all
    wrong shapes, and all that is wrong with packed tensors, in one message.
    """
    tied = dict(tied)
    if lost := [twin for path, twin in tied.items() if path not in targets and twin not in targets]:
        raise ValueError(f"tied: {listed(lost)} is not among the targets")
    problems: list[str] = []
    faults: Faults = {}
    groups = group_names(checkpoint.names(), quantization, faults)
    ignored = _ignored(groups, table)
    groups = {name: roles for name, roles in groups.items() if ignored.keys().isdisjoint(roles.values())}
    tensors = gather(checkpoint, groups, quantization, faults)
    dense, rows, unmapped = _match_names(tensors, table, problems)
    duplicates = {path: dense.pop(path) for path in tied if path not in targets and path in dense}
    unmapped += sorted(name for path, claims in dense.items() if path not in targets for name, _ in claims)
    params = _assemble_params(tensors, dense, targets, problems)
    assembly = _ExpertRows(checkpoint, tensors, dict(expert_tensors), list(moe_layers), num_experts, experts, faults)
    weights = assembly.build(rows, params, unmapped, problems)
    unused = {name for name in unmapped if _is_empty_bias(checkpoint, name, tensors)}
    ignored |= dict.fromkeys(sorted(unused), "zeros that AutoGPTQ adds to every packed layer")
    if files := [file for name in unmapped if name not in unused for file in tensors[name].files]:
        what = f"{_count(files, 'tensor')} of the file with no place in the model that config.json describes"
        problems.append(f"{what}: {listed(files)}")
    problems += [f"{fault}: {listed(names)}" for fault, names in faults.items()]
    if not problems:
        _check_tied(checkpoint, tensors, duplicates, tied, params, problems)
    raise_problems(checkpoint.directory, problems)
    copies = {file: path for path, claims in duplicates.items() for name, _ in claims for file in tensors[name].files}
    return replace(weights, ignored=ignored | {file: f"tied: same as {tied[path]}" for file, path in copies.items()})


# One logical tensor that claims a target: its name and which part of the target it is (None: all of it).
_Claim = tuple[str, tuple[int, int] | None]
_Match = tuple[str, ExpertRule, re.Match]


def _ignored(groups: Mapping[str, Mapping[str, str]], table: Sequence[Rule | ExpertRule | Ignore]) -> dict[str, str]:
    """Why file tensors are not used, by name: all that belong to a logical tensor to be ignored."""
    ignores = [(re.compile(rule.pattern), rule.why) for rule in table if isinstance(rule, Ignore)]
    ignored = {}
    for logical, roles in groups.items():
        for pattern, why in ignores:
            if pattern.fullmatch(logical) or all(pattern.fullmatch(file) for file in roles.values()):
                ignored |= dict.fromkeys(roles.values(), why)
                break
    return ignored


def _is_empty_bias(checkpoint: Checkpoint, name: str, tensors: Mapping[str, LogicalTensor]) -> bool:
    """Whether this is a bias of zeros beside packed weights: files of older AutoGPTQ versions are full of them."""
    layer, _, kind = name.rpartition(".")
    weights = tensors.get(f"{layer}.weight")
    packed = weights is not None and isinstance(weights.format, INT4)
    return kind == "bias" and packed and not checkpoint.view(name).astype(np.float32).any()


def _match_names(names: Iterable[str], table: Sequence[Rule | ExpertRule | Ignore], problems: list[str]):
    """Sorts names by the rule that they match: dense claims by target path, expert matches, the rest."""
    rules = [(re.compile(rule.pattern), rule) for rule in table if not isinstance(rule, Ignore)]
    dense: dict[str, list[_Claim]] = defaultdict(list)
    experts: list[_Match] = []
    unmapped: list[str] = []
    for name in names:
        matches = [(rule, match) for pattern, rule in rules if (match := pattern.fullmatch(name))]
        if len(matches) > 1:
            patterns = ", ".join(repr(rule.pattern) for rule, _ in matches)
            problems.append(
                f"{name} matches {len(matches)} patterns of the weight table, {patterns}: make them disjoint"
            )
        elif not matches:
            unmapped.append(name)
        elif isinstance(matches[0][0], Rule):
            rule, match = matches[0]
            dense[match.expand(rule.target)].append((name, rule.part))
        else:
            experts.append((name, *matches[0]))
    return dict(dense), experts, unmapped


def _assemble_params(
    tensors: Mapping[str, LogicalTensor],
    dense: Mapping[str, list[_Claim]],
    targets: Mapping[str, Shape],
    problems: list[str],
) -> dict[str, tuple[LogicalTensor, ...]]:
    params, missing = {}, []
    for path, shape in targets.items():
        claims = dense.get(path, [])
        if not claims:
            missing.append(path)
            continue
        fault, names = _order_parts(claims)
        found = tuple(tensors[name] for name in names)
        if not fault:
            fault = _wrong_shape([tensor.shape for tensor in found], names, tuple(shape))
        if fault:
            problems.append(f"{path}: {fault}")
        params[path] = found
    if missing:
        problems.append(f"{_count(missing, 'parameter')} with no tensor in the file: {listed(missing)}")
    return params


class _ExpertRows:
    """Finds the parts of every expert row."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, LogicalTensor],
        expert_tensors: dict[str, Shape],
        moe_layers: list[int],
        E: int,
        experts: ExpertSpec,
        faults: Faults,
    ):
        self.checkpoint, self.tensors, self.expert_tensors = checkpoint, tensors, expert_tensors
        self.moe_layers, self.E, self.experts, self.faults = moe_layers, E, experts, faults
        self.rule_of: dict[str, ExpertRule] = {}
        self._forms: dict[tuple, Shape] = {}

    def build(self, matches: list[_Match], params, unmapped: list[str], problems: list[str]) -> WeightMap:
        """The map of `params` and of the rows that the `matches` fill; appends names without a place and problems."""
        claims = self._claims(matches, unmapped)
        sources: dict[str, list[list[tuple[Part, ...]]]] = {}
        shapes: dict[str, Shape] = {}
        packed: set[str] = set()
        formats: dict[str, Format] = {}
        missing: list[str] = []
        for tensor, shape in self.expert_tensors.items():
            form = self._format(tensor, [claim for key, found in claims.items() if key[0] == tensor for claim in found])
            stored = {"": tuple(shape)}
            if not isinstance(form, Dense):
                formats[tensor] = form
                stored = self._stored(tensor, form, tuple(shape))
                packed |= {tensor + suffix for suffix in stored}
            names = {suffix: tensor + suffix for suffix in stored}
            shapes |= {names[suffix]: part for suffix, part in stored.items()}
            sources |= {name: [[() for _ in range(self.E)] for _ in self.moe_layers] for name in names.values()}
            for i, layer in enumerate(self.moe_layers):
                for e in range(self.E):
                    where = f"{tensor} of expert {e} in decoder layer {layer}"
                    found = claims.get((tensor, i, e), [])
                    fault, order = _order_parts(found) if found else ("", [])
                    if fault:
                        problems.append(f"{where}: {fault}")
                    if not found:
                        missing.append(where)
                    if fault or not found:
                        continue
                    for suffix, name in names.items():
                        sources[name][i][e] = self._parts(order, form, suffix, e)
                    self._check_shape(tensor, order, form, tuple(shape), sources[tensor][i][e])
        if missing:
            problems.append(f"{_count(missing, 'expert tensor')} with no tensor in the file: {listed(missing)}")
        return WeightMap(params, sources, shapes, packed=frozenset(packed), experts=replace(self.experts, **formats))

    def _claims(self, matches: list[_Match], unmapped: list[str]) -> dict[tuple[str, int, int], list[_Claim]]:
        """(row tensor, MoE layer, expert) -> the logical tensors that claim it."""
        index = {layer: i for i, layer in enumerate(self.moe_layers)}
        claims: dict[tuple[str, int, int], list[_Claim]] = defaultdict(list)
        for name, rule, match in matches:
            layer = rule.first + int(match[1])
            if rule.tensor not in self.expert_tensors or layer not in index:
                unmapped.append(name)
                continue
            if rule.stacked:
                self._check_stack(name, rule)
                members: Iterable[int] = range(self.E)
            elif int(match[2]) < self.E:
                members = (int(match[2]),)
            else:
                unmapped.append(name)
                continue
            self.rule_of[name] = rule
            for e in members:
                claims[rule.tensor, index[layer], e].append((name, rule.part))
        return claims

    def _fault(self, text: str, name: str) -> None:
        names = self.faults.setdefault(text, [])  # a wrong number of experts is one line, not one for each
        if name not in names[-1:]:
            names.append(name)

    def _check_stack(self, name: str, rule: ExpertRule) -> None:
        tensor = self.tensors[name]
        if tensor.shape is None:
            return
        whole = tensor.shape[:1] == (self.E,)
        if rule.stacked == "rows":
            whole = len(tensor.shape) > 0 and tensor.shape[0] % self.E == 0
        if not whole:
            must = f"divide by the {self.E} experts" if rule.stacked == "rows" else f"be {self.E} experts"
            self._fault(f"stacked experts of shape {list(tensor.shape)} where the first axis must {must}", name)

    def _format(self, tensor: str, claims: list[_Claim]) -> Format:
        """The format of all experts' `tensor`; dense also where the weight table itself knows the packed tensors."""
        names = [name for name in dict.fromkeys(name for name, _ in claims) if self.tensors[name].shape is not None]
        formats = {name: self.tensors[name].format for name in names}
        kinds = {name: _without_options(form) for name, form in formats.items()}
        if not kinds:
            return Dense()
        (usual, count), *others = Counter(kinds.values()).most_common()
        for other, _ in others:
            odd = [name for name, kind in kinds.items() if kind == other]
            self.faults[f"{tensor} of experts is {other} here, but {usual} in {count} other tensors"] = odd
        if not isinstance(usual, INT4):
            return usual
        same = [form for name, form in formats.items() if kinds[name] == usual]
        return replace(usual, zeros=any(form.zeros for form in same), order=any(form.order for form in same))

    def _stored(self, tensor: str, form: Format, shape: Shape) -> dict[str, Shape]:
        """Suffix -> shape of the parts of a row's `tensor` of so many values."""
        try:
            found = form.row_tensors(self.experts.outs(tensor, shape[0]), shape[1])
        except ValueError:  # a width that the files' tensors do not have, so the check of shapes reports it
            return {"": shape}
        return {suffix: part for suffix, (part, _) in found.items()}

    def _parts(self, names: list[str], form: Format, suffix: str, e: int) -> tuple[Part, ...]:
        """Where the part `suffix` of expert `e` lies in the tensors of these names, in order."""
        found: list[Part] = []
        for name in names:
            tensor, rule = self.tensors[name], self.rule_of[name]
            if tensor.shape is None or tensor.format.name != form.name:
                continue  # reported
            index: int | slice | None = e if rule.stacked else None
            if rule.stacked == "rows":
                rows = (tensor.shape[0] if tensor.shape else 0) // self.E
                index = slice(e * rows, (e + 1) * rows)
            if isinstance(form, Dense):
                found += [Part(name, index, view) for view in rule.views]
            elif rule.stacked == "rows" or rule.views != (None,):
                self._fault(f"packed experts ({form.name}) in a layout that is read only unpacked", name)
            else:
                found.append(replace(tensor.parts[suffix], index=index))
        return tuple(found)

    def _check_shape(self, tensor: str, names: list[str], form: Format, shape: Shape, parts: tuple[Part, ...]) -> None:
        """Reports parts of one row tensor that together do not have `shape` (dense, or of the packed values)."""
        seen = [self.tensors[name] for name in names]
        if any(found.shape is None or found.format.name != form.name for found in seen) or len(parts) < len(seen):
            return  # reported
        if isinstance(form, Dense):
            try:
                shapes = [self._shape_of(part) for part in parts]
            except ViewError as error:
                self._fault(str(error), names[0])
                return
        else:
            shapes = [found.shape[1:] if self.rule_of[found.name].stacked else found.shape for found in seen]
        if _wrong_shape(shapes, [part.file for part in parts], shape):
            text = " + ".join(str(list(s)) for s in shapes)
            self._fault(f"{tensor} has shape {text} where the model has {list(shape)}", names[0])
        elif not isinstance(form, Dense):
            found = form.row_tensors(tuple(s[0] for s in shapes), shape[1])
            if {suffix: part for suffix, (part, _) in found.items()} != self._stored(tensor, form, shape):
                outs = self.experts.outs(tensor, shape[0])
                self._fault(f"{tensor} in one tensor whose {form.name} parts are not those of {outs} rows", names[0])

    def _shape_of(self, part: Part) -> Shape:
        key = part.file, part.view  # all experts' shares of a tensor have one shape
        if key not in self._forms:
            self._forms[key] = part.form(self.checkpoint)[0]
        return self._forms[key]


def _without_options(form: Format) -> Format:
    return INT4(form.group) if isinstance(form, INT4) else form


def _order_parts(claims: list[_Claim]) -> tuple[str, list[str]]:
    """(what is wrong or "", names in the order of their parts) of the tensors that claim one target."""
    names = [name for name, _ in claims]
    if any(part is None for _, part in claims):
        return (f"filled more than once, by {listed(names)}", names) if len(claims) > 1 else ("", names)
    counts = {n for _, (_, n) in claims}
    positions = [i for _, (i, _) in claims]
    if len(counts) > 1 or len(set(positions)) < len(positions):
        return f"filled more than once, by {listed(names)}", names
    absent = [str(i) for i in range(counts.pop()) if i not in positions]
    if absent:
        return f"part {listed(absent)} (counted from 0) has no tensor in the file, which holds {listed(names)}", names
    return "", [name for _, name in sorted(zip(positions, names, strict=True))]


def _wrong_shape(shapes: Sequence[Shape | None], names: Sequence[str], wanted: Shape) -> str:
    """What is wrong with the concatenation along axis 0 of tensors of these shapes, "" if it is `wanted`.

    None stands for a tensor that cannot be read, which was reported.
    """
    if None in shapes:
        return ""
    if len(shapes) == 1:
        fits = shapes[0] == wanted
    else:
        fits = all(len(s) > 0 and s[1:] == wanted[1:] for s in shapes) and sum(s[0] for s in shapes) == wanted[0]
    if fits:
        return ""
    found = " + ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
    return f"has shape {list(wanted)} in the model, but the file has {found}"


def _check_tied(
    checkpoint: Checkpoint,
    tensors: Mapping[str, LogicalTensor],
    duplicates: Mapping[str, list[_Claim]],
    twins: Mapping[str, str],
    params: Mapping[str, tuple[LogicalTensor, ...]],
    problems: list[str],
) -> None:
    for path, claims in duplicates.items():
        ours = [file for name, _ in claims for file in tensors[name].files]
        theirs = [file for tensor in params[twins[path]] for file in tensor.files]
        same = len(ours) == len(theirs) and all(
            checkpoint.info(a) == checkpoint.info(b)
            and np.array_equal(_raw(checkpoint.view(a)), _raw(checkpoint.view(b)))
            for a, b in zip(ours, theirs, strict=True)
        )
        if not same:
            problems.append(
                f"{listed(ours)} differs from {listed(theirs)} though the config ties them: "
                "set tie_word_embeddings to false in config.json or remove the tensor"
            )


def _raw(array: np.ndarray) -> np.ndarray:
    """The bits of an array: compares NaN with NaN, and fast for dtypes NumPy has no loops for."""
    return array.reshape(-1).view(np.dtype(f"u{array.dtype.itemsize}"))


def _count(names: Sequence[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"{len(names)} {noun}s"
