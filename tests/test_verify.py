"""verify: equal models pass, wrong ones do not, and what cannot be compared is said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import flashonnx
import numpy as np
import onnx
import pytest
from flashonnx import _float64, _large
from flashonnx._compare import rows_of
from flashonnx.cli._verify_page import page
from flashonnx.cli.verify import _tell
from onnx import TensorProto, helper, numpy_helper

ort = pytest.importorskip("onnxruntime")
DIM = 16
SHAPE = ("batch", 4, "sequence", DIM)


def model(
    nodes: list[onnx.NodeProto],
    constants: dict[str, Any] | None = None,
    elem: int = TensorProto.FLOAT,
    mask: tuple[int, tuple[Any, ...]] | None = None,
    outputs: dict[str, tuple[int, tuple[Any, ...]]] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """Q, K, V (and "attention_mask") to Y."""
    inputs = [helper.make_tensor_value_info(name, elem, SHAPE) for name in "QKV"]
    if mask:
        inputs.append(helper.make_tensor_value_info("attention_mask", *mask))
    outputs = outputs or {"Y": (elem, SHAPE)}
    graph = helper.make_graph(
        nodes,
        "model",
        inputs,
        [helper.make_tensor_value_info(name, *described) for name, described in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def plain(scale: float = 1 / math.sqrt(DIM), dtype: Any = np.float32) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Transpose", ["K"], ["KT"], perm=(0, 1, 3, 2)),
        helper.make_node("MatMul", ["Q", "KT"], ["QK"]),
        helper.make_node("Mul", ["QK", "scale"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["P"], axis=-1),
        helper.make_node("MatMul", ["P", "V"], ["Y"]),
    ]
    return model(nodes, {"scale": np.asarray(scale, dtype)}, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def fused(elem: int = TensorProto.FLOAT, inputs: str = "QKV", **attributes: Any) -> onnx.ModelProto:
    return model([helper.make_node("FlashAttention", list(inputs), ["Y"], domain="flashonnx", **attributes)], elem=elem)


def test_equal_models_agree() -> None:
    verdict = flashonnx.verify(plain(), fused())
    assert verdict.ok and bool(verdict), str(verdict)
    assert verdict.reference == "the original in float64"
    (output,) = verdict.outputs
    assert (output.name, output.rows) == ("Y", "all")
    assert 0 < output.error <= output.allowed < 1e-5
    assert output.difference > 0
    assert len(verdict.cases) == 4 and "batch=3" in verdict.cases[2]
    assert "agree" in str(verdict) and "Y: ok" in str(verdict)


@pytest.mark.parametrize(
    "attributes",
    [{"scale": 0.2501}, {"is_causal": 1}, {"left_window_size": 100}, {"softcap": 50.0}],
    ids=["scale", "causal", "window", "softcap"],
)
def test_subtly_wrong_models_differ(attributes: dict[str, Any]) -> None:
    """A scale off by 0.04 %; a window that only the longest case (130) exceeds."""
    verdict = flashonnx.verify(plain(), fused(**attributes))
    assert not verdict.ok and not verdict, str(verdict)
    (output,) = verdict.outputs
    assert output.error > output.allowed
    assert "DIFFER" in str(verdict) and "worst in case" in str(verdict)
    case, index = output.worst
    assert 0 <= case < 4 and len(index) == 4


def test_swapped_inputs_differ() -> None:
    assert not flashonnx.verify(plain(), fused(inputs="QVK"))


def test_float16() -> None:
    half = plain(dtype=np.float16)
    assert flashonnx.verify(half, fused(TensorProto.FLOAT16)).ok
    wrong = flashonnx.verify(half, fused(TensorProto.FLOAT16, scale=0.26))
    assert not wrong.ok, str(wrong)


def test_bfloat16_has_a_truth_though_onnx_runtime_cannot_run_the_original() -> None:
    """NumPy and ONNX Runtime's CPU know no bfloat16: casts at the doors, onnx's evaluator for the original."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    original = plain(dtype=ml_dtypes.bfloat16)
    verdict = flashonnx.verify(original, fused(TensorProto.BFLOAT16), providers=["CPUExecutionProvider"])
    assert verdict.ok, str(verdict)
    assert any("onnx's evaluator" in note for note in verdict.notes)
    assert not flashonnx.verify(original, fused(TensorProto.BFLOAT16, scale=0.3), providers=["CPUExecutionProvider"])


