"""The report: counts, words, JSON and HTML."""

from __future__ import annotations

import html.parser
import json

import pytest
from flashonnx.export import Report, Site, explain, fuse
from flashonnx.export.sites.matrices import Matrix
from flashonnx.export.values.dims import Dim
from models import parse

PLAIN = "kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(q, kt) p = Softmax<axis=-1>(scores) y = MatMul(p, v)"

CHAIN = (("MatMul", "scores"), ("Softmax", "node_softmax"), ("MatMul", "mean"))
MATRIX = Matrix((Dim.atom("batch"), Dim.of(12), Dim.atom("sequence"), Dim.parse("past + sequence")), 2)
SITES = (
    Site("node_softmax", "Softmax", True, "", "FlashAttention(3-D, scale=0.125)", MATRIX, CHAIN),
    Site("node_<odd>", "Attention", False, "qk_matmul_output ('p & q') is used; remove that output"),
)


def test_counts_and_text() -> None:
    report = Report(SITES, ("no portable body",))
    assert (report.fused, report.total) == (1, 2)
    text = str(report)
    assert text.splitlines()[0] == "1 of 2 attentions fused"
    for word in ("node_softmax", "FlashAttention(3-D", "left ", "remove that output", "note: no portable body"):
        assert word in text


def test_what_holds_for_every_layer_is_said_once() -> None:
    """Reasons and remarks beside the first, with the number of others; notes of bodies with theirs."""
    sites = [Site(f"layer{i}", "Attention", i > 3, "the same" if i != 2 else "another") for i in range(6)]
    text = str(Report(tuple(sites)))
    assert text.count("the same (the same for 4 more)") == text.count("the same") - 1 == 1
    assert text.index("another") > text.index("layer2") and "another (" not in text
    layers = "\n".join(
        f"y{i} = flashonnx.FlashAttentionVarlen<q_num_heads=4, kv_num_heads=4>(x, x, x, ends)" for i in range(3)
    )
    _, report = fuse(parse(layers, "float[t,32] x, int32[e] ends", "float[t,32] y2", 20))
    assert report.fused == 3 and len(report.notes) == 1
    assert "and 2 more: FlashAttentionVarlen packs sequences" in report.notes[0]


def test_nothing_found() -> None:
    assert str(Report()) == "no attention found: the model is unchanged"
    assert str(Report(undone=True)) == "no flashonnx node found: the model is unchanged"


def test_what_unfuse_did() -> None:
    """Nodes that are replaced are what was asked for, and nothing is called fused but what is left so."""
    sites = [
        Site("first", "FlashAttention", False, "does not clamp", "Attention"),
        Site("second", "FlashAttentionVarlen", True, "packs"),
    ]
    report = Report(tuple(sites), undone=True)
    assert str(report).splitlines() == [
        "1 of 2 fused nodes are standard operators again",
        "  replaced first: FlashAttention -> Attention",
        "         does not clamp",
        "  left     second: FlashAttentionVarlen",
        "         packs",
    ]
    assert report.__rich__().plain == str(report)
    assert json.loads(report.to_json())["undone"] is True
    assert "first: FlashAttention, standard operators again\n" in report.explain("first")
    assert "  became     Attention\n  remark     does not clamp" in report.explain("first")
    assert "left as it was\n  scores     their shape is not known\n  why not " in report.explain("second")
    page = report.to_html()
    assert "unfusion report" in page and "<b>1</b> standard operators again" in page and "width:50.0%" in page
    assert page.count('<tr class="replaced">') == page.count('<tr class="left">') == 1
    assert "fused</li>" not in page and "no longer formed" not in page


