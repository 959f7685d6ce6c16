"""The page of `flashonnx verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashonnx.cli import _figures
from flashonnx.cli._page import cards, figure, mark, name, table, text
from flashonnx.cli._page import page as whole

if TYPE_CHECKING:
    from flashonnx._compare import OutputError
    from flashonnx._verify import Verdict

_CAPTION = (
    "Distance from the original in float64, over the largest value. Grey: the original in its own type. "
    "The fused model may be off by twice what the original is, and a few last places."
)
_HEADS = ("error", "allowed", "original's error", "fused − original")


def page(verdict: Verdict, original: str, fused: str) -> str:
    """The whole page."""
    judged = [output for output in verdict.outputs if output.rows == "all"]
    worst = max(judged, key=_share, default=None)
    items = [
        ("good" if verdict.ok else "bad", f"{sum(o.ok for o in judged)} of {len(judged)}", "outputs agree"),
        ("", str(len(verdict.cases)), "case" if len(verdict.cases) == 1 else "cases"),
    ]
    if worst is not None:
        share = _share(worst)
        used = f"{100 * share:.3g} %" if share < 10 else f"{share:.2g} times"
        items.append(("good" if worst.ok else "bad", used, "the error that is allowed"))
    if verdict.nodes:
        items.append(("", str(len(verdict.nodes)), "values between the nodes compared"))
    parts = [
        f"<p>{name(fused)} against {name(original)}, measured against {text(verdict.reference)}.</p>",
        cards(items),
    ]
    if verdict.parted is not None:
        where = verdict.parted
        origin = f", in the original by {name(where.original_node)}" if where.original_node != where.node else ""
        parts.append(
            f"<p><b>They part at {name(where.node)}</b>, which makes the value {name(where.value)}{origin}. "
            "What goes into it agrees.</p>"
        )
    if _figures.available():
        parts.append(figure(_figures.errors(verdict), _CAPTION))
    else:
        parts.append('<p class="note">For the figure: <code>pip install "flashonnx[plots]"</code></p>')
    rows = [
        ("" if o.ok or o.rows != "all" else "bad", [*_cells(o), name(o.name), text(o.remark)]) for o in verdict.outputs
    ]
    parts += ["<h2>Outputs</h2>", table(("", *_HEADS, "output", ""), rows, (1, 2, 3, 4))]
    if verdict.nodes:
        nodes = [
            ("" if n.ok else "bad", [*_cells(n.error), name(n.value), name(n.node), name(n.original_node)])
            for n in verdict.nodes
        ]
        parts += [
            "<h2>Between the nodes</h2>",
            table(("", *_HEADS, "value", "made by", "in the original by"), nodes, (1, 2, 3, 4)),
        ]
    cases = [("", [str(i), text(case)]) for i, case in enumerate(verdict.cases)]
    parts += ["<h2>Cases</h2>", table(("case", "inputs"), cases)]
    parts += [f'<p class="note">{text(note)}</p>' for note in verdict.notes]
    return whole("verification", f"The models {'agree' if verdict.ok else 'differ'}", "\n".join(parts), verdict.ok)


def _share(error: OutputError) -> float:
    if error.special:
        return float("inf")
    return error.error / error.allowed if error.allowed else float(error.error > 0)


def _cells(error: OutputError) -> list[str]:
    numbers = (error.error, error.allowed, error.original_error, error.difference)
    state = mark(error.ok, "agrees", "differs") if error.rows == "all" else '<span class="dim">does not count</span>'
    return [state, *(f"{x:.3g}" for x in numbers)]
