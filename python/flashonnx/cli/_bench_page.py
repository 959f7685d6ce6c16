"""The page of `flashonnx bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashonnx.cli import _figures
from flashonnx.cli._output import units
from flashonnx.cli._page import cards, figure, table, text
from flashonnx.cli._page import page as whole

if TYPE_CHECKING:
    from flashonnx.cli._measure import Result

_HOW = (
    "Times are of whole calls, by the wall clock: a call returns when the device is done. All that are compared take "
    "turns, round by round; the middle half of the times is given beside the median. Peak memory is what the first "
    "call takes beyond what was there before it, outputs included, inputs not. Every answer was checked; TFLOP/s count "
    "the two products, half of them for causal attention."
)
_CAPTION = "By length, both axes of time and memory logarithmic: dotted lines show linear and quadratic growth."


def page(content: dict[str, Any], results: Sequence[Result]) -> str:
    """The whole page."""
    longest = max((r.length for r in results if r.ours and r.median_ms), default=None)
    parts = [f'<p class="dim">{" · ".join(text(f"{k}: {v}") for k, v in content["environment"].items())}</p>']
    if longest is not None:
        parts.append(cards(_summary(results, longest)))
    if any(result.median_ms for result in results):
        if _figures.available():
            parts.append(figure(_figures.growth(content["title"], results), _CAPTION))
        else:
            parts.append('<p class="note">For the figure: <code>pip install "flashonnx[plots]"</code></p>')
    parts += ["<h2>Numbers</h2>", _numbers(results), f'<p class="note">{text(_HOW)}</p>']
    return whole("benchmark", content["title"], "\n".join(parts))


def _summary(results: Sequence[Result], length: int) -> list[tuple[str, str, str]]:
    """At the greatest length that ours was measured at: against each other one."""
    there = [r for r in results if r.length == length and r.median_ms]
    ours = min((r for r in there if r.ours), key=lambda r: r.median_ms or 0)
    items = [("", f"{ours.median_ms:.3g} ms", f"{ours.contender} at length {length}" if length else ours.contender)]
    for other in [r for r in there if not r.ours]:
        assert ours.median_ms is not None and other.median_ms is not None
        ratio = other.median_ms / ours.median_ms
        items.append(("good" if ratio >= 1 else "bad", f"{ratio:.2f}×", f"as fast as {other.contender}"))
    least = [r.peak_bytes for r in there if not r.ours and r.peak_bytes]
    if ours.peak_bytes and least:
        others = " to ".join(dict.fromkeys(units(bytes_) for bytes_ in (min(least), max(least))))
        items.append(("", units(ours.peak_bytes), f"peak memory, the others' {others}"))
    return items


def _numbers(results: Sequence[Result]) -> str:
    rows: list[tuple[str, list[str]]] = []
    last = None
    counted = any(r.tflops for r in results)  # of a model nobody counts operations
    for r in sorted(results, key=lambda r: (r.length, r.median_ms is None, r.median_ms or 0)):
        kind = " ".join(filter(None, ("ours" if r.ours else "", "first" if r.length != last and last else "")))
        last = r.length
        cells = [str(r.length or ""), f"<b>{text(r.contender)}</b>" if r.ours else text(r.contender)]
        if r.median_ms is None:
            cells += ["–", "", *([""] if counted else []), "", f'<span class="dim">{text(r.status)}</span>']
        else:
            cells += [
                f"{r.median_ms:.4g}",
                f"{r.low_ms:.3g} – {r.high_ms:.3g}",
                *([f"{r.tflops:.3g}" if r.tflops is not None else ""] if counted else []),
                units(r.peak_bytes) if r.peak_bytes is not None else "",
                "",
            ]
        rows.append((kind, cells))
    heads = ["length", "", "ms", "middle half", *(["TFLOP/s"] if counted else []), "peak memory", ""]
    return table(heads, rows, [i for i, head in enumerate(heads) if head])
