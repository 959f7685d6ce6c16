"""What fusion found and did, site by site, for people (text, HTML) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
import html
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Site:
    """One attention in the model.

    Attributes:
        node: name of its central node (the Softmax, or the attention operator), prefixed by the
            subgraph or function that holds it.
        kind: what stood there, e.g. "Softmax", "Attention", "com.microsoft::MultiHeadAttention".
        fused: whether a fused node stands there now.
        reason: why not, in words that say what to change; for a fused site a remark or "".
        became: the fused node in short, "" when not fused.
    """

    node: str
    kind: str
    fused: bool
    reason: str
    became: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Every attention site of a model, fused or not, in the model's order."""

    sites: tuple[Site, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fused(self) -> int:
        """How many sites are fused."""
        return sum(site.fused for site in self.sites)

    @property
    def total(self) -> int:
        """How many sites there are."""
        return len(self.sites)

    def __str__(self) -> str:
        if not self.sites:
            lines = ["no attention found: the model is unchanged"]
        else:
            lines = [f"{self.fused} of {self.total} attentions fused"]
        for site in self.sites:
            what = f"{site.kind} -> {site.became}" if site.became else site.kind
            mark = "fused" if site.fused else "left "
            lines.append(f"  {mark}  {site.node}: {what}")
            if site.reason:
                lines.append(f"         {site.reason}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as a JSON object: fused, total, sites (node, kind, fused, reason, became)."""
        content: dict[str, Any] = {
            "fused": self.fused,
            "total": self.total,
            "sites": [dataclasses.asdict(site) for site in self.sites],
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=indent)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        rows = "\n".join(
            f'<tr class="{"fused" if site.fused else "left"}">'
            + "".join(
                f"<td>{html.escape(cell)}</td>"
                for cell in (
                    "fused" if site.fused else "left",
                    site.node,
                    site.kind,
                    site.became,
                    site.reason,
                )
            )
            + "</tr>"
            for site in self.sites
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return _PAGE.format(summary=html.escape(str(self).splitlines()[0]), rows=rows, notes=notes)


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>flashonnx: fusion report</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ border-bottom: 1px solid #ddd; padding: .4rem .6rem; text-align: left; vertical-align: top }}
.fused td:first-child {{ color: #187a3a }} .left td:first-child {{ color: #b3261e }}
</style></head><body><h1>{summary}</h1>
<table><thead><tr><th></th><th>node</th><th>was</th><th>is</th><th>remark</th></tr></thead><tbody>
{rows}
</tbody></table>{notes}</body></html>
"""
