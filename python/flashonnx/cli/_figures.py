"""The figures of reports, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashonnx._compare import ALL
from flashonnx.cli._page import DPI

if TYPE_CHECKING:
    from flashonnx._verify import Verdict
    from flashonnx.cli._measure import Result

_OURS, _OURS_TOO, _ORIGINAL, _BOUND = "#147a46", "#74bb95", "#8a94a3", "#b3402a"
_OTHERS = ("#2f6fb3", "#c77c18", "#7a4fa3", "#4aa3a3", "#a34a6a", "#6b6b2e", "#3b3f8f")  # as many as bench has peers
_MARKERS = "s^vDXP<"
_MOST_LABELS = 40  # nodes that are named on an axis


def require() -> None:
    """Says what is missing, before any work is done.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not available():
        raise ImportError("figures need matplotlib: pip install 'flashonnx[plots]'")


def available() -> bool:
    """Whether figures can be drawn."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def errors(verdict: Verdict) -> bytes:
    """The error behind each fused node and at each output: its quantiles, the original's, and the bound."""
    entries = [(node.value, node.error, node.distribution, node.original_distribution) for node in verdict.nodes]
    entries += [(output.name, output, (), ()) for output in verdict.outputs if output.rows == ALL and output.scale > 0]
    width = min(16.0, max(6.4, 2.6 + 0.42 * len(entries)))
    figure, axis = _figure((width, 4.6))
    for x, (_, error, distribution, original) in enumerate(entries):
        for offset, color, quantiles, most in (
            (-0.17, _ORIGINAL, original, error.original_error),
            (0.17, _OURS if error.ok else _BOUND, distribution, error.error),
        ):
            _quantiles(axis, x + offset, color, [q / (error.scale or 1) for q in quantiles], most / (error.scale or 1))
        if error.scale > 0:
            axis.hlines(error.allowed / error.scale, x - 0.42, x + 0.42, color=_BOUND, linewidth=1.6)
    axis.set_yscale("log")
    axis.set_ylabel("|error| / largest value")
    step = max(1, -(-len(entries) // _MOST_LABELS))
    ticks = range(0, len(entries), step)
    named, pattern = _distinct([value for value, *_ in entries[: len(verdict.nodes)]])
    names = [*named, *(value for value, *_ in entries[len(verdict.nodes) :])]
    labels = [_short(names[i]) for i in ticks]
    if sum(map(len, labels)) + len(labels) < 9 * width:  # they have room side by side
        axis.set_xticks(list(ticks), labels, fontsize=8)
    else:
        axis.set_xticks(list(ticks), labels, rotation=50, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_xlabel(pattern, fontsize=8)
    axis.set_xlim(-0.7, len(entries) - 0.3)
    axis.grid(axis="y", alpha=0.3)
    if verdict.nodes and len(entries) > len(verdict.nodes):
        axis.axvline(len(verdict.nodes) - 0.5, color="#c4cad2", linewidth=1, linestyle=":")
    if verdict.parted is not None:
        x = next(i for i, node in enumerate(verdict.nodes) if node.value == verdict.parted.value)
        axis.axvspan(x - 0.5, x + 0.5, color=_BOUND, alpha=0.10, linewidth=0)
        axis.annotate(
            "they part here", (x, 1), xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points",
            ha="center", color=_BOUND, fontsize=8,
        )  # fmt: skip
    _legend_of_errors(figure, any(not error.ok for _, error, _, _ in entries))
    state = "the models agree" if verdict.ok else "the models DIFFER"
    figure.suptitle(f"Error by node: {state}", fontsize=11)
    return _png(figure)


def _quantiles(axis: Any, x: float, color: str, quantiles: Sequence[float], most: float) -> None:
    """A thick line from the median to 90 %, a thin one to the largest, which is a dot."""
    if quantiles and quantiles[0] > 0:
        axis.vlines(x, quantiles[0], quantiles[1], color=color, linewidth=5, alpha=0.55)
        axis.vlines(x, quantiles[1], quantiles[-1], color=color, linewidth=1.2)
    if most > 0:
        axis.plot([x], [most], "o", color=color, markersize=4)


def _legend_of_errors(figure: Any, is_wrong: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_ORIGINAL, marker="o", markersize=4, label="original"),
        Line2D([], [], color=_OURS, marker="o", markersize=4, label="fused"),
        Line2D([], [], color=_BOUND, linewidth=1.6, label="allowed"),
    ]
    if is_wrong:
        handles.insert(2, Line2D([], [], color=_BOUND, marker="o", markersize=4, label="fused, beyond it"))
    handles.append(Line2D([], [], color="#c4cad2", linewidth=5, label="median to 90 %; thin: to the largest"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def growth(title: str, results: Sequence[Result]) -> bytes:
    """Time, TFLOP/s and peak memory by length, with slopes of linear and quadratic growth."""
    done = [result for result in results if result.median_ms]
    panels: list[tuple[str, str, bool]] = [("time, ms", "median_ms", True)]
    panels += [("TFLOP/s", "tflops", False)] if any(result.tflops for result in done) else []
    panels += [("peak memory, MB", "peak_bytes", True)] if any(result.peak_bytes for result in done) else []
    figure, axes = _figure((4.5 * len(panels), 4.2), len(panels))
    names = list(dict.fromkeys(result.contender for result in done))
    others = [name for name in names if not any(r.ours for r in done if r.contender == name)]
    mine = [name for name in names if name not in others]
    for axis, (label, column, logarithmic) in zip([axes] if len(panels) == 1 else axes, panels, strict=True):
        scale = 1e-6 if column == "peak_bytes" else 1
        for name in names:
            points = [
                (r.length, getattr(r, column) * scale) for r in done if r.contender == name and getattr(r, column)
            ]
            ours = name not in others
            color = (_OURS if name == mine[0] else _OURS_TOO) if ours else _OTHERS[others.index(name) % len(_OTHERS)]
            marker = "o" if ours else _MARKERS[others.index(name) % len(_MARKERS)]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axis.plot(xs, ys, color=color, marker=marker, markersize=5, linewidth=2.4 if ours else 1.3, label=name)
        _length_axis(axis, sorted({result.length for result in done}))
        axis.set_title(label, fontsize=10)
        if logarithmic:
            axis.set_yscale("log")
            _slopes(axis)
            _plain_numbers(axis)
        else:
            axis.set_ylim(bottom=0)
    first = axes if len(panels) == 1 else axes[0]
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return _png(figure)


def _length_axis(axis: Any, lengths: list[int]) -> None:
    if lengths == [0]:  # no axis varies
        axis.set_xticks([])
        return
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) for n in lengths], rotation=30 if len(lengths) > 5 else 0)
    axis.minorticks_off()
    axis.set_xlabel("length")
    axis.grid(alpha=0.3)


def _plain_numbers(axis: Any) -> None:
    """0.5, 6, 20 on a logarithmic axis of values instead of powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):  # which ticks have room for a label is its decision
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.10g}" if super().__call__(x, pos) else ""

    axis.yaxis.set_major_formatter(Plain())
    axis.yaxis.set_minor_formatter(Plain(minor_thresholds=(1, 0.4)))


def _slopes(axis: Any) -> None:
    """Dotted guides: what grows linearly and what grows quadratically, from the same point."""
    low, high = axis.get_ylim()
    left, right = (min(x.min() for x in _xs(axis)), max(x.max() for x in _xs(axis)))
    if right <= left:
        return
    start = min(min(line.get_ydata()) for line in axis.get_lines() if len(line.get_ydata())) * 0.7
    for power, word in ((1, "linear"), (2, "quadratic")):
        end = start * (right / left) ** power
        axis.plot([left, right], [start, end], color="#9aa4b1", linestyle=":", linewidth=1)
        axis.annotate(word, (right, end), fontsize=7, color="#6a7585", ha="right", va="bottom", xytext=(0, 2),
                      textcoords="offset points")  # fmt: skip
    axis.set_ylim(min(low, start * 0.8), max(high, start * (right / left) ** 2 * 2))


def _xs(axis: Any) -> list[Any]:
    import numpy as np

    return [np.asarray(line.get_xdata()) for line in axis.get_lines() if len(line.get_xdata())]


def _figure(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _distinct(names: Sequence[str]) -> tuple[list[str], str]:
    """What differs between names, and what is around it in all: 0, 1 ... and "layers.*.out" for "layers.0.out" ..."""
    if len(names) < 2:
        return list(names), ""
    before = _common(names).rstrip("0123456789")
    rest = [name[len(before) :] for name in names]
    after = _common([name[::-1] for name in rest])[::-1].lstrip("0123456789")
    parts = [name[: len(name) - len(after)] for name in rest]
    if len(before) + len(after) < 4 or not all(parts):
        return list(names), ""
    return parts, f"{before}*{after}"


def _common(names: Sequence[str]) -> str:
    """What all begin with."""
    first, last = min(names), max(names)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _short(name: str) -> str:
    """The end of a long name, which is what differs."""
    return name if len(name) <= 28 else f"…{name[-27:]}"
