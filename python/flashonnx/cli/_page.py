"""Pages: one file, no script, nothing from elsewhere; light and dark."""

from __future__ import annotations

import base64
import html
import struct
from collections.abc import Iterable, Sequence

DPI = 160  # of figures
_PIXELS_AN_INCH = 96  # of pages


def text(value: object) -> str:
    """Escaped."""
    return html.escape(str(value))


def name(value: str) -> str:
    """A long name as code, which may be broken behind dots, slashes and colons."""
    escaped = text(value)
    for sign in ("/", ".", "_"):
        escaped = escaped.replace(sign, f"{sign}<wbr>")
    return f"<code>{escaped}</code>"


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Each a kind ("good", "bad" or ""), a number, and words."""
    return (
        "<ul>"
        + "".join(f'<li class="{kind}"><b>{text(n)}</b> {text(words)}</li>' for kind, n, words in items)
        + "</ul>"
    )


def figure(png: bytes, words: str) -> str:
    """A picture inside the page, no larger than it was drawn for."""
    data = base64.b64encode(png).decode()
    width = struct.unpack(">I", png[16:20])[0] * _PIXELS_AN_INCH // DPI  # of the IHDR chunk, which comes first
    image = f'<img alt="{text(words)}" style="width:{width}px" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{text(words)}</figcaption></figure>"


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], numbers: Sequence[int] = ()) -> str:
    """Rows are a class and cells, which are HTML; `numbers` are columns flush right."""

    def cell(tag: str, i: int, content: str) -> str:
        return f'<{tag} class="n">{content}</{tag}>' if i in numbers else f"<{tag}>{content}</{tag}>"

    head = "".join(cell("th", i, text(h)) for i, h in enumerate(heads))
    body = "\n".join(
        f'<tr class="{kind}">' + "".join(cell("td", i, c) for i, c in enumerate(cells)) + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def mark(ok: bool, yes: str, no: str) -> str:
    """A green or a red word."""
    return f'<span class="mark {"good" if ok else "bad"}">{text(yes if ok else no)}</span>'


def page(kind: str, title: str, body: str, good: bool | None = None) -> str:
    """The whole; `good` colours the title."""
    state = "" if good is None else ' class="good"' if good else ' class="bad"'
    return _PAGE.format(style=_STYLE, kind=text(kind), title=text(title), state=state, body=body)


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5d6b7c; --paper: #f6f7f9; --card: #fff; --line: #e2e6eb;
  --good: #147a46; --good-tint: #e3f5eb; --bad: #b3402a; --bad-tint: #fbeae6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #95a3b5; --paper: #12161c; --card: #1a2029;
  --line: #2b3440; --good: #5fd39a; --good-tint: #163527; --bad: #f0937f; --bad-tint: #3b211b } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--paper); margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 84rem }
header p { color: var(--dim); margin: 0; letter-spacing: .02em }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .1rem 0 1.1rem }
h1.good { color: var(--good) } h1.bad { color: var(--bad) }
h2 { font-size: 1.1rem; margin: 2rem 0 .6rem }
ul { display: flex; flex-wrap: wrap; gap: .8rem; list-style: none; margin: 0 0 1.2rem; padding: 0 }
li { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem 1.1rem;
  min-width: min-content; color: var(--dim); flex: 1 1 9rem }
li b { display: block; font-size: 1.45rem; line-height: 1.3; color: var(--ink); overflow-wrap: anywhere }
li.good b { color: var(--good) } li.bad b { color: var(--bad) }
figure { margin: 0 0 1rem; padding: 1rem; background: #fff; border: 1px solid var(--line); border-radius: .6rem }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto }
figcaption { color: #5d6b7c; font-size: .87rem; margin-top: .6rem; text-align: center }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .6rem }
table { border-collapse: collapse; width: 100% }
th { font-weight: 600; font-size: .82rem; color: var(--dim); text-align: left; padding: .6rem .9rem;
  white-space: nowrap }
td { border-top: 1px solid var(--line); padding: .5rem .9rem; vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
tr.ours td { background: var(--good-tint) } tr.bad td { background: var(--bad-tint) }
tr.first td { border-top: 2px solid var(--dim) }
code { font: .87em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere }
small, .dim { color: var(--dim) }
.mark { font-size: .78rem; font-weight: 600; padding: .12rem .55rem; border-radius: 1rem; white-space: nowrap }
.mark.good { color: var(--good); background: var(--good-tint) }
.mark.bad { color: var(--bad); background: var(--bad-tint) }
.note { color: var(--dim); margin: .6rem 0 0 }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashonnx: {title}</title><style>{style}</style></head>
<body><header><p>flashonnx · {kind}</p><h1{state}>{title}</h1></header>
{body}
</body></html>
"""
