"""A CSV file as Markdown, and as a figure: `python -m benchmarks.end_to_end.table FILE.csv [--plot FILE.png]`."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.measure import ADD
from benchmarks.end_to_end.results import THEIRS

Cells = dict[str, dict[str, str]]  # a subject's rows by variant
_COLUMNS = ("plain", "ours", "ORT's best", "ours on that", "less attention")


def read(path: Path) -> dict[str, Cells]:
    """The measured rows of a file, by subject, launch and variant; the last counts where there are several."""
    subjects: dict[str, Cells] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["median_ms"]:
                name = row["subject"] if row["launch"] == "stream" else f"{row['subject']}, {row['launch']}"
                subjects.setdefault(name, {})[row["variant"]] = row
    return subjects


def times(cells: Cells) -> dict[str, tuple[str, float]]:
    """For each column the variant that was fastest, and its milliseconds."""
    named = {
        "plain": [name for name in cells if name.removesuffix(ADD) == "plain"],
        "ours": [name for name in cells if name.removesuffix(ADD) == "ours"],
        "ORT's best": [name for name in cells if name.startswith(THEIRS)],
        "ours on that": [name for name in cells if name.removesuffix(ADD) == "ours-on-ort"],
        "less attention": [name for name in cells if "no-attention" in name],
    }
    return {
        column: min(((name, float(cells[name]["median_ms"])) for name in names), key=lambda pair: pair[1])
        for column, names in named.items()
        if names
    }


def render(subjects: dict[str, Cells]) -> str:
    """A line for each subject: milliseconds, the better of ours over the others; geometric means below.

    A star marks a time without ONNX Runtime's MatMulAddFusion.
    """
    lines = [
        f"| model | {' | '.join(_COLUMNS)} | over plain | over ORT's best |",
        "|---" * (len(_COLUMNS) + 3) + "|",
    ]
    ratios: list[tuple[float, float]] = []
    for name, cells in subjects.items():
        found = times(cells)
        shown = [f"{found[c][1]:.2f} ms{_mark(found[c][0])}" if c in found else "" for c in _COLUMNS]
        fastest = min((found[c][1] for c in ("ours", "ours on that") if c in found), default=math.nan)
        pair = [found[c][1] / fastest if c in found else math.nan for c in ("plain", "ORT's best")]
        ratios.append((pair[0], pair[1]))
        lines.append(f"| {name} | {' | '.join(shown)} | {_ratio(pair[0])} | {_ratio(pair[1])} |")
    means = " | ".join(_ratio(_mean([pair[i] for pair in ratios if pair[i] > 0])) for i in range(2))
    lines.append(f"| geometric mean |{' |' * len(_COLUMNS)} {means} |")
    return "\n".join(lines) + "\n"


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _mark(variant: str) -> str:
    return "\\*" if variant.endswith(ADD) else ""


def draw(subjects: dict[str, Cells], path: Path) -> None:
    """Bars: each subject's times over that of ONNX Runtime's best."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = dict(zip(_COLUMNS, ("black", "lightcoral", "tab:green", "tab:red", "lightgray"), strict=True))
    figure = Figure(figsize=(1.9 * len(subjects) + 2, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis: Any = figure.subplots()
    for place, cells in enumerate(subjects.values()):
        found = times(cells)
        for i, column in enumerate(_COLUMNS):
            if column in found and "ORT's best" in found:
                share = found[column][1] / found["ORT's best"][1]
                label = column if place == 0 else None
                axis.bar(place + 0.16 * (i - 2), share, 0.15, color=colours[column], label=label)
                axis.text(place + 0.16 * (i - 2), share, f"{found[column][1]:.1f}", ha="center", va="bottom", size=7)
    axis.set_xticks(range(len(subjects)), list(subjects))
    axis.set_ylabel("time / time of ONNX Runtime's best (above: ms)")
    axis.legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end.table", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    subjects = read(options.file)
    print(render(subjects), end="")
    if options.plot:
        draw(subjects, options.plot)


if __name__ == "__main__":
    main()
