"""What fuse or unfuse found and did, site by site, for people (text, HTML) and for programs (JSON)."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashonnx.export.sites.matrices import Matrix, example_lengths

if TYPE_CHECKING:
    from rich.text import Text

FUNCTION = "function "  # how the place of a site in a model-local function begins
# What was done to a site, in a word and in words.
WORDS = {"fused": "fused", "left": "left as it was", "replaced": "standard operators again"}


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
        matrix: the scores, queries by keys, that stood there; None where not even their rank is known.
        operators: what stood there, from the product of queries and keys to that with values, each as (type, name).
        mask: the mask of the fused node, if that is queries by keys too and so still grows with both.
    """

    node: str
    kind: str
    fused: bool
    reason: str
    became: str = ""
    matrix: Matrix | None = None
    operators: tuple[tuple[str, str], ...] = ()
    mask: Matrix | None = None

    @property
    def is_inside_function(self) -> bool:
        """Whether it is in a model-local function, or came from one."""
        return FUNCTION in self.node

    def bytes(self, lengths: Mapping[str, int]) -> int | None:
        """Bytes of its scores at those lengths, which a fused node never forms; None if not known."""
        return self.matrix.size(lengths) if self.matrix is not None else None

    def mask_remark(self, lengths: Mapping[str, int]) -> str:
        """What is still as large as queries by keys beside a fused node: its mask. "" where that is smaller."""
        if self.mask is None:
            return ""
        size = self.mask.size(lengths)
        return f"its mask is still queries by keys: {self.mask}" + (f", {in_units(size)}" if size is not None else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """Every attention site of a model, fused or not, in the model's order.

    Attributes:
        sites: what was found.
        notes: what there is to say about the model as a whole.
        given: lengths of named dimensions, see `at`.
        undone: it is unfuse's: the sites are the fused nodes that were there, and those that are `fused` still are.
    """

    sites: tuple[Site, ...] = ()
    notes: tuple[str, ...] = ()
    given: Mapping[str, int] = dataclasses.field(default_factory=dict)
    undone: bool = False

    @property
    def fused(self) -> int:
        """How many sites are fused."""
        return sum(site.fused for site in self.sites)

    @property
    def total(self) -> int:
        """How many sites there are."""
        return len(self.sites)

    def became_of(self, site: Site) -> str:
        """What was done to a site: a key of `WORDS`."""
        if self.undone:
            return "left" if site.fused else "replaced"
        return "fused" if site.fused else "left"

    def at(self, lengths: Mapping[str, int]) -> Report:
        """The same report with bytes at those lengths of named dimensions, e.g. {"batch": 8, "sequence": 512}.

        A dimension that is not named there counts as 1 where it stands first, as a batch does, and as 1024 elsewhere.
        """
        return dataclasses.replace(self, given=dict(lengths))

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths that bytes are told for: those given, and examples for the rest."""
        matrices = [matrix for site in self.sites for matrix in (site.matrix, site.mask) if matrix is not None]
        return example_lengths(matrices, self.given)

    def bytes(self, *, fused: bool) -> int:
        """Bytes of all scores, of the fused sites (which are not formed any more) or of the others, where known.

        From those of the fused sites the masks that are queries by keys too (`mask_bytes`) are taken off.
        """
        lengths = self.lengths
        scores = sum(site.bytes(lengths) or 0 for site in self.sites if site.fused is fused)
        return max(0, scores - self.mask_bytes) if fused else scores

    @property
    def mask_bytes(self) -> int:
        """Bytes of the masks of fused sites that are queries by keys, each once, where known."""
        masks = {(site.mask.value or i): site.mask for i, site in enumerate(self.sites) if site.mask is not None}
        return sum(mask.size(self.lengths) or 0 for mask in masks.values())

    @property
    def summary(self) -> str:
        """One line."""
        if not self.sites:
            what = "flashonnx node" if self.undone else "attention"
            return f"no {what} found: the model is unchanged"
        if self.undone:
            return f"{self.total - self.fused} of {self.total} fused nodes are standard operators again"
        return f"{self.fused} of {self.total} attentions fused"

    @property
    def savings(self) -> str:
        """What is not formed any more, and what still is, at which lengths; "" where no sizes are known."""
        gone, left = self.bytes(fused=True), self.bytes(fused=False)
        parts = [f"{in_units(gone)} of queries by keys no longer formed"] if gone else []
        parts += [f"{in_units(left)} still formed"] if left else []
        parts += [f"{in_units(self.mask_bytes)} of masks of queries by keys still there"] if self.mask_bytes else []
        matrices = [matrix for site in self.sites for matrix in (site.matrix, site.mask) if matrix is not None]
        named = sorted({name for matrix in matrices for dim in matrix.dims for name in dim.atoms})
        lengths = ", ".join(f"{name}={self.lengths[name]}" for name in named if name in self.lengths)
        return ", ".join(parts) + (f" (at {lengths})" if parts and lengths else "")

    def lines(self) -> list[tuple[str, str]]:
        """The text, line by line, each with what it is: summary, savings, reason, note or a key of `WORDS`.

        What holds for several sites is said once, beside the first of them.
        """
        lines = [("summary", self.summary)]
        lines += [("savings", f"  {self.savings}")] if self.savings else []
        remarks = {i: (site.reason, site.mask_remark(self.lengths)) for i, site in enumerate(self.sites)}
        left = collections.Counter(text for texts in remarks.values() for text in texts)  # to be said once
        for i, site in enumerate(self.sites):
            what = f"{site.kind} -> {site.became}" if site.became else site.kind
            lines.append((self.became_of(site), f"{site.node}: {what}"))
            for text in remarks[i]:
                more = left.pop(text, 0) - 1
                if text and more >= 0:
                    lines.append(("reason", f"         {text}{f' (the same for {more} more)' if more else ''}"))
        return lines + [("note", f"note: {note}") for note in self.notes]

    def __str__(self) -> str:
        return "\n".join(self._mark(kind) + text for kind, text in self.lines())

    def _mark(self, kind: str) -> str:
        """What a line begins with."""
        return f"  {kind:<{9 if self.undone else 7}}" if kind in WORDS else ""

    def __rich__(self) -> Text:
        """The text in colours."""
        from rich.text import Text

        styles = {"summary": "bold", "savings": "dim", "reason": "yellow", "note": "italic"}
        text = Text()
        for kind, line in self.lines():
            text.append(self._mark(kind), "bold red" if kind == "left" else "bold green")
            text.append(f"{line}\n", styles.get(kind, ""))
        text.rstrip()
        return text

    def explain(self, name: str) -> str:
        """All that is known about the attention that node `name` is part of; "" if it is part of none."""
        sites = [
            site
            for site in self.sites
            if name in (site.node, site.node.rpartition(" / ")[2]) or name in (own for _, own in site.operators)
        ]
        return "\n".join(self._explained(site) for site in sites)

    def _explained(self, site: Site) -> str:
        size = site.bytes(self.lengths)
        where = f" at {', '.join(f'{k}={v}' for k, v in self.lengths.items())}" if self.lengths else ""
        facts = {
            "operators": " > ".join(f"{kind} '{name}'" if name else kind for kind, name in site.operators),
            "scores": f"{site.matrix}" if site.matrix is not None else "their shape is not known",
            "bytes": f"{in_units(size)}{where}" if size is not None else "",
            "became": site.became,
            "mask": site.mask_remark(self.lengths),
            "why not" if self.became_of(site) == "left" else "remark": site.reason,
        }
        lines = [f"{site.node}: {site.kind}, {WORDS[self.became_of(site)]}"]
        return "\n".join([*lines, *(f"  {key:<11}{text}" for key, text in facts.items() if text)])

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as a JSON object.

        fused, total, undone, lengths, bytes_saved, bytes_left, bytes_masks, notes and sites; each of these node, kind,
        operators (pairs of type and name), fused, reason, became, scores (dimensions as numbers and texts, null where
        not known), bytes (at the lengths, or null) and mask (dimensions, if it is queries by keys, else null).
        bytes_masks are those of such masks, each once; bytes_saved is without them.
        """
        lengths = self.lengths
        sites = [
            {
                "node": site.node,
                "kind": site.kind,
                "operators": [list(operator) for operator in site.operators],
                "fused": site.fused,
                "reason": site.reason,
                "became": site.became,
                "scores": list(site.matrix.names) if site.matrix is not None else None,
                "bytes": site.bytes(lengths),
                "mask": list(site.mask.names) if site.mask is not None else None,
            }
            for site in self.sites
        ]
        content: dict[str, Any] = {
            "fused": self.fused,
            "total": self.total,
            "undone": self.undone,
            "lengths": lengths,
            "bytes_saved": self.bytes(fused=True),
            "bytes_left": self.bytes(fused=False),
            "bytes_masks": self.mask_bytes,
            "sites": sites,
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=indent)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        from flashonnx.export.reports.page import page

        return page(self)


def in_units(count: int) -> str:
    """Bytes for people: "12.6 MB"."""
    size, unit = float(count), "bytes"
    for following in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, following
    return f"{size:.3g} {unit}"
