"""What a conversion costs in precision, a line a layer: for people, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from moe_jax.conversion.weights import Errors

FILE = "conversion_errors.json"


class ErrorReport:
    """Errors of the experts' weights by decoder layer and expert."""

    def __init__(self, form: str):
        self.form = form
        self._errors: dict[int, dict[int, Errors]] = {}

    def add(self, layer: int, expert: int, errors: Errors) -> None:
        """Takes in the errors of some weights of an expert of that decoder layer."""
        self._errors.setdefault(layer, {}).setdefault(expert, Errors()).add(errors)

    def rows(self) -> list[dict[str, Any]]:
        """A dict a layer: layer, rms and max relative error, the worst expert (by rms) and its rms.

        rms: root of the summed squares of all errors over that of all weights. max: largest error of a weight over the
        largest magnitude of its matrix.
        """
        rows = []
        for layer, experts in sorted(self._errors.items()):
            total = Errors()
            for errors in experts.values():
                total.add(errors)
            worst = max(experts, key=lambda e: experts[e].rms)
            rows.append(
                {
                    "layer": layer,
                    "rms": total.rms,
                    "max": total.largest,
                    "worst_expert": worst,
                    "worst_expert_rms": experts[worst].rms,
                }
            )
        return rows

    def write(self, directory: Path) -> None:
        """Writes the rows as JSON into `directory`."""
        content = {"format": self.form, "layers": self.rows()}
        (directory / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The rows for a terminal."""
        table = Table(title=f"relative errors of the experts' weights in {self.form}")
        for column in ("layer", "rms", "max", "worst expert", "its rms"):
            table.add_column(column, justify="right")
        for row in self.rows():
            cells = [row["rms"], row["max"], row["worst_expert_rms"]]
            rms, largest, worst = (f"{100 * cell:.3f} %" for cell in cells)
            table.add_row(str(row["layer"]), rms, largest, str(row["worst_expert"]), worst)
        return table
