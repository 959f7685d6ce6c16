"""What fuse takes and gives: paths, protos, onnx-ir models; files whole or not at all; clear errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from flashonnx.export import fuse, unfuse
from models import nodes, parse, random_inputs, run
from onnx import helper, numpy_helper

BODY = """
    h = MatMul(x, w) shape = Constant<value_ints=[0,0,2,8]>() h4 = Reshape(h, shape) q = Transpose<perm=[0,2,1,3]>(h4)
    kt = Transpose<perm=[0,1,3,2]>(q) scores = MatMul(q, kt) p = Softmax<axis=-1>(scores) y = MatMul(p, q)
"""


@pytest.fixture
def model() -> onnx.ModelProto:
    model = parse(BODY, "float[b,s,16] x", "float[b,2,s,8] y")
    weight = np.random.default_rng(0).standard_normal((16, 16), dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.metadata_props.add(key="author", value="somebody")
    return model


def test_path(model: onnx.ModelProto, tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "fused.onnx"
    onnx.save(model, path)
    before = path.read_bytes()
    fused, report = fuse(path, output)
    assert report.fused == 1
    assert isinstance(fused, onnx.ModelProto)
    assert path.read_bytes() == before
    assert onnx.load(output) == fused
    assert sorted(os.listdir(tmp_path)) == ["fused.onnx", "model.onnx"]
    inputs = random_inputs(model, {"b": 2, "s": 5})
    np.testing.assert_allclose(run(onnx.load(output), inputs)[0], run(model, inputs)[0], atol=1e-5)


def test_in_place(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    fuse(str(path), str(path))
    assert len(nodes(onnx.load(path))) == 1


def test_kinds_of_models(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    fused, _ = fuse(model)
    assert isinstance(fused, onnx.ModelProto)
    assert model.SerializeToString() == before
    as_ir = ir.from_proto(model)
    fused_ir, report = fuse(as_ir)
    assert isinstance(fused_ir, ir.Model)
    assert report.fused == 1
    assert fused_ir is not as_ir
    assert {node.op_type for node in as_ir.graph} >= {"Softmax"}
    assert ir.to_proto(fused_ir) == fused


def test_the_rest_is_kept(model: onnx.ModelProto) -> None:
    fused, _ = fuse(model)
    assert fused.metadata_props == model.metadata_props
    assert fused.graph.initializer == model.graph.initializer
    assert fused.graph.input == model.graph.input
    assert fused.graph.output == model.graph.output
    assert fused.producer_name == model.producer_name


def external(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # onnx.save moves the weights out of the model that it is given
    onnx.save(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_external_data_beside(model: onnx.ModelProto, tmp_path: Path) -> None:
    """Beside its input the output refers to the same weights, which are not copied."""
    path = external(model, tmp_path)
    weights = (tmp_path / "weights.bin").read_bytes()
    fuse(path, tmp_path / "fused.onnx")
    assert sorted(os.listdir(tmp_path)) == ["fused.onnx", "model.onnx", "weights.bin"]
    assert (tmp_path / "weights.bin").read_bytes() == weights
    inputs = random_inputs(model, {"b": 2, "s": 5})
    np.testing.assert_allclose(run(onnx.load(tmp_path / "fused.onnx"), inputs)[0], run(model, inputs)[0], atol=1e-5)


def test_external_data_elsewhere(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = external(model, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    fuse(path, other / "fused.onnx")
    assert sorted(os.listdir(other)) == ["fused.onnx", "fused.onnx.data"]
    inputs = random_inputs(model, {"b": 2, "s": 5})
    np.testing.assert_allclose(run(onnx.load(other / "fused.onnx"), inputs)[0], run(model, inputs)[0], atol=1e-5)


def test_missing_weights(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = external(model, tmp_path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
        fuse(path, tmp_path / "fused.onnx")
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_nothing_to_fuse(tmp_path: Path) -> None:
    """The bytes are the same, and the report says so."""
    path, output = tmp_path / "model.onnx", tmp_path / "same.onnx"
    onnx.save(parse("y = Relu(x)", "float[n] x", "float[n] y"), path)
    _, report = fuse(path, output)
    assert "unchanged" in str(report)
    assert output.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("content", [b"", b"this is no model", bytes(range(256)) * 16, b"<html></html>"])
def test_broken_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    for function in (fuse, unfuse):
        with pytest.raises(ValueError, match=r"broken\.onnx.*not an ONNX model"):
            function(path, tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["broken.onnx"]


def test_cut_file(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    content = model.SerializeToString()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut\.onnx"):
        fuse(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no ONNX model at"):
        fuse(tmp_path / "absent.onnx")
    with pytest.raises(TypeError, match="expected a path"):
        fuse(3)  # type: ignore[arg-type]


def test_no_folder_for_the_output(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        fuse(model, tmp_path / "absent" / "fused.onnx")


def test_a_failing_write_leaves_nothing(
    model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "fused.onnx"
    output.write_bytes(b"what was there")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        fuse(model, output)
    assert output.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["fused.onnx"]


def test_invalid_graphs() -> None:
    """A value that nobody makes; two values of one name."""
    graph = helper.make_graph([helper.make_node("Relu", ["absent"], ["y"])], "g", [], [])
    result, report = fuse(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert report.total == 0
    assert result is not None
    twice = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    double = helper.make_model(helper.make_graph(twice, "g", [], []), opset_imports=[helper.make_opsetid("", 18)])
    with pytest.raises(ValueError, match="not a valid ONNX model: Output 'y'"):
        fuse(double)
    with pytest.raises(ValueError, match="no graph or imports no opset"):
        fuse(onnx.ModelProto())


@pytest.mark.parametrize(
    "damage",
    [
        lambda node: node.ClearField("input"),
        lambda node: node.ClearField("output"),
        lambda node: node.attribute[0].CopyFrom(helper.make_attribute("perm", [0, 1, 9, 2])),
        lambda node: node.attribute[0].CopyFrom(helper.make_attribute("perm", [2**62] * 4)),
        lambda node: node.attribute[0].CopyFrom(helper.make_attribute("perm", "none")),
        lambda node: node.attribute[0].CopyFrom(helper.make_attribute("perm", 1.5)),
        lambda node: setattr(node, "op_type", "Reshape"),
        lambda node: setattr(node, "op_type", "Concat"),
        lambda node: setattr(node, "op_type", "Slice"),
        lambda node: setattr(node, "op_type", "Range"),
        lambda node: setattr(node, "op_type", "Einsum"),
    ],
)
def test_nodes_that_make_no_sense(model: onnx.ModelProto, damage: Callable[[onnx.NodeProto], None]) -> None:
    """They are left to the runtime, which names them; nothing is proved from them."""
    damage(model.graph.node[4])  # K^T
    before = model.SerializeToString()
    result, report = fuse(model)
    assert report.fused == 0
    assert result.SerializeToString() == before


def test_output_that_is_a_folder(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        fuse(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 12
    result, report = fuse(model)
    assert result is model
    assert "opset 12" in report.sites[0].reason
    assert "version_converter" in report.sites[0].reason
