"""What fuse takes and gives: paths, protos, onnx-ir models; files whole or not at all; clear errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashonnx
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


@pytest.mark.parametrize("places", [[3, 17], [[0, 3], [1, 1]]], ids=["counted", "by axis"])
def test_sparse_weights(model: onnx.ModelProto, places: list[Any]) -> None:
    """onnx-ir does not know them, nor what trains a model: the first are written out, the second is kept."""
    sparse = model.graph.sparse_initializer.add(dims=[16, 16])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([1.5, -2.0], np.float32), "sparse"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array(places), "places"))
    model.graph.node[0].input[1] = "sum"
    model.graph.node.insert(0, helper.make_node("Add", ["w", "sparse"], ["sum"]))
    model.training_info.add().algorithm.name = "training"
    fused, report = fuse(model)
    assert report.fused == 1 and fused.training_info == model.training_info
    inputs = random_inputs(model, {"b": 2, "s": 5})
    np.testing.assert_allclose(run(fused, inputs)[0], run(model, inputs)[0], atol=1e-5)


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


def test_weights_that_are_cut_short(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = external(model, tmp_path)
    weights = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(weights[:-1])
    with pytest.raises(ValueError, match=f"'w' in bytes up to {len(weights)} of .*which has only {len(weights) - 1}"):
        fuse(path, tmp_path / "fused.onnx")
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "weights.bin"]


def test_links(model: onnx.ModelProto, tmp_path: Path) -> None:
    """A link that is written to stays one; weights are found beside a link and beside what it points to."""
    for name in ("files", "links"):
        (tmp_path / name).mkdir()
    path = external(model, tmp_path / "files")
    link, weights = tmp_path / "links" / "model.onnx", tmp_path / "links" / "weights.bin"
    link.symlink_to(path)
    assert fuse(link)[1].fused == 1
    (tmp_path / "files" / "weights.bin").rename(weights)
    fuse(link, link)
    assert link.is_symlink()
    assert not path.is_symlink()
    assert sorted(os.listdir(tmp_path / "links")) == ["model.onnx", "weights.bin"]
    assert os.listdir(tmp_path / "files") == ["model.onnx"]
    inputs = random_inputs(model, {"b": 2, "s": 5})
    fused = onnx.load(link)
    assert len(nodes(fused)) == 1
    np.testing.assert_allclose(run(fused, inputs)[0], run(model, inputs)[0], atol=1e-5)
    link.unlink()
    link.symlink_to(tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(FileNotFoundError, match="no folder"):
        fuse(model, link)


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


@pytest.mark.parametrize(
    ("nodes", "outputs", "words"),
    [
        ([("Relu", "absent", "y")], "y", "Relu 'node' reads 'absent', which nothing makes"),
        ([("Relu", "x", "y")], "z", "Output.*'z'|nothing makes its output 'z'"),
        ([("Relu", "x", "y"), ("Neg", "x", "y")], "y", "Output 'y'"),
        ([("Add", "x b", "a"), ("Neg", "a", "b"), ("Relu", "b", "y")], "y", "there is a cycle in its graph 'g'"),
    ],
)
def test_invalid_graphs(nodes: list[tuple[str, str, str]], outputs: str, words: str, tmp_path: Path) -> None:
    """What nothing makes, two values of one name, a circle: one error, whatever way the model comes in, and no file."""
    made = [helper.make_node(op, inputs.split(), [output], name="node") for op, inputs, output in nodes]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in ("x", outputs)]
    graph = helper.make_graph(made, "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for function in (fuse, unfuse):
        for given in (model, path):
            with pytest.raises(ValueError, match=f"not a valid ONNX model: .*({words})"):
                function(given, tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert path.read_bytes() == model.SerializeToString()


def test_no_graph() -> None:
    with pytest.raises(ValueError, match="no graph or imports no opset"):
        fuse(onnx.ModelProto())


def test_invalid_subgraphs_and_functions() -> None:
    branch = (
        "then_branch = t () => (float[n] a) { a = Relu(REPLACED) }, else_branch = e () => (float[n] b) { b = Neg(x) }"
    )
    good = f"""<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        graph (float[n] x, bool c) => (float[n] y, float[n] z) {{ y = If (c) <{branch}> z = own.f(x) }}
        <domain: "own", opset_import: ["" : 18]> f (i) => (o) {{ h = Relu(i) o = Neg(h) }}"""
    model = onnx.parser.parse_model(good.replace("REPLACED", "x"))
    assert fuse(model)[0] is model
    with pytest.raises(ValueError, match="reads 'nowhere'"):
        fuse(onnx.parser.parse_model(good.replace("REPLACED", "nowhere")))
    model.functions[0].node[1].input[0] = "gone"
    with pytest.raises(ValueError, match="reads 'gone'"):
        fuse(model)


def test_nodes_out_of_order(model: onnx.ModelProto) -> None:
    """What can be sorted is no error."""
    nodes_ = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes_)
    fused, report = fuse(model)
    assert report.fused == 1
    onnx.checker.check_model(fused, full_check=True)


@pytest.mark.parametrize("version", [0, -3, 99, 2**40])
def test_unknown_opset(model: onnx.ModelProto, version: int) -> None:
    model.opset_import[0].version = version
    for function in (fuse, unfuse):
        with pytest.raises(ValueError, match=rf"imports opset {version}; the onnx package here knows 1 to \d+"):
            function(model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda node: node.ClearField("input"),
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


def test_a_folder_that_takes_no_files(model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any work is done, also by the export."""
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)  # a super-user may write everywhere
    expected = r"cannot write '.*out\.onnx': nothing can be written to its folder"
    for function in (fuse, unfuse):
        with pytest.raises(PermissionError, match=expected):
            function(model, tmp_path / "out.onnx")
    torch = pytest.importorskip("torch")
    with pytest.raises(PermissionError, match=expected):
        flashonnx.export_onnx(torch.nn.ReLU(), torch.ones(2), tmp_path / "out.onnx")


def test_output_that_is_a_pipe(model: onnx.ModelProto, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is no ordinary file"):
        fuse(model, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_old_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 12
    result, report = fuse(model)
    assert result is model
    assert "opset 12" in report.sites[0].reason
    assert "version_converter" in report.sites[0].reason