def test_json() -> None:
    content = json.loads(Report(SITES).to_json())
    assert (content["fused"], content["total"]) == (1, 2)
    assert content["sites"][1] == {
        "node": "node_<odd>",
        "kind": "Attention",
        "operators": [],
        "fused": False,
        "reason": "qk_matmul_output ('p & q') is used; remove that output",
        "became": "",
        "scores": None,
        "bytes": None,
        "mask": None,
    }
    assert content["sites"][0]["scores"] == ["batch", 12, "sequence", "sequence + past"]
    assert content["sites"][0]["operators"] == [list(operator) for operator in CHAIN]


def test_bytes() -> None:
    """At given lengths, else at 1 for the first dimension and 1024 for others."""
    report = Report(SITES)
    assert report.lengths == {"batch": 1, "sequence": 1024, "past": 1024}
    assert report.bytes(fused=True) == 12 * 1024 * 2048 * 2
    assert report.bytes(fused=False) == 0
    content = json.loads(report.at({"batch": 3, "sequence": 10, "past": 0}).to_json())
    assert content["lengths"] == {"batch": 3, "sequence": 10, "past": 0}
    assert content["bytes_saved"] == content["sites"][0]["bytes"] == 3 * 12 * 10 * 10 * 2
    assert "7.2 kB of queries by keys no longer formed (at batch=3, past=0, sequence=10)" in str(
        report.at({"batch": 3, "sequence": 10, "past": 0})
    )


def masked(*shapes: str) -> Report:
    """An attention with a float mask of each shape, beside scores (b, 4, s, s), at b = 3, s = 10."""
    body, inputs = "", ["float[b,4,s,8] q", "float[b,4,s,8] k", "float[b,4,s,8] v"]
    inputs += [f"float[{shape}] mask_{i}" for i, shape in enumerate(dict.fromkeys(shapes))]
    for i, shape in enumerate(shapes):
        source, mask = f"y{i - 1}" if i else "q", f"mask_{list(dict.fromkeys(shapes)).index(shape)}"
        body += f"k{i} = Transpose<perm=[0,1,3,2]>(k) s{i} = MatMul({source}, k{i}) a{i} = Add(s{i}, {mask}) "
        body += f"p{i} = Softmax<axis=-1>(a{i}) y{i} = MatMul(p{i}, v) "
    _, report = fuse(parse(body, ", ".join(inputs), f"float[b,4,s,8] y{len(shapes) - 1}"))
    assert report.fused == report.total == len(shapes)
    return report.at({"b": 3, "s": 10})


@pytest.mark.parametrize(
    ("shapes", "saved", "masks"),
    [
        (["b,4,s,s"], 0, 3 * 4 * 100 * 4),
        (["1,1,s,s"], (12 - 1) * 100 * 4, 100 * 4),
        (["b,1,1,s"], 12 * 100 * 4, 0),
        (["b,4,s,s", "b,4,s,s"], 12 * 100 * 4, 12 * 100 * 4),  # one for both
        (["b,4,s,s", "1,4,s,s"], (24 - 12 - 4) * 100 * 4, (12 + 4) * 100 * 4),
    ],
)
def test_masks_as_large_as_the_scores_are_not_saved(shapes: list[str], saved: int, masks: int) -> None:
    report = masked(*shapes)
    content = json.loads(report.to_json())
    assert (content["bytes_saved"], content["bytes_masks"]) == (saved, masks)
    remark = f"its mask is still queries by keys: {shapes[0].replace(',', ' × ')}"
    for text in (str(report), report.to_html(), report.explain(report.sites[0].node)):
        assert (remark in text) == bool(masks)
    for text in (str(report), report.to_html()):
        assert ("of masks of queries by keys still there" in text) == bool(masks)
    dims = [int(name) if name.isdigit() else name for name in shapes[0].split(",")]
    assert content["sites"][0]["mask"] == (dims if masks else None)


