"""Tile sizes of the expert FFN kernels: defaults merged with overrides, checked once, made hashable for `jax.jit`."""

from pallas_kernels.tile_table import table_key


def tiles_key(op: str, spec, width: int, model: int, itemsize: int, rows: str = "") -> str:
    """The table's key for experts of `spec` with F = `width` and D = `model`; `rows` tells batches apart."""
    forms = repr(spec.gate_up) if spec.gate_up == spec.down else f"{spec.gate_up!r}/{spec.down!r}"
    return table_key(op, forms, f"D{model} F{width} {spec.activation} {itemsize}-byte{rows}")


def resolve_tiles(defaults: dict, overrides: dict | None, *, width: int, model: int, least: int) -> tuple:
    """Tile parameters of both kernels as a static argument.

    Args:
      defaults: {"gate_up": {...}, "down": {...}}, each with `block_out`, `num_warps`, `num_stages` and, where
        that is a choice, `block_in` and how many such tiles a step takes, `unroll` and `unroll_missing`. `unroll`
        given alone is both. Of packed rows also `row_sides` and `row_sides_missing`, each by itself.
      overrides: the same form, any part of it, or None.
      width: F; model: D.
      least: smallest side of a tile: 16 where tensor cores work on it, else 1.

    Returns:
      ((kernel, ((parameter, value), ...)), ...), which `dict` turns back.

    Raises:
      ValueError: unknown kernel or parameter; a block that is below `least`, no power of two, or does not divide the
        side that it cuts: columns past the last whole block would silently be left out.
    """
    tiles = {name: dict(t) for name, t in defaults.items()}
    for name, over in (overrides or {}).items():
        known = tiles.get(name, {})
        if not known or set(over) - set(known):
            raise ValueError(f"tiles[{name!r}] = {over!r}: kernels are {sorted(tiles)}, parameters {sorted(known)}")
        both = {"unroll_missing": over["unroll"]} if "unroll" in over else {}
        tiles[name].update(both | over)
    sides = {"gate_up": {"block_out": width, "block_in": model}, "down": {"block_out": model, "block_in": width}}
    for name, cut in sides.items():
        for parameter, side in cut.items():
            if parameter not in tiles[name]:
                continue
            block = tiles[name][parameter]
            if block < least or block & (block - 1) or side % block:
                raise ValueError(
                    f"tiles[{name!r}][{parameter!r}] = {block} for F = {width}, D = {model}: must be a power of two >= "
                    f"{least} that divides {side}; if {side} has no such divisor, use implementation='xla'"
                )
        for parameter in ("unroll", "unroll_missing"):
            step, columns = tiles[name].get(parameter, 1), tiles[name].get("block_in")
            if step < 1 or (columns and cut["block_in"] % (columns * step)):
                rule = (
                    f"that many tiles of {columns} columns must divide {cut['block_in']}" if columns else "at least 1"
                )
                raise ValueError(f"tiles[{name!r}][{parameter!r}] = {step} for F = {width}, D = {model}: {rule}")
    return tuple((name, tuple(sorted(t.items()))) for name, t in tiles.items())
