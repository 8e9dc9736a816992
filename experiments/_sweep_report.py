"""What a sweep shows: tables, plots and report.md, made from the rows of results.csv alone.

Colours are those of Okabe and Ito, which also the colour-blind tell apart.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from host_offload.bounds import gap
from host_offload.cost_model import CostModel, predict_ms_per_token
from host_offload.simulate import Result

Row = Mapping[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
BASELINES = ("random", "static", "lfu", "lru")  # always named in plots, when they were run
BEST = 4  # policies named beside them
OPTIMA = {"atomic-bypass": "optimum, bypass", "atomic-forced-admit": "optimum, forced admit"}


class Group(NamedTuple):
    """The rows that one table or plot compares: of one trace, scope and contract, both optima beside them.

    slots: [n] rising, slots a layer. rates: policy -> [n, seeds] hit rates; NaN where a cell was not run.
    optima: contract -> [n] hit rates. rows: (policy, slots, seed) -> row; optima as ("belady", slots, contract).
    """

    trace: str
    scope: str
    contract: str
    slots: list[int]
    rates: dict[str, np.ndarray]
    optima: dict[str, np.ndarray]
    rows: dict[tuple, Row]

    @property
    def name(self):
        """For files: trace, scope and contract."""
        return f"{self.trace}_{self.scope}_{self.contract}"

    @property
    def mean(self):
        """policy -> [n], the mean over seeds."""
        return {policy: rates.mean(1) for policy, rates in self.rates.items()}

    def ranked(self):
        """Policies by falling hit rate, averaged over the capacities at which all were run; else over their own."""
        mean = self.mean
        common = ~np.isnan(np.array(list(mean.values()))).any(0)
        key = {p: v[common].mean() if common.any() else np.nanmean(v) for p, v in mean.items()}
        return sorted(mean, key=lambda policy: -key[policy])

    def named(self):
        """Policies that a plot names: the best and the baselines, in the order of `ranked`."""
        ranked = self.ranked()
        return [p for i, p in enumerate(ranked) if i < BEST or p in BASELINES]


def select(rows: Iterable[Row], reset, phase, traces):
    """The rows of these traces that were made with this reset and phase."""
    return [row for row in rows if row["reset"] == reset and row["phase"] == phase and row["trace"] in traces]


def result_of(row: Row) -> Result:
    """The `Result` that a row of results.csv was made from, without events and end state."""
    n = row["slots_per_layer"] * (row["L"] if row["scope"] == "global" else 1)
    block = {name: row[name] for name in ("contract", "ties", "reset", "scope", "seed", "dedup", "scores", "phase")}
    block["quota"] = [n] * (1 if row["scope"] == "global" else row["L"])
    arrays = [np.array(json.loads(row[name])) for name in ("counters", "tokens_by_phase", "steps_by_phase")]
    return Result(row["policy"], np.full(row["L"], n, np.int32), block, *arrays)


def groups(rows: Iterable[Row]) -> list[Group]:
    """Rows of one reset and phase as `Group`s, in their order."""
    rows = list(rows)
    optima = [row for row in rows if row["policy"] == "belady"]
    found = {}
    for row in rows:
        if row["policy"] != "belady":
            found.setdefault((row["trace"], row["scope"], row["contract"]), []).append(row)
    made = []
    for (trace, scope, contract), members in found.items():
        slots = sorted({row["slots_per_layer"] for row in members})
        seeds = {}
        by_key = {}
        for row in members:
            name = label(row)
            seeds.setdefault(name, set()).add(row["seed"])
            by_key[name, row["slots_per_layer"], row["seed"]] = row
        rates = {
            name: np.array([[_rate(by_key.get((name, n, seed))) for seed in sorted(of)] for n in slots])
            for name, of in seeds.items()
        }
        best = {}
        for row in optima:
            if (row["trace"], row["scope"]) == (trace, scope):
                by_key["belady", row["slots_per_layer"], row["contract"]] = row
        for name in OPTIMA:
            best[name] = np.array([_rate(by_key.get(("belady", n, name))) for n in slots])
        made.append(Group(trace, scope, contract, slots, rates, best, by_key))
    return made


def label(row: Row) -> str:
    """A policy's name in tables; `static` that was not fitted says so."""
    return "static (not fitted)" if row["policy"] == "static" and row["split"] == "none" else row["policy"]


