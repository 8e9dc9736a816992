"""From the names in a checkpoint's files to the model's parameters and expert rows.

A family's table is a list of `Rule` (dense parameters), `ExpertRule` (rows of the offloaded experts) and `Ignore`
(tensors the model does not use). Patterns are regular expressions that must match the *whole* name of a file tensor.
One table may hold several layouts of the same family, e.g. experts one by one and experts stacked: a target counts as
filled by whichever layout the file uses. `map_checkpoint` accounts for every name of the file and every target of the
model and reports all that does not fit in one error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from host_offload.parts import Part, View, ViewError
from moe_jax.checkpoint.reader import Checkpoint, listed, raise_problems

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
    """

    pattern: str
    tensor: str
    part: tuple[int, int] | None = None
    stacked: bool | str = False
    views: tuple[View | None, ...] = (None,)

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

    `params[path]`: names of the file tensors whose concatenation along axis 0 is the parameter.
    `expert_sources[tensor][i][e]`: the `Part`s, in order, of that row tensor of expert `e` of MoE layer `i`: the
    structure `host_offload.store.ExpertStore` reads.
    `expert_shapes[tensor]`: shape of a row tensor. `ignored[name]`: why a file tensor is not used.
    """

    params: Mapping[str, tuple[str, ...]]
    expert_sources: Mapping[str, Sequence[Sequence[tuple[Part, ...]]]]
    expert_shapes: Mapping[str, Shape]
    ignored: Mapping[str, str] = field(default_factory=dict)


def map_checkpoint(
    checkpoint: Checkpoint,
    table: Sequence[Rule | ExpertRule | Ignore],
    *,
    targets: Mapping[str, Shape],
    expert_tensors: Mapping[str, Shape],
    moe_layers: Sequence[int],
    num_experts: int,
    tied: Iterable[tuple[str, str]] = (),
) -> WeightMap:
    """Maps every tensor of `checkpoint` by `table`, and checks that all targets are filled once with the right shape.

    Args:
        targets: dotted path -> shape of each dense parameter.
        expert_tensors: name -> shape of the tensors of one expert row.
        moe_layers: the decoder layer's number of each MoE layer, in order.
        num_experts: E.
        tied: pairs (path, twin): `path` is no parameter since it shares the weights of the parameter `twin` (a tied
            output head). Files usually leave such a tensor out; one that is there must hold the twin's values. A pair
            whose `path` is in `targets` (an untied model) has no effect.

    Raises `CheckpointError` listing all tensors without a place, all targets filled twice, not at all or in part, and
    all wrong shapes, in one message.
    """
    tied = dict(tied)
    if lost := [twin for path, twin in tied.items() if path not in targets and twin not in targets]:
        raise ValueError(f"tied: {listed(lost)} is not among the targets")
    problems: list[str] = []
    dense, experts, ignored, unmapped = _match_names(checkpoint.names(), table, problems)
    duplicates = {path: dense.pop(path) for path in tied if path not in targets and path in dense}
    nowhere = {path: files for path, files in dense.items() if path not in targets}
    unmapped += sorted(name for files in nowhere.values() for name, _ in files)
    params = _assemble_params(checkpoint, dense, targets, problems)
    sources = _assemble_experts(checkpoint, experts, expert_tensors, list(moe_layers), num_experts, unmapped, problems)
    if unmapped:
        what = f"{_count(unmapped, 'tensor')} of the file with no place in the model that config.json describes"
        problems.append(f"{what}: {listed(unmapped)}")
    if not problems:
        _check_tied(checkpoint, duplicates, tied, params, problems)
    raise_problems(checkpoint.directory, problems)
    ignored |= {name: f"tied: same as {tied[path]}" for path, files in duplicates.items() for name, _ in files}
    return WeightMap(params, sources, {name: tuple(shape) for name, shape in expert_tensors.items()}, ignored)


# One file tensor that claims a target: its name and which part of the target it is (None: all of it).
_Claim = tuple[str, tuple[int, int] | None]


def _match_names(names: Iterable[str], table: Sequence[Rule | ExpertRule | Ignore], problems: list[str]):
    """Sorts the names of a file: dense claims by target path, expert matches, ignored names with reasons, the rest."""
    ignores = [(re.compile(rule.pattern), rule) for rule in table if isinstance(rule, Ignore)]
    rules = [(re.compile(rule.pattern), rule) for rule in table if not isinstance(rule, Ignore)]
    dense: dict[str, list[_Claim]] = defaultdict(list)
    experts: list[tuple[str, ExpertRule, re.Match]] = []
    ignored: dict[str, str] = {}
    unmapped: list[str] = []
    for name in names:
        why = next((rule.why for pattern, rule in ignores if pattern.fullmatch(name)), None)
        if why is not None:
            ignored[name] = why
            continue
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
    return dict(dense), experts, ignored, unmapped


def _assemble_params(
    checkpoint: Checkpoint, dense: Mapping[str, list[_Claim]], targets: Mapping[str, Shape], problems: list[str]
) -> dict[str, tuple[str, ...]]:
    params, missing = {}, []
    for path, shape in targets.items():
        claims = dense.get(path, [])
        if not claims:
            missing.append(path)
            continue
        fault, parts = _order_parts(claims)
        if not fault:
            fault = _wrong_shape([checkpoint.info(name).shape for name in parts], parts, tuple(shape))
        if fault:
            problems.append(f"{path}: {fault}")
        params[path] = tuple(parts)
    if missing:
        problems.append(f"{_count(missing, 'parameter')} with no tensor in the file: {listed(missing)}")
    return params


def _assemble_experts(
    checkpoint: Checkpoint,
    experts: list[tuple[str, ExpertRule, re.Match]],
    expert_tensors: Mapping[str, Shape],
    moe_layers: list[int],
    E: int,
    unmapped: list[str],
    problems: list[str],
) -> dict[str, list[list[tuple[Part, ...]]]]:
    index = {layer: i for i, layer in enumerate(moe_layers)}
    claims: dict[tuple[str, int, int], list[_Claim]] = defaultdict(list)
    rule_of: dict[str, ExpertRule] = {}
    faults: dict[str, list[str]] = defaultdict(list)  # what is wrong -> where, so that a wrong E is one line, not L*E
    for name, rule, match in experts:
        layer = int(match[1])
        if rule.tensor not in expert_tensors or layer not in index:
            unmapped.append(name)
            continue
        if rule.stacked:
            shape = checkpoint.info(name).shape
            whole = shape[:1] == (E,)
            if rule.stacked == "rows":
                whole = len(shape) > 0 and shape[0] % E == 0
            if not whole:
                must = f"divide by the {E} experts" if rule.stacked == "rows" else f"be {E} experts"
                faults[f"stacked experts of shape {list(shape)} where the first axis must {must}"].append(name)
            members: Iterable[int] = range(E)
        elif int(match[2]) < E:
            members = (int(match[2]),)
        else:
            unmapped.append(name)
            continue
        rule_of[name] = rule
        for e in members:
            claims[rule.tensor, index[layer], e].append((name, rule.part))

    sources: dict[str, list[list[tuple[Part, ...]]]] = {}
    forms: dict[tuple, Shape] = {}

    def shape_of(part: Part) -> Shape:
        # All experts' shares of a tensor have one shape.
        key = part.file, part.view
        if key not in forms:
            forms[key] = part.form(checkpoint)[0]
        return forms[key]

    missing: list[str] = []
    for tensor, shape in expert_tensors.items():
        sources[tensor] = [[() for _ in range(E)] for _ in moe_layers]
        for i, layer in enumerate(moe_layers):
            for e in range(E):
                where = f"{tensor} of expert {e} in decoder layer {layer}"
                found = claims.get((tensor, i, e), [])
                if not found:
                    missing.append(where)
                    continue
                fault, parts = _order_parts(found)
                if fault:
                    problems.append(f"{where}: {fault}")
                    continue
                seen = [part for name in parts for part in _views(checkpoint, name, rule_of[name], e, E)]
                try:
                    shapes = [shape_of(part) for part in seen]
                except ViewError as error:
                    faults[str(error)].append(parts[0])
                    continue
                if _wrong_shape(shapes, [part.file for part in seen], tuple(shape)):
                    text = " + ".join(str(list(s)) for s in shapes)
                    faults[f"{tensor} has shape {text} where the model has {list(shape)}"].append(parts[0])
                sources[tensor][i][e] = tuple(seen)
    if missing:
        problems.append(f"{_count(missing, 'expert tensor')} with no tensor in the file: {listed(missing)}")
    problems += [f"{fault}: {listed(names)}" for fault, names in faults.items()]
    return sources


def _views(checkpoint: Checkpoint, name: str, rule: ExpertRule, e: int, E: int) -> list[Part]:
    """The parts that the file tensor `name` gives to a row tensor of expert `e`."""
    index: int | slice | None = e if rule.stacked else None
    if rule.stacked == "rows":
        shape = checkpoint.info(name).shape
        rows = (shape[0] if shape else 0) // E
        index = slice(e * rows, (e + 1) * rows)
    return [Part(name, index, view) for view in rule.views]


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


def _wrong_shape(shapes: Sequence[Shape], names: Sequence[str], wanted: Shape) -> str:
    """What is wrong with the concatenation along axis 0 of tensors of these shapes, "" if it is `wanted`."""
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
    duplicates: Mapping[str, list[_Claim]],
    twins: Mapping[str, str],
    params: Mapping[str, tuple[str, ...]],
    problems: list[str],
) -> None:
    for path, files in duplicates.items():
        ours, theirs = [name for name, _ in files], params[twins[path]]
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
