"""Figures of a CSV file: `python -m benchmarks.plots FILE.csv ... --output FOLDER`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import MEASURED, Row, read

# Ours stands out; every backend has the same colour in all figures.
_STYLES = {
    "ours": ("tab:red", "o"),
    "ours-sm80": ("lightcoral", "o"),
    "ours-unmasked": ("rosybrown", "o"),
    "FA2": ("tab:blue", "s"),
    "cuDNN": ("tab:green", "^"),
    "mem-eff": ("tab:gray", "v"),
    "FA4": ("tab:purple", "D"),
    "ORT-ours": ("darkred", "P"),
    "ORT-Attention": ("tab:cyan", "X"),
    "ORT-MHA": ("tab:olive", "<"),
    "ORT-GQA": ("tab:brown", ">"),
    "ORT-unfused": ("black", "x"),
}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes the figures that these rows are enough for; their paths."""
    rows = [row for row in rows if row.status == MEASURED]
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"throughput.png": _throughput(rows), "models.png": _models(rows), "growth.png": _growth(rows)}
    written = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=150)
            written.append(folder / name)
    return written


def _figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _throughput(rows: Sequence[Row]) -> Any:
    """TFLOP/s by length: full above, causal below, a column for each head size; the cells' ceiling as a line."""
    rows = [row for row in rows if row.group == "cells"]
    dims = sorted({row.head_dim for row in rows})
    if not dims:
        return None
    figure, axes = _figure(2, len(dims), sharey=True)
    for i, causal in enumerate((False, True)):
        for axis, dim in zip(axes[i], dims, strict=True):
            cells = [row for row in rows if row.causal == causal and row.head_dim == dim]
            ceiling = {r.q_length: r.tflops / r.share_of_ceiling for r in cells if r.tflops and r.share_of_ceiling}
            lengths = sorted(ceiling)
            axis.plot(lengths, [ceiling[s] for s in lengths], color="black", linestyle=":", label="ceiling")
            for backend in dict.fromkeys(row.backend for row in cells):
                _line(axis, [r for r in cells if r.backend == backend], "tflops")
            axis.set_title(f"head size {dim}, {'causal' if causal else 'full'}")
            _by_length(axis, lengths)
            axis.set_ylim(bottom=0)
        axes[i][0].set_ylabel("TFLOP/s")
    _legend(figure, axes)
    figure.suptitle(f"Attention forward, {rows[0].dtype}, 16384 tokens, 2048 features: {rows[0].device}")
    return figure


def _models(rows: Sequence[Row]) -> Any:
    """How fast everybody is beside ours, a line for each workload that is named after a model."""
    rows = [row for row in rows if row.group == "models" and row.ours_speedup and row.backend != "ours"]
    names = list(dict.fromkeys(row.workload for row in rows))
    if not names:
        return None
    figure, axes = _figure(1, 1)
    figure.set_size_inches(9.2, 1.6 + 0.3 * len(names))
    axis = axes[0][0]
    axis.axvline(1, color=_STYLES["ours"][0], linewidth=2.2, label="ours")
    for backend in dict.fromkeys(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        color, marker = _STYLES.get(backend, (None, "."))
        speeds = [1 / row.ours_speedup for row in mine if row.ours_speedup]
        places = [names.index(row.workload) for row in mine]
        axis.plot(speeds, places, color=color, marker=marker, markersize=6, linestyle="", label=backend)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xscale("log", base=2)
    low, high = (1 / max(r.ours_speedup or 1 for r in rows), 1 / min(r.ours_speedup or 1 for r in rows))
    ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(max(high, 1.1))) + 1)]
    axis.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("speed, ours = 1")
    axis.grid(alpha=0.3)
    _legend(figure, axes)
    figure.suptitle(f"Attention of models: {rows[0].device}")
    return figure


def _growth(rows: Sequence[Row]) -> Any:
    """Time and peak memory of one sequence that grows, both axes logarithmic: slope 1 is linear, slope 2 quadratic."""
    rows = [row for row in rows if row.group == "growth"]
    if not rows:
        return None
    figure, axes = _figure(1, 2)
    lengths = sorted({row.q_length for row in rows})
    for axis, column, label in zip(axes[0], ("median_ms", "peak_mib"), ("ms", "MiB beyond the inputs"), strict=True):
        for backend in dict.fromkeys(row.backend for row in rows):
            _line(axis, [r for r in rows if r.backend == backend], column)
        _by_length(axis, lengths)
        axis.set_yscale("log")
        axis.set_ylabel(label)
    axes[0][0].set_title("time")
    axes[0][1].set_title("peak memory")
    _legend(figure, axes)
    first = rows[0]
    figure.suptitle(f"One sequence, {first.q_heads} heads of {first.head_dim}, {first.dtype}: {first.device}")
    return figure


def _line(axis: Any, rows: Sequence[Row], column: str) -> None:
    points = sorted((r.q_length, getattr(r, column)) for r in rows if getattr(r, column))  # no log of 0
    color, marker = _STYLES.get(rows[0].backend, (None, "."))
    width = 2.2 if rows[0].backend == "ours" else 1.2
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axis.plot(xs, ys, color=color, marker=marker, markersize=4, linewidth=width, label=rows[0].backend)


def _by_length(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(s) for s in lengths])
    axis.minorticks_off()
    axis.set_xlabel("sequence length")
    axis.grid(alpha=0.3)


def _legend(figure: Any, axes: Any) -> None:
    """One for the whole figure, below it."""
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(len(lines), 6), fontsize=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws, and says where."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, help="folder; default: that of the first file")
    options = parser.parse_args(arguments)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        parser.error("figures need matplotlib: pip install matplotlib")
    for path in draw(read(*options.csv), options.output or options.csv[0].parent):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