def _rate(row):
    return np.nan if row is None else row["hit_rate"]


def gaps(group: Group) -> list:
    """The `bounds.Gap` of the best policy at each capacity; None where no policy was run."""
    found = []
    for n in group.slots:
        ours = [result_of(row) for (name, slots, _), row in group.rows.items() if slots == n and name != "belady"]
        bypass, forced = (result_of(group.rows["belady", n, name]) for name in OPTIMA)
        found.append(gap(ours, bypass, forced) if ours else None)
    return found


def predictions(group: Group, cost: CostModel, transport):
    """policy -> [n] ms a decode step, seeds averaged; "belady" is the optimum under atomic-bypass."""
    times = {}
    for (name, slots, seed), row in group.rows.items():
        if name == "belady" and seed != "atomic-bypass":
            continue
        result = result_of(row)
        if name == "belady":  # its choice costs nothing that was measured: take the calibrated policy's time
            result.policy = cost.of(transport).policy
        ms = predict_ms_per_token(result, cost, transport=transport)
        times.setdefault(name, {}).setdefault(slots, []).append(ms)
    return {name: np.array([np.mean(of[n]) if n in of else np.nan for n in group.slots]) for name, of in times.items()}


# -------------------------------------------------------------------------------------------------------------- tables


def _cells(group):
    """Lines of the table: name and a text for each capacity."""
    lines = []
    for policy in group.ranked():
        rates = group.rates[policy] * 100
        texts = []
        for of_seeds in rates:
            text = "" if np.isnan(of_seeds).all() else f"{np.nanmean(of_seeds):.2f}"
            if text and of_seeds.size > 1 and np.ptp(of_seeds) > 0:
                text += f" ±{np.nanstd(of_seeds):.2f}"
            texts.append(text)
        lines.append((policy, texts))
    best = np.nanmax(np.array(list(group.mean.values())), axis=0)
    summary = [("best policy", [f"{value * 100:.2f}" for value in best])]
    summary += [(OPTIMA[name], [f"{value * 100:.2f}" for value in group.optima[name]]) for name in OPTIMA]
    summary.append(("gap to the optimum", [f"{one.gap * 100:.1f} %" if one else "" for one in gaps(group)]))
    return lines, summary


def heading(group: Group) -> str:
    """Trace, scope and contract in words."""
    row = next(iter(group.rows.values()))
    settings = f"scope {group.scope}, {group.contract}, reset {row['reset']}, {row['phase']} rows"
    return f"{group.trace}: hit rate in %, {settings}"


def tables(rows, cost=None, transport="device"):
    """A rich table of hit rates for each group, and with `cost` one of predicted ms/token."""
    for group in groups(rows):
        table = Table(title=heading(group))
        table.add_column("slots a layer")
        for n in group.slots:
            table.add_column(str(n), justify="right")
        lines, summary = _cells(group)
        for name, texts in lines:
            table.add_row(name, *texts)
        table.add_section()
        for name, texts in summary:
            table.add_row(name, *texts, style="bold")
        yield table
        if cost is not None:
            table = Table(title=f"{group.trace}: predicted ms/token, {cost.device}, transport {transport}")
            table.add_column("slots a layer")
            for n in group.slots:
                table.add_column(str(n), justify="right")
            for name, times in sorted(predictions(group, cost, transport).items(), key=lambda item: np.nansum(item[1])):
                shown = OPTIMA["atomic-bypass"] if name == "belady" else name
                table.add_row(shown, *("" if np.isnan(ms) else f"{ms:.2f}" for ms in times))
            yield table


# --------------------------------------------------------------------------------------------------------------- plots


