"""What must not lose a model: rules that raise, nodes written by hand with mistakes, files of all sorts."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashonnx.export import fuse, rules, unfuse
from flashonnx.export.rules import RefusalError
from flashonnx.export.rules.sdpa import DecomposedAttention
from models import assert_same, fuse_and_check, parse, random_inputs
from onnx import TensorProto, helper, numpy_helper

QKV = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
Y = "float[b,2,s,8] y"
PLAIN = "kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(q, kt) p = Softmax<axis=-1>(scores) y = MatMul(p, v)"
TWO = PLAIN.replace("y =", "x =") + " s2 = MatMul(x, kt) p2 = Softmax<axis=-1>(s2) y = MatMul(p2, v)"


class Raising:
    """A rule with a fault: it raises at the sites that `names` has, after it has made a mess of the reducer."""

    kinds = ("Softmax",)

    def __init__(self, error: Exception, *names: str) -> None:
        self.error = error
        self.names = names

    def rewrite(self, fusion: Any, candidate: Any) -> Any:
        if candidate.name not in self.names:
            raise RefusalError("not mine")
        builder = fusion.builder(candidate.node)
        left_over = builder.op("Neg", candidate.node.inputs[0])
        candidate.node.graph.insert_before(candidate.node, builder.nodes)
        fusion.reducer.made += builder.nodes
        assert left_over.name
        raise self.error


@pytest.mark.parametrize(
    "error", [KeyError("boom"), RecursionError("deep"), AssertionError(), ZeroDivisionError("x / 0")]
)
def test_rules_that_raise(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site is reported with the exception and left; the other one is fused."""
    monkeypatch.setattr(rules, "RULES", (Raising(error, "p"),))
    model = parse(TWO, QKV, Y)
    result, report = fuse(model)
    assert result is model
    assert f"Raising failed: {type(error).__name__}" in report.sites[0].reason
    assert report.sites[1].reason == "not mine"

    class Choosing(DecomposedAttention):
        def rewrite(self, fusion: Any, candidate: Any) -> Any:
            if candidate.name == "p":
                raise error
            return super().rewrite(fusion, candidate)

    monkeypatch.setattr(rules, "RULES", (Raising(error, "p"), Choosing()))
    fused, report = fuse_and_check(model, {"b": 2, "s": 5}, fused=1, total=2)
    assert "Raising failed" in report.sites[0].reason
    assert "Choosing failed" in report.sites[0].reason
    assert [node.op_type for node in fused.graph.node] == ["Transpose", "MatMul", "Softmax", "MatMul", "FlashAttention"]


def test_a_body_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is fused without it, and the report says so."""
    from flashonnx.export.operator import portable

    def fail(*_: object, **__: object) -> None:
        raise IndexError("no such thing")

    monkeypatch.setattr(portable, "function_of", fail)
    fused, report = fuse(parse(PLAIN, QKV, Y))
    assert report.fused == 1
    (note,) = report.notes
    assert note.startswith("no portable body for '") and note.endswith("': no such thing")
    assert not fused.functions


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"is_casual": 1}, "no attribute 'is_casual': did you mean 'is_causal'"),
        ({"num_heads": 2}, "did you mean '(q|kv)_num_heads'"),
        ({"colour": 2}, "no attribute 'colour': it has is_causal, "),
        ({"is_causal": "yes"}, "'is_causal' is expected to be of type int, got string"),
        ({"scale": 1}, "'scale' is expected to be of type float, got int"),
        ({"empty_row": "none"}, "'empty_row' is expected to be one of zero, mean, got 'none'"),
        ({"qkv_layout": "bhsd"}, "'qkv_layout' is expected to be one of separate, 3hd"),
    ],
)
@pytest.mark.parametrize("function", [fuse, unfuse])
def test_misspelt_attributes(function: Any, attributes: dict[str, Any], words: str, tmp_path: Path) -> None:
    node = helper.make_node("FlashAttention", ["q", "k", "v"], ["y"], "mine", domain="flashonnx", **attributes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 2, "s", 8]) for name in "qkvy"]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    model = helper.make_model(
        helper.make_graph([node], "g", values[:3], values[3:]), opset_imports=imports, ir_version=10
    )
    with pytest.raises(ValueError, match=f"FlashAttention 'mine'.*{words}"):
        function(model, tmp_path / "out.onnx")
    assert not os.listdir(tmp_path)


def test_attributes_of_later_opsets() -> None:
    """What an Attention of the future means is not known."""
    model = parse("y = Attention<causality=3, is_causal=1>(q, k, v)", QKV, Y, opset=25)
    result, report = fuse(model)
    assert result is model
    assert "attribute causality of Attention is not known" in report.sites[0].reason


def test_damaged_files(tmp_path: Path) -> None:
    """Cut or altered anywhere: a report, or one clear error; never another exception, never a changed file."""
    model = parse(TWO, QKV, Y)
    model.graph.initializer.append(numpy_helper.from_array(np.arange(9, dtype=np.float32), "unused"))
    content = model.SerializeToString()
    path, draw = tmp_path / "model.onnx", random.Random(0)
    damaged = [content[:length] for length in range(0, len(content), 7)]
    for _ in range(120):
        altered = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 5])):
            altered[draw.randrange(len(altered))] = draw.randrange(256)
        damaged.append(bytes(altered))
    errors = 0
    for data in damaged:
        path.write_bytes(data)
        for function in (fuse, unfuse):
            try:
                function(path, tmp_path / "out.onnx")
            except ValueError as error:
                errors += 1
                assert str(path) in str(error) or "model" in str(error), error
            assert path.read_bytes() == data
    assert errors > len(damaged) // 2


def test_very_deep_graphs() -> None:
    """A thousand operators between product and softmax."""
    steps = " ".join(f"n{i + 1} = Neg(n{i})" for i in range(1, 1001))
    body = f"kt = Transpose<perm=[0,1,3,2]>(k) n1 = MatMul(q, kt) {steps} p = Softmax(n1001) y = MatMul(p, v)"
    model = parse(body, QKV, Y)
    result, report = fuse(model)
    assert_same(model, result, random_inputs(model, {"b": 1, "s": 3}))
    assert all(site.fused or site.reason for site in report.sites)