def test_given_inputs_and_dims() -> None:
    feeds = {name: np.random.default_rng(i).standard_normal((1, 4, 5, DIM), np.float32) for i, name in enumerate("QKV")}
    verdict = flashonnx.verify(plain(), fused(), feeds)
    assert verdict.ok and verdict.cases == ["the given inputs"]
    assert len(flashonnx.verify(plain(), fused(), [feeds, feeds]).cases) == 2
    verdict = flashonnx.verify(plain(), fused(), dims={"batch": 2, "sequence": [3, 40]})
    assert verdict.cases == ["batch=2, sequence=3", "batch=2, sequence=40"]


def test_special_values_must_coincide() -> None:
    """A NaN in V reaches the outputs of its column only; a model that loses it is wrong, whatever the rest."""
    feeds = {name: np.ones((1, 4, 5, DIM), np.float32) for name in "QKV"}
    feeds["V"][0, 1, 2, 3] = np.nan
    assert flashonnx.verify(plain(), plain(), feeds).ok
    cleaning = plain()
    cleaning.graph.node[-1].output[0] = "raw"
    cleaning.graph.node.append(helper.make_node("IsNaN", ["raw"], ["is_nan"]))
    cleaning.graph.node.append(helper.make_node("Where", ["is_nan", "scale", "raw"], ["Y"]))
    verdict = flashonnx.verify(plain(), cleaning, feeds)
    assert not verdict.ok
    assert "NaN out of place" in str(verdict)


def test_integers_must_be_equal() -> None:
    def largest(scale: float) -> onnx.ModelProto:
        made = plain(scale)
        made.graph.node.append(helper.make_node("ArgMax", ["P"], ["index"], axis=-1, keepdims=0))
        made.graph.output.append(helper.make_tensor_value_info("index", TensorProto.INT64, SHAPE[:3]))
        return made

    assert flashonnx.verify(largest(0.25), largest(0.25)).ok
    verdict = flashonnx.verify(largest(0.25), largest(-0.25))
    assert "values are not equal" in str(verdict) and not verdict.ok


def test_mismatches_are_errors() -> None:
    renamed = fused()
    renamed.graph.node[0].output[0] = renamed.graph.output[0].name = "Z"
    with pytest.raises(ValueError, match=r"outputs differ: the original has \['Y'\], the fused model \['Z'\]"):
        flashonnx.verify(plain(), renamed)
    fewer = model([helper.make_node("FlashAttention", ["Q", "K", "K"], ["Y"], domain="flashonnx")])
    del fewer.graph.input[2]
    with pytest.raises(ValueError, match="inputs differ"):
        flashonnx.verify(plain(), fewer)
    fewer.graph.input[1].name = "cache_lengths"  # as an export with caches has
    with pytest.raises(ValueError, match="one has caches; compare the tokens that both write"):
        flashonnx.verify(plain(), fewer)
    narrower = fused()
    narrower.graph.node[0].output[0] = "full"
    narrower.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "axis"))
    narrower.graph.node.append(helper.make_node("ReduceMax", ["full", "axis"], ["Y"], keepdims=1))
    with pytest.raises(ValueError, match=r"output 'Y' has shape \(2, 4, 16, 1\) in the fused model, \(2, 4, 16, 16\)"):
        flashonnx.verify(plain(), narrower)
    half = fused()
    half.graph.node[0].output[0] = "full"
    half.graph.node.append(helper.make_node("Cast", ["full"], ["Y"], to=TensorProto.FLOAT16))
    half.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(ValueError, match="'Y' is float16 in the fused model, float32 in the original"):
        flashonnx.verify(plain(), half)


@pytest.mark.parametrize("content", [b"", b"this is no model", b"\x08\x0a"])
def test_broken_files_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    for model, name in ((path, "broken.onnx"), (content, "the model")):
        with pytest.raises(ValueError, match=f"{name}.* is not an ONNX model"):
            flashonnx.verify(model, model)


def test_no_case_at_all_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="at least one case"):
        flashonnx.verify(plain(), plain(), [])


def test_a_fused_model_that_does_not_run_is_named() -> None:
    """With the case at which it does not; also one that does not even load."""
    wide = model([helper.make_node("Identity", ["Q"], ["Y"])])
    narrow = model([helper.make_node("Reshape", ["Q", "shape"], ["Y"])], {"shape": [1, 4, 3, DIM]})
    with pytest.raises(Exception, match=r"that is the fused model, at batch=2, sequence=\d+, which the original runs"):
        flashonnx.verify(wide, narrow)
    unfit = model([helper.make_node("Add", ["Q", "three"], ["Y"])], {"three": np.zeros(3, np.float32)})
    with pytest.raises(Exception, match=r"Incompatible dimensions.*\nthat is the fused model"):
        flashonnx.verify(wide, unfit)


