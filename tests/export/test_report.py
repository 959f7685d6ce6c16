"""The report: counts, words, JSON and HTML."""

from __future__ import annotations

import html.parser
import json

from flashonnx.export import Report, Site, fuse
from models import parse

SITES = (
    Site("node_softmax", "Softmax", True, "", "FlashAttention(3-D, scale=0.125)"),
    Site("node_<odd>", "Attention", False, "qk_matmul_output ('p & q') is used; remove that output"),
)


def test_counts_and_text() -> None:
    report = Report(SITES, ("no portable body",))
    assert (report.fused, report.total) == (1, 2)
    text = str(report)
    assert text.splitlines()[0] == "1 of 2 attentions fused"
    for word in ("node_softmax", "FlashAttention(3-D", "left ", "remove that output", "note: no portable body"):
        assert word in text


def test_nothing_found() -> None:
    assert str(Report()) == "no attention found: the model is unchanged"


def test_json() -> None:
    content = json.loads(Report(SITES).to_json())
    assert (content["fused"], content["total"]) == (1, 2)
    assert content["sites"][1] == {
        "node": "node_<odd>",
        "kind": "Attention",
        "fused": False,
        "reason": "qk_matmul_output ('p & q') is used; remove that output",
        "became": "",
    }


def test_html() -> None:
    """One self-contained page, in which names and reasons are text."""

    class Reader(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[list[str]] = []
            self.tags: set[str] = set()

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.tags.add(tag)
            if tag == "tr":
                self.rows.append([])
            if tag == "td":
                self.rows[-1].append("")

        def handle_data(self, data: str) -> None:
            if self.rows and self.rows[-1] and self.lasttag == "td":
                self.rows[-1][-1] += data

    page = Report(SITES).to_html()
    reader = Reader()
    reader.feed(page)
    cells = [[cell.strip() for cell in row] for row in reader.rows if row]
    assert cells[0] == ["fused", "node_softmax", "Softmax", "FlashAttention(3-D, scale=0.125)", ""]
    assert cells[1][1:] == ["node_<odd>", "Attention", "", SITES[1].reason]
    assert not {"script", "link", "img"} & reader.tags


def test_every_reason_speaks() -> None:
    """A refusal names the node or tensor that is in the way."""
    body = """
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) odd = Sigmoid(raw)
        p = Softmax<axis=-1>(odd) y = MatMul(p, v)
    """
    model = parse(body, ", ".join(f"float[b,2,s,8] {name}" for name in "qkv"), "float[b,2,s,8] y")
    for node in model.graph.node:
        node.name = f"node_{node.op_type}"
    _, report = fuse(model)
    assert (report.total, report.fused) == (1, 0)
    assert "Sigmoid 'node_Sigmoid'" in report.sites[0].reason
