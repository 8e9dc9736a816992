"""From the names in a checkpoint's files to the model's parameters and expert rows.

A family's table is a list of `Rule` (dense parameters), `ExpertRule` (rows of the offloaded experts) and `Ignore`
(tensors the model does not use). Patterns are regular expressions that must match the *whole* name of a file tensor.
One table may hold several layouts of the same family, e.g. experts one by one and experts stacked: a target counts as
filled by whichever layout the file uses. `map_checkpoint` accounts for every name of the file and every target of the
model and reports all that does not fit in one error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A dense tensor of the file fills a parameter, or one part of it.

    `pattern`: regular expression over file names (full match); `target`: dotted path in the parameter tree, a template
    in which `\\1`, `\\2`, ... stand for the pattern's groups, e.g. `r"layers.\\1.attn.qkv"`; `part = (i, n)`: the target is the
    concatenation along axis 0 of n file tensors, this one is the i-th (from 0). Several rules may name one target.
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

    Group 1 of `pattern` is the decoder layer's number, group 2 the expert's. With `stacked=True` there is no group 2: the
    tensor's first axis is the expert, `[E, ...]`. `part = (i, n)`: each row tensor is the concatenation along its axis 0
    of n parts, this one is the i-th (from 0), e.g. the gate is `(0, 2)` and the up projection `(1, 2)` of "gate_up".
    """

    pattern: str
    tensor: str
    part: tuple[int, int] | None = None
    stacked: bool = False

    def __post_init__(self):
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