@pytest.mark.parametrize(
    ("body", "inputs", "scores", "size"),
    [
        (PLAIN, "float16[b,2,s,8] q, float16[b,2,t,8] k, float16[b,2,t,8] v", ["b", 2, "s", "t"], 2 * 7 * 9 * 2),
        (PLAIN, "float[4,2,5,8] q, float[4,2,6,8] k, float[4,2,6,8] v", [4, 2, 5, 6], 4 * 2 * 5 * 6 * 4),
        (
            "y = Attention(q, k, v)",
            "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v",
            ["b", 2, "s", "t"],
            1008 // 2,
        ),
        (
            "y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v)",
            "float[b,s,32] q, float[b,t,16] k, float[b,t,16] v",
            ["b", 4, "s", "t"],
            1008,
        ),
        (
            "y, pk, pv = Attention(q, k, v, , k, v)",
            "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v",
            ["b", 2, "s", "2*t"],
            1008,
        ),
    ],
)
def test_sizes_of_scores(body: str, inputs: str, scores: list[int | str], size: int) -> None:
    """Those of the model, for operators that do not show them too."""
    model = parse(body, inputs, "float y", opset=23)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    _, report = fuse(model)
    assert report.total == 1
    site = json.loads(report.at({"b": 1, "s": 7, "t": 9}).to_json())["sites"][0]
    assert (site["scores"], site["bytes"]) == (scores, size)


def test_explain() -> None:
    report = Report(SITES)
    for name in ("scores", "mean", "node_softmax"):
        assert report.explain(name).startswith("node_softmax: Softmax, fused\n")
    assert "why not    qk_matmul_output" in report.explain("node_<odd>")
    assert report.explain("") == report.explain("elsewhere") == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("head", "goes into no product"),
        ("first", "derives from no product"),
        ("kt", "is part of no attention"),
        ("p", "Softmax, fused"),
    ],
)
def test_explain_what_is_no_attention(name: str, words: str) -> None:
    body = f"first = Softmax(x) q = Relu(first) {PLAIN} head = Softmax(y)"
    inputs = "float[b,2,s,8] x, float[b,2,s,8] k, float[b,2,s,8] v"
    model = parse(body, inputs, "float[b,2,s,8] head")
    _, report = fuse(model)
    assert words in explain(model, report, name)
    with pytest.raises(ValueError, match="no node 'fist'; did you mean 'first'"):
        explain(model, report, "fist")


def test_colours() -> None:
    """The same words as the plain text."""
    assert Report(SITES, ("a note",)).__rich__().plain == str(Report(SITES, ("a note",)))


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
            if self.rows and self.rows[-1]:
                self.rows[-1][-1] += data

    page = Report(SITES).to_html()
    reader = Reader()
    reader.feed(page)
    cells = [[cell.strip() for cell in row] for row in reader.rows if row]
    assert cells[0][:2] == ["fused", "node_softmax"]
    assert cells[0][2:4] == ["SoftmaxMatMul → Softmax → MatMul", "FlashAttention(3-D, scale=0.125)"]
    assert cells[0][4] == "batch × 12 × sequence × (sequence + past)50.3 MB"
    assert cells[1] == ["left", "node_<odd>", "Attention", SITES[1].reason, "–"]
    assert not {"script", "link", "img"} & reader.tags
    assert "url(" not in page
    assert Report().summary in Report().to_html()


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


QKV, Y = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v", "float[b,2,s,8] y"


def test_axes_without_a_name() -> None:
    """Nothing shows that they are equal, and the reason says what to do."""
    model = parse(PLAIN, QKV, Y)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")
    _, report = fuse(model)
    assert report.fused == 0 and "axes without a name count as different" in report.sites[0].reason
    assert "without a name" not in fuse(parse(PLAIN, QKV.replace("b,2,s,8] v", "c,2,s,8] v"), Y))[1].sites[0].reason


def test_reasons_name_nodes_by_their_values() -> None:
    """Where they have no name of their own."""
    model = parse(PLAIN.replace("scores = ", "raw = ", 1).replace("p =", "scores = Relu(raw) p ="), QKV, Y)
    assert "Relu 'scores' stands between" in fuse(model)[1].sites[0].reason