def test_weights_beyond_protobuf_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through a file; what ONNX Runtime does not run from there, the evaluator runs with them back."""
    monkeypatch.setattr(_large, "LIMIT", 0)
    big = model([helper.make_node("MatMul", ["Q", "w"], ["Y"])], {"w": np.eye(DIM, dtype=np.float32) / 3})
    feeds = [{name: np.ones((1, 4, 2, DIM), np.float32) for name in "QKV"}]
    assert (_float64.run(_float64.widen(big), feeds)[0][0] == np.float64(np.float32(1) / np.float32(3))).all()
    monkeypatch.setattr(_float64, "_by_onnxruntime", lambda *_: 1 / 0)
    np.testing.assert_allclose(_float64.run(_float64.widen(big), feeds)[0][0], 1 / 3, atol=1e-7)


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="no input has a dimension 'length'; there are batch, sequence"):
        flashonnx.verify(plain(), fused(), dims={"length": 3})
    with pytest.raises(ValueError, match=r"inputs are expected for \['Q', 'K', 'V'\], got \['Q'\]"):
        flashonnx.verify(plain(), fused(), {"Q": np.ones((1, 4, 5, DIM), np.float32)})
    with pytest.raises(ValueError, match="cannot be given together"):
        flashonnx.verify(plain(), fused(), {}, dims={"batch": 1})
    with pytest.raises(ValueError, match="all outputs are empty in every case"):
        flashonnx.verify(plain(), fused(), dims={"sequence": 0})
    with pytest.raises(TypeError, match="got int"):
        flashonnx.verify(3, fused())
    with pytest.raises(FileNotFoundError):
        flashonnx.verify("missing.onnx", fused())


def test_shapes_that_the_original_refuses_are_skipped() -> None:
    """A table of 20 positions: sequences of 33 and 130 cannot be."""
    nodes = [
        helper.make_node("Shape", ["Q"], ["size"], start=2, end=3),
        helper.make_node("Expand", ["table", "size"], ["row"]),
        helper.make_node("Squeeze", ["size", "zero"], ["length"]),
        helper.make_node("Sub", ["length", "one"], ["last"]),
        helper.make_node("Gather", ["positions", "last"], ["position"]),
        helper.make_node("Add", ["V", "position"], ["Y"]),
    ]
    constants = {"zero": [0], "one": 1, "positions": np.arange(20, dtype=np.float32), "table": np.float32([0])}
    original = model(nodes, constants)
    verdict = flashonnx.verify(original, original)
    assert verdict.ok and len(verdict.cases) == 2
    assert sum("the original refuses it" in note for note in verdict.notes) == 2
    with pytest.raises(ValueError, match="runs on no generated input: pass inputs or dims"):
        flashonnx.verify(original, original, dims={"sequence": 30})


def test_sessions_and_files(tmp_path: Path) -> None:
    onnx.save(plain(), tmp_path / "plain.onnx")
    onnx.save(fused(), tmp_path / "fused.onnx")
    assert flashonnx.verify(tmp_path / "plain.onnx", str(tmp_path / "fused.onnx")).ok
    first = ort.InferenceSession(tmp_path / "plain.onnx", providers=["CPUExecutionProvider"])
    second = flashonnx.session(fused(), ["CPUExecutionProvider"])
    assert flashonnx.verify(first, second).ok


def test_rows_before_the_first_token_are_judged_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Left padding under a causal mask: such rows see no key, and what they hold is a convention."""

    def masked(fill: float) -> onnx.ModelProto:
        nodes = [
            helper.make_node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
            helper.make_node("CumSum", ["seen", "axis"], ["count"]),
            helper.make_node("Greater", ["count", "nothing"], ["any"]),
            helper.make_node("Unsqueeze", ["any", "last"], ["rows"]),
            helper.make_node("ReduceSum", ["V", "head"], ["sum"], keepdims=0),
            helper.make_node("Where", ["rows", "sum", "fill"], ["Y"]),
        ]
        constants = {"axis": 1, "nothing": np.float32(0), "last": [2], "head": [1], "fill": np.float32(fill)}
        mask = (TensorProto.INT64, ("batch", "sequence"))
        return model(nodes, constants, mask=mask, outputs={"Y": (TensorProto.FLOAT, ("batch", "sequence", DIM))})

    verdict = flashonnx.verify(masked(0.0), masked(1.0))
    assert verdict.ok, str(verdict)
    apart = {output.rows: output for output in verdict.outputs}
    assert apart["all"].ok and not apart["before the first token"].ok
    assert "before the first token): differs, which does not count" in str(verdict)
    remark = apart["before the first token"].remark
    assert "nobody reads" in remark and "worst in case" in remark  # a large error has its reason beside it
    _tell(verdict)
    assert remark in capsys.readouterr().out and remark in page(verdict, "a", "b")


