"""Measured tiles: what `experiments/tune_kernels.py` found fastest, in the place of the kernels' own formulas.

`tiles.json` maps "op format [shape class] card" to {"tiles": overrides, ...}; a kernel without an entry for its class
and the card it runs on keeps its formula. Tiles decide the order of sums, so a class may tell apart only what runs that
must agree to the bit have in common: not where rows lie, nor how they got there.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax

FILE = Path(__file__).with_name("tiles.json")


def table_key(op: str, form: str, shape: str) -> str:
    """The key of a kernel's class on the default device's card, "NVIDIA H200" for one."""
    return f"{op} {form} [{shape}] {jax.devices()[0].device_kind}"


@functools.cache
def _entries(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def with_measured(key: str, tiles: dict[str, Any]) -> dict[str, Any]:
    """`tiles` with the values of the table's entry `key`, if there is one.

    tiles: {parameter: value}, or {kernel: {parameter: value}}.

    Raises:
      ValueError: the entry has a kernel or parameter that `tiles` does not have.
    """
    entry = _entries(FILE).get(key)
    return tiles if entry is None else _merged(tiles, entry["tiles"], key)


def _merged(tiles, measured, key):
    if unknown := set(measured) - set(tiles):
        raise ValueError(
            f"{FILE.name}, {key!r}: no {', '.join(sorted(unknown))} among {', '.join(tiles)}; tune it again "
            f"(experiments/tune_kernels.py) or remove the entry"
        )
    nested = {name: _merged(tiles[name], value, key) for name, value in measured.items() if isinstance(value, dict)}
    return tiles | measured | nested
