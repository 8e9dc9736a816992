"""`python -m moe_jax.convert SRC DST`: a checkpoint in another format, or ready to load."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from moe_jax.checkpoint import convert_bin, resolve
from moe_jax.checkpoint.bin_convert import INDEX, SINGLE
from moe_jax.conversion import Target, prepare, write_hub_layout
from moe_jax.conversion.report import FILE
from moe_jax.errors import ConfigError, MoEJaxError
from moe_jax.interrupts import keep_interrupts
from pallas_kernels.formats import FP8, INT4, MXFP4, Dense, Format

DEFAULT_GROUP = 128

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class FormatName(StrEnum):
    """Formats of experts."""

    bf16 = "bf16"
    fp8 = "fp8"
    int4 = "int4"
    mxfp4 = "mxfp4"


class Layout(StrEnum):
    """What the new directory holds."""

    rows = "rows"
    safetensors = "safetensors"


@app.command()
def main(
    source: Annotated[str, Argument(metavar="SRC", help="Directory of a checkpoint (or hub id).", show_default=False)],
    destination: Annotated[Path, Argument(metavar="DST", help="New directory to write.", show_default=False)],
    form: Annotated[
        FormatName | None,
        Option(
            "--format",
            help="Format of the experts' weights: **bf16** (2 bytes a weight; also undoes a quantisation), **fp8** "
            "(e4m3, a float32 scale for each square block), **int4** (a scale for each group of columns, symmetric), "
            "**mxfp4** (4-bit floats, a power of two for 32 columns). Left out: as they are.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        Layout | None,
        Option(
            help="**rows**: expert rows and dense parameters as orbax checkpoints, which MoE loads without repacking; "
            "every family and format. **safetensors**: Hugging Face layout, which other engines read: bf16, and fp8 "
            "(`weight_scale_inv`) or int4 (compressed-tensors) of experts that are stored one by one. "
            "Left out: rows, but safetensors for pytorch_model*.bin.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        Option(
            min=1,
            help=f"int4: columns that share a scale; fp8: side of a block. Left out: {DEFAULT_GROUP}.",
            show_default=False,
        ),
    ] = None,
):
    """Writes the checkpoint SRC into the new directory DST, for `MoE(DST)`.

    **--format** converts the *experts*, each weight to the nearest value of the format; all other weights stay as they
    are (in rows: as the model uses them, so decoded). The errors are shown a layer and written to DST. Without
    --format, a safetensors checkpoint becomes rows in its own format, and pytorch_model*.bin becomes safetensors.

    DST appears when it is complete and was read again; a fault or Ctrl-C leaves nothing behind.

    Examples:

        python -m moe_jax.convert Qwen3-30B-A3B Qwen3-30B-A3B-mxfp4 --format mxfp4

        python -m moe_jax.convert Mixtral-8x7B Mixtral-8x7B-int4 --format int4 --group-size 64 --layout safetensors
    """
    keep_interrupts()
    try:
        written, report = _convert(source, destination, form, layout, group_size)
    except MoEJaxError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print(f"interrupted: {destination} was not written", file=sys.stderr)
        raise typer.Exit(130) from None
    if report:
        Console().print(report.table())
    print(f"wrote {written}" + (f" (errors: {written / FILE})" if report else ""))


def _convert(
    source: str, destination: Path, form: FormatName | None, layout: Layout | None, group_size: int | None
) -> tuple[Path, object]:
    target = Target(_format(form, group_size)) if form else None
    if group_size is not None and form not in (FormatName.fp8, FormatName.int4):
        raise ConfigError(f"--group-size {group_size}: only --format fp8 and int4 have one")
    directory = resolve(source)
    pickled = any((directory / name).exists() for name in (SINGLE, INDEX))
    if pickled and not any(directory.glob("*.safetensors")):
        if target or layout is Layout.rows:
            raise ConfigError(
                f"{source} holds {SINGLE} or its parts: convert it to safetensors first, without --format and --layout"
            )
        return convert_bin(directory, destination), None
    if layout is not Layout.safetensors:
        return prepare(directory, destination, target)
    if target is None:
        raise ConfigError(f"{source} is in safetensors already: name a --format, or take --layout rows")
    return write_hub_layout(directory, destination, target)


def _format(name: FormatName, group_size: int | None) -> Format:
    size = group_size or DEFAULT_GROUP
    forms = {
        FormatName.bf16: lambda: Dense(),
        FormatName.fp8: lambda: FP8(size),
        FormatName.int4: lambda: INT4(size),
        FormatName.mxfp4: lambda: MXFP4(),
    }
    return forms[name]()


if __name__ == "__main__":
    app()