def _axes(group, title, ylabel):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    row = next(iter(group.rows.values()))
    axes.set_title(f"{title}: {group.trace}\n{group.contract}, scope {group.scope}, reset {row['reset']}", fontsize=10)
    axes.set_xlabel(f"slots a layer, of {row['E']} experts ({row['K']} a token)")
    axes.set_ylabel(ylabel)
    axes.set_xticks(group.slots)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _lines(axes, group, values):
    """A coloured line for each named policy, grey for the rest; `values` policy -> [n]."""
    named = group.named()
    others = [policy for policy in values if policy not in named]
    for index, policy in enumerate(others):
        text = f"{len(others)} other policies" if index == 0 else None
        axes.plot(group.slots, values[policy], color="0.8", linewidth=0.8, label=text, zorder=1)
    for index, policy in enumerate(named):
        style = "--" if policy in BASELINES else "-"
        axes.plot(group.slots, values[policy], style, marker="o", markersize=3, color=COLOURS[index], label=policy)
    # The optima and the best on top, as they are on the axes.
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(handles, texts, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def plot_hit_rate(group: Group):
    """A matplotlib figure of the hit rate against capacity, under both optima."""
    figure, axes = _axes(group, "Hit rate", "hit rate, %")
    styles = {"atomic-bypass": "-", "atomic-forced-admit": ":"}
    for name, rates in group.optima.items():
        axes.plot(group.slots, rates * 100, styles[name], color="black", linewidth=1.6, label=OPTIMA[name])
    _lines(axes, group, {policy: rates * 100 for policy, rates in group.mean.items()})
    return figure


def plot_gap(group: Group):
    """A figure of the share of a policy's misses that the optimum with bypass does not have."""
    figure, axes = _axes(group, "Gap to the optimum", "avoidable misses, % of the policy's")
    best = group.optima["atomic-bypass"]
    values = {}
    for policy, rates in group.mean.items():
        missed = 1 - rates
        values[policy] = 100 * np.divide(best - rates, missed, out=np.zeros_like(rates), where=missed > 0)
    _lines(axes, group, values)
    axes.set_ylim(bottom=0)
    return figure


def plot_layers(group: Group):
    """A figure of the hit rate of every layer and policy, at the capacity nearest to a quarter of the experts."""
    from matplotlib.figure import Figure

    row = next(iter(group.rows.values()))
    E, L = row["E"], row["L"]
    n = min(group.slots, key=lambda slots: abs(slots - E / 4))
    seed = min(seed for name, _, seed in group.rows if name != "belady")
    keys = [(policy, n, seed) for policy in group.ranked() if (policy, n, seed) in group.rows]
    keys = [("belady", n, "atomic-bypass"), *keys]
    with np.errstate(invalid="ignore"):
        rates = np.array([result_of(group.rows[key]).per_layer["hit_rate"] for key in keys]) * 100
    figure = Figure(figsize=(2.6 + 0.27 * L, 1.2 + 0.21 * len(keys)), dpi=100, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(rates, cmap="cividis", aspect="auto", vmax=100, vmin=max(0, np.nanmin(rates)))
    axes.set_yticks(range(len(keys)), [OPTIMA["atomic-bypass"], *(key[0] for key in keys[1:])], fontsize=8)
    axes.set_xticks(range(0, L, 2 if L > 12 else 1))
    axes.set_xlabel("MoE layer")
    place = f"{n} slots a layer" if group.scope == "layer" else f"a pool of {n * L} slots"
    axes.set_title(f"Hit rate of each layer in %: {group.trace}\n{place}, {group.contract}", fontsize=10)
    figure.colorbar(image, ax=axes)
    return figure


def plot_time(group: Group, cost: CostModel, transport):
    """A figure of the predicted ms a decode step against capacity."""
    figure, axes = _axes(group, f"Predicted decode time, {cost.device}, {transport}", "ms/token")
    times = predictions(group, cost, transport)
    axes.plot(group.slots, times.pop("belady"), "-", color="black", linewidth=1.6, label=OPTIMA["atomic-bypass"])
    _lines(axes, group, times)
    axes.set_ylim(bottom=0)
    return figure


# -------------------------------------------------------------------------------------------------------------- report


def write(rows, directory, cost=None, transport="device", plots=True):
    """Writes the plots and report.md of some rows into a directory; returns the paths."""
    directory = Path(directory)
    paths, sections = [], []
    for group in groups(rows):
        pictures = []
        if plots:
            drawn = {"hit_rate": plot_hit_rate(group), "gap": plot_gap(group), "layers": plot_layers(group)}
            if cost is not None:
                drawn["ms_per_token"] = plot_time(group, cost, transport)
            for kind, figure in drawn.items():
                pictures.append(directory / f"{kind}_{group.name}.png")
                figure.savefig(pictures[-1])
        paths += pictures
        sections.append(_section(group, pictures, cost, transport))
    report = directory / "report.md"
    report.write_text("# Cache policies on routing traces\n\n" + "\n\n".join(sections) + "\n")
    return [*paths, report]


def markdown_table(header, lines):
    """A markdown table; the first column is text, the others stand to the right."""
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def _section(group, pictures, cost, transport):
    lines, summary = _cells(group)
    header = ["slots a layer", *group.slots]
    share = next(iter(group.rows.values()))
    shares = ["share of the experts", *(f"{100 * n / share['E']:.1f} %" for n in group.slots)]
    body = [shares, *([name, *texts] for name, texts in lines), *([f"**{name}**", *texts] for name, texts in summary)]
    parts = [f"## {heading(group)}", markdown_table(header, body), "### How far the best policy is from the optimum"]
    parts.append(
        "Gap: share of the best policy's misses that the optimum with bypass does not have. Admission: the part of it "
        "that only not keeping an expert at all wins. Victim: the part that a better choice of who leaves wins."
    )
    gap_lines = [
        [n, one.policy, f"{one.gap:.1%}", f"{one.admission_share:.1%}", f"{one.future_victim_share:.1%}"]
        for n, one in zip(group.slots, gaps(group), strict=True)
    ]
    parts.append(markdown_table(["slots a layer", "best policy", "gap", "admission", "victim"], gap_lines))
    if cost is not None:
        parts.append(f"### Predicted ms/token: {cost.device}, transport `{transport}`")
        times = sorted(predictions(group, cost, transport).items(), key=lambda item: np.nansum(item[1]))
        named = [
            [OPTIMA["atomic-bypass"] if name == "belady" else name, *("" if np.isnan(t) else f"{t:.2f}" for t in ms)]
            for name, ms in times
        ]
        parts.append(markdown_table(header, named))
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    parts += ["### What the figures depend on", reporting_block(group)]
    return "\n\n".join(parts)


def reporting_block(group: Group) -> str:
    """The reporting block of arXiv 2608.07911 as a markdown table."""
    rows = [row for (name, *_), row in group.rows.items() if name != "belady"]
    row = rows[0]

    def distinct(name):
        return ", ".join(str(value) for value in dict.fromkeys(row[name] for row in rows))

    quota = "slots a layer, the same for each" if group.scope == "layer" else f"one pool of {row['L']} times the slots"
    table = {
        "contract": group.contract,
        "ties": row["ties"],
        "reset": {"request": "cache and policy empty at each request", "never": "the cache stays"}[row["reset"]],
        "scope and quota": f"{group.scope}: {quota}",
        "seeds": distinct("seed"),
        "dedup": f"{row['dedup']}: {row['accesses']:,} accesses of {row['lookups']:,} lookups",
        "scores": distinct("scores"),
        "phase": row["phase"],
        "static": "fitted on the even requests, tested on the odd ones, and the reverse"
        if any(row["split"] == "even-odd" for row in rows)
        else "not fitted: pins the lowest ids, or was not run",
        "trace": f"{row['tokens']:,} tokens, {row['steps']:,} steps, L {row['L']}, E {row['E']}, K {row['K']}, "
        f"digest {row['trace_digest']}",
        "code": row["version"],
        "back end": distinct("backend"),
    }
    return markdown_table(["field", "value"], table.items())