def test_float64_twin() -> None:
    """Constants, casts and the most negative number are widened; integers are not."""
    nodes = [
        helper.make_node("Cast", ["Q"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Constant", [], ["third"], value_float=1 / 3),
        helper.make_node("CastLike", ["third", "half"], ["narrow"]),
        helper.make_node("Mul", ["half", "narrow"], ["scaled"]),
        helper.make_node("Add", ["scaled", "lowest"], ["Y"]),
    ]
    original = model(nodes, {"lowest": np.float16(-65504), "count": np.int64(3)}, TensorProto.FLOAT16)
    wide = _float64.widen(original)
    kinds = {tensor.name: tensor.data_type for tensor in wide.graph.initializer}
    assert kinds == {"lowest": TensorProto.DOUBLE, "count": TensorProto.INT64}
    assert numpy_helper.to_array(wide.graph.initializer[0]) == np.finfo(np.float64).min
    assert wide.graph.node[0].attribute[0].i == TensorProto.DOUBLE
    feeds = {name: np.ones((1, 4, 2, DIM), np.float16) for name in "QKV"}
    (out,) = _float64.run(wide, [feeds])
    assert out[0].dtype == np.float64 and (out[0] == np.finfo(np.float64).min).all()
    assert original.graph.initializer[0].data_type == TensorProto.FLOAT16  # a copy was widened


def test_rows_before_the_first_token_of_a_past() -> None:
    """The mask's last columns are the new tokens'; keys of both are a present's."""
    mask = np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    feeds = {"attention_mask": mask, "past_key": np.zeros((2, 4, 2, 8))}
    (_, judged), (_, before) = rows_of(feeds, (2, 3, 7))
    assert judged[:, :, 0].tolist() == [[False, True, True], [True] * 3] and (judged != before).all()
    (_, judged), _ = rows_of(feeds, (2, 4, 5, 8))
    assert judged[:, 0, :, 0].tolist() == [[False, False, False, True, True], [True] * 5]
    assert rows_of(feeds, (2, 4, 7))[0][1].all()  # another axis


def test_agreement_on_nothing_is_none() -> None:
    """No outputs; only NaN; only rows before the first token: there is no verdict on these."""
    empty = plain()
    del empty.graph.output[:]
    with pytest.raises(ValueError, match="have no outputs"):
        flashonnx.verify(empty, empty)
    feeds = {name: np.full((1, 4, 3, DIM), np.nan, np.float32) for name in "QKV"}
    with pytest.raises(ValueError, match="no number was compared"):
        flashonnx.verify(plain(), fused(), feeds)
    copied = model([helper.make_node("Identity", ["Q"], ["Y"])], mask=(TensorProto.INT64, ("batch", 4)))
    feeds = {name: np.ones((1, 4, 3, DIM), np.float32) for name in "QKV"} | {
        "attention_mask": np.zeros((1, 4), np.int64)
    }
    with pytest.raises(ValueError, match="before the first token in every case"):
        flashonnx.verify(copied, copied, feeds)
    assert flashonnx.verify(copied, copied, feeds | {"attention_mask": np.ones((1, 4), np.int64)}).ok


def test_an_output_that_is_never_compared_is_named() -> None:
    nodes = [helper.make_node("Identity", ["Q"], ["Y"]), helper.make_node("Log", ["K"], ["Z"])]
    both = model(nodes, outputs={"Y": (TensorProto.FLOAT, SHAPE), "Z": (TensorProto.FLOAT, SHAPE)})
    feeds = {name: np.full((1, 4, 3, DIM), -1.0, np.float32) for name in "QKV"}
    verdict = flashonnx.verify(both, both, feeds)
    assert verdict.ok and verdict.notes == ["nothing of output 'Z' was compared"]
    assert [output.compared for output in verdict.outputs] == [4 * 3 * DIM, 0]


def test_nodes_in_subgraphs_run_with_the_library() -> None:
    """A branch that holds a FlashAttention without a body."""
    shape = ["batch", 4, "sequence", DIM]
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("FlashAttention", list("QKV"), [f"{name}_y"], domain="flashonnx", **attributes)],
            name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, shape)],
        )
        for name, attributes in (("then", {}), ("else", {"scale": 0.25}))
    }  # fmt: skip
    nodes = [helper.make_node("If", ["on"], ["Y"], **branches)]
    assert flashonnx.verify(plain(), model(nodes, {"on": True})).ok
    assert not flashonnx.verify(plain(scale=0.26), model(nodes, {"on": False})).ok
