"""The report as an HTML page: no script, no picture, nothing from elsewhere; light and dark."""

from __future__ import annotations

import collections
import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashonnx.export.reports.report import Report, Site


def page(report: Report) -> str:
    """The whole page."""
    done = report.total - report.fused if report.undone else report.fused
    share = done / report.total if report.total else 1.0
    return _PAGE.format(
        style=_STYLE,
        what="unfusion" if report.undone else "fusion",
        title=_text(report.summary),
        numbers=_numbers(report),
        bar=f'<div class="bar"><span style="width:{100 * share:.1f}%"></span></div>' if report.total else "",
        table=_table(report) if report.total else "",
        notes="".join(f'<p class="note">{_text(note)}</p>' for note in report.notes),
    )


def _numbers(report: Report) -> str:
    """Fused or replaced, left; and what is saved and still formed, where that is known."""
    from flashonnx.export.reports.report import WORDS, in_units

    if not report.sites:
        return ""
    gone, left = report.bytes(fused=True), report.bytes(fused=False)
    counts = collections.Counter(map(report.became_of, report.sites))
    done = "replaced" if report.undone else "fused"
    cards: list[tuple[str, object, str]] = [
        ("good", counts[done], WORDS[done]),
        ("bad" if counts["left"] else "", counts["left"], "left as they were"),
    ]
    if not report.undone:
        cards.append(("good", in_units(gone) if gone else "–", "of scores no longer formed"))
        cards.append(("bad" if left else "", in_units(left) if left else "–", "of scores still formed"))
    if report.mask_bytes:
        cards.append(("bad", in_units(report.mask_bytes), "of masks of queries by keys still there"))
    lengths = ", ".join(f"{name} = {length}" for name, length in report.lengths.items())
    at = f'<p class="at">Bytes at {_text(lengths)}.</p>' if lengths else ""
    items = "".join(f'<li class="{kind}"><b>{_text(str(n))}</b> {words}</li>' for kind, n, words in cards)
    return f"<ul>{items}</ul>{at}"


def _table(report: Report) -> str:
    heads = ("", "where", "what it was", "what it became", "scores")
    rows = "\n".join(_row(report, site) for site in report.sites)
    return (
        '<div class="wide"><table><thead><tr>'
        + "".join(f"<th>{head}</th>" for head in heads)
        + f"</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(report: Report, site: Site) -> str:
    from flashonnx.export.reports.report import in_units

    kind = report.became_of(site)
    size = site.bytes(report.lengths)
    *places, node = site.node.split(" / ")
    where = "".join(f"<small>{_text(place)} ›</small> " for place in places) + f"<code>{_broken(node)}</code>"
    kind_of_text, mask = "reason" if kind == "left" else "remark", site.mask_remark(report.lengths)
    is_why = f'<p class="{kind_of_text}">{_text(site.reason)}</p>' if site.reason else ""
    is_why += f'<p class="reason">{_text(mask)}</p>' if mask else ""
    became = (f"<code>{_text(site.became)}</code>" if site.became else "") + is_why
    scores = f"{_text(str(site.matrix))}" if site.matrix is not None else "–"
    scores += f"<br><b>{in_units(size)}</b>" if size is not None else ""
    chain = " → ".join(_text(operator) for operator, _ in site.operators)
    was = _text(site.kind) + (f"<br><small>{chain}</small>" if len(site.operators) > 1 else "")
    cells = (f'<span class="mark">{kind}</span>', where, was, became, scores)
    return f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _text(text: str) -> str:
    return html.escape(text)


def _broken(name: str) -> str:
    """A long name, which may be broken behind dots, slashes and colons."""
    text = _text(name)
    for sign in ("/", ".", "::"):
        text = text.replace(sign, f"{sign}<wbr>")
    return text


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5d6b7c; --paper: #f6f7f9; --card: #fff; --line: #e2e6eb;
  --good: #147a46; --good-tint: #e3f5eb; --bad: #b3402a; --bad-tint: #fbeae6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #95a3b5; --paper: #12161c; --card: #1a2029;
  --line: #2b3440; --good: #5fd39a; --good-tint: #163527; --bad: #f0937f; --bad-tint: #3b211b } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--paper); margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 84rem }
header p { color: var(--dim); margin: 0; letter-spacing: .02em }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .1rem 0 1rem }
.bar { height: .5rem; border-radius: .25rem; background: var(--bad-tint); overflow: hidden; margin-bottom: 1.5rem }
.bar span { display: block; height: 100%; background: var(--good) }
ul { display: flex; flex-wrap: wrap; gap: .8rem; list-style: none; margin: 0 0 .6rem; padding: 0 }
li { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem 1.1rem;
  min-width: min-content; color: var(--dim); flex: 1 1 9rem }
li b { display: block; font-size: 1.45rem; line-height: 1.3; color: var(--ink) }
li.good b { color: var(--good) } li.bad b { color: var(--bad) }
.at { color: var(--dim); font-size: .87rem; margin: 0 0 1.5rem }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem }
table { border-collapse: collapse; width: 100% }
th { font-weight: 600; font-size: .82rem; color: var(--dim); text-align: left; padding: .6rem .9rem;
  white-space: nowrap }
td { border-top: 1px solid var(--line); padding: .6rem .9rem; vertical-align: top }
td:nth-child(2), td:nth-child(5) { min-width: 10rem } td:nth-child(4) { min-width: 15rem }
td:nth-child(5) { font-variant-numeric: tabular-nums; font-size: .9rem }
code { font: .87em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere }
small { color: var(--dim) }
.mark { font-size: .78rem; font-weight: 600; padding: .12rem .55rem; border-radius: 1rem; white-space: nowrap }
.fused .mark, .replaced .mark { color: var(--good); background: var(--good-tint) }
.left .mark { color: var(--bad); background: var(--bad-tint) }
td p { margin: 0 } code + p { margin-top: .3rem }
.reason { color: var(--bad) } .remark { color: var(--dim); font-size: .9rem }
.note { color: var(--dim); margin: 1rem 0 0 }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashonnx: {title}</title><style>{style}</style></head>
<body><header><p>flashonnx · {what} report</p><h1>{title}</h1></header>
{bar}{numbers}{table}{notes}
</body></html>
"""
