"""prepare_for_tensorrt: what it changes, what it leaves, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import onnx
import onnx_ir
import pytest
from cases import Case
from flashonnx.tensorrt import prepare_for_tensorrt
from nodes import DOMAIN, one_node
from onnx import TensorProto, helper
from trt_models import attributes_of, calls_of_functions, two_nodes

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
_BY_ID = {case.id: case for case in cases.ALL}


def test_holes_are_closed() -> None:
    case = Case("holes", lengths=(3, 7), sinks=True)
    before = one_node(case, case.inputs())
    assert list(before.graph.node[0].input) == ["Q", "K", "V", "", "", "", "nonpad_kv_seqlen", "sinks"]
    (node,) = prepare_for_tensorrt(before).graph.node
    assert list(node.input) == ["Q", "K", "V", "nonpad_kv_seqlen", "sinks"]
    assert list(node.output) == ["Y", "lse"]
    attributes = attributes_of(node)
    assert attributes["inputs"] == "Q,K,V,nonpad_kv_seqlen,sinks"
    assert attributes["outputs"] == "Y,lse"
    assert attributes["left_window_size"] == -1
    assert before.graph.node[0].input[3] == ""  # the caller's model is the caller's


def test_a_bias_behind_holes() -> None:
    """Of packed projections it is the second of two inputs, and named."""
    case = Case("bias", layout="3hd", kv_length=5, bias=1.0)
    (node,) = prepare_for_tensorrt(one_node(case, case.inputs())).graph.node
    assert list(node.input) == ["Q", "bias"]
    assert attributes_of(node)["inputs"] == "Q,bias"


def test_preparing_twice_changes_nothing() -> None:
    once = prepare_for_tensorrt(two_nodes())
    assert prepare_for_tensorrt(once) == once


def test_boolean_masks_are_cast_once() -> None:
    model = two_nodes()
    model.graph.node.append(
        helper.make_node("FlashAttention", ["y", "k", "v", "mask"], ["z"], domain=DOMAIN, q_num_heads=4, kv_num_heads=2)
    )
    prepared = prepare_for_tensorrt(model)
    kinds = [node.op_type for node in prepared.graph.node]
    assert kinds == ["FlashAttention", "Add", "Cast", "FlashAttention", "FlashAttention"]
    assert attributes_of(prepared.graph.node[2])["to"] == TensorProto.INT32
    assert [node.input[3] for node in prepared.graph.node[3:]] == list(prepared.graph.node[2].output) * 2


def test_casts_take_no_name_that_is_taken() -> None:
    model = two_nodes()
    model.graph.node.append(helper.make_node("Identity", ["mask"], ["mask_int32"]))
    names = [output for node in prepare_for_tensorrt(model).graph.node for output in node.output]
    assert len(names) == len(set(names)) == 5


def test_computed_masks_are_known_to_be_boolean() -> None:
    model = two_nodes()
    model.graph.node.insert(0, helper.make_node("Not", ["mask"], ["inverted"]))
    model.graph.node[3].input[3] = "inverted"
    assert [node.op_type for node in prepare_for_tensorrt(model).graph.node].count("Cast") == 1


def test_portable_functions_go_and_others_stay() -> None:
    model = two_nodes()
    identity = helper.make_node("Identity", ["x"], ["r"])
    for domain, name in ((DOMAIN, "FlashAttention"), ("mine", "Same")):
        opsets = [helper.make_opsetid("", 21)]
        model.functions.append(helper.make_function(domain, name, ["x"], ["r"], [identity], opsets))
    model.functions[0].overload = model.graph.node[0].overload = "one"
    prepared = prepare_for_tensorrt(model)
    assert [function.name for function in prepared.functions] == ["Same"]
    assert prepared.graph.node[0].overload == ""


def test_masks_of_functions_are_cast_where_they_are_boolean() -> None:
    """The type of a function's mask is that of the caller's, so such functions become part of the graph."""
    model = calls_of_functions()
    before = onnx.ModelProto()
    before.CopyFrom(model)
    prepared = prepare_for_tensorrt(model)
    assert model == before
    assert [function.name for function in prepared.functions] == ["Same"]
    onnx.checker.check_model(prepare_for_tensorrt(model, onnxruntime=True))
    first, second = (node for node in prepared.graph.node if node.op_type == "FlashAttention")
    makers = {output: node for node in prepared.graph.node for output in node.output}
    assert (makers[first.input[3]].op_type, makers[second.input[3]].op_type) == ("Cast", "Identity")
    assert [*first.output, *second.output] == ["y0", "y1"]
    assert attributes_of(prepared.functions[0].node[0])["inputs"] == "Q,K,V"


def test_functions_of_another_opset_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds FlashAttention with a mask cannot be inlined: .*version 20"):
        prepare_for_tensorrt(calls_of_functions(function_opset=20))


def test_nodes_inside_subgraphs_are_prepared() -> None:
    inner = two_nodes().graph
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, ())
    branch = helper.make_node("If", ["c"], ["r"], then_branch=inner, else_branch=inner)
    del branch.attribute[0].g.input[:], branch.attribute[1].g.input[:]
    graph = helper.make_graph([branch], "g", [condition, *inner.input], [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)])
    prepared = prepare_for_tensorrt(model)
    for attribute in prepared.graph.node[0].attribute:
        nodes = [node for node in attribute.g.node if node.op_type == "FlashAttention"]
        assert [attributes_of(node)["inputs"] for node in nodes] == ["Q,K,V", "Q,K,V,attn_mask"]
        assert [node.op_type for node in attribute.g.node].count("Cast") == 1


def test_masks_of_subgraphs_and_large_weights_are_known() -> None:
    """A mask that only a branch has; a mask compared with a weight too large to be looked at."""
    model = two_nodes()
    weight = helper.make_tensor("w", TensorProto.FLOAT, (1, 1, 1, 2000), bytes(8000), raw=True)
    model.graph.initializer.append(weight)
    zero = helper.make_tensor("zero", TensorProto.FLOAT, (), [0.0])
    model.graph.initializer.append(zero)
    inner = onnx.GraphProto()
    inner.CopyFrom(model.graph)
    del inner.input[:], inner.initializer[:]
    inner.node.insert(0, helper.make_node("Greater", ["w", "zero"], ["positive"]))
    inner.node[3].input[3] = "positive"
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, ())
    del model.graph.node[:], model.graph.output[:]
    model.graph.input.append(condition)
    model.graph.node.append(helper.make_node("If", ["c"], ["r"], then_branch=inner, else_branch=inner))
    for attribute in prepare_for_tensorrt(model).graph.node[0].attribute:
        assert [node.op_type for node in attribute.g.node].count("Cast") == 1


def test_one_name_in_two_branches() -> None:
    """A value may be boolean in one branch and a float in the other: only the former is cast."""
    q, flag = (helper.make_tensor_value_info(n, t, s) for n, t, s in (("q", FLOAT, [1, 1, 4, 4]), ("c", BOOL, [])))
    masks = [helper.make_tensor_value_info(n, t, [4, 4]) for n, t in (("b", BOOL), ("f", FLOAT))]

    def branch(mask: str) -> onnx.GraphProto:
        node = helper.make_node("FlashAttention", ["q", "q", "q", "m"], [f"y_{mask}"], domain="flashonnx")
        result = helper.make_tensor_value_info(f"y_{mask}", FLOAT, [1, 1, 4, 4])
        return helper.make_graph([helper.make_node("Identity", [mask], ["m"]), node], mask, [], [result])

    choice = helper.make_node("If", ["c"], ["y"], then_branch=branch("b"), else_branch=branch("f"))
    graph = helper.make_graph([choice], "g", [q, flag, *masks], [helper.make_tensor_value_info("y", FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)])
    branches = {a.g.name: [n.op_type for n in a.g.node] for a in prepare_for_tensorrt(model).graph.node[0].attribute}
    assert branches == {"b": ["Identity", "Cast", "FlashAttention"], "f": ["Identity", "FlashAttention"]}


def test_form_of_onnxruntimes_provider() -> None:
    """Also of what is prepared already; nothing else has the domain."""
    once = prepare_for_tensorrt(prepare_for_tensorrt(two_nodes()), onnxruntime=True)
    assert prepare_for_tensorrt(once, onnxruntime=True) == once
    first, _, _, second = once.graph.node
    assert first.domain == second.domain == "trt.plugins"
    assert attributes_of(first)["plugin_namespace"] == "flashonnx"
    assert attributes_of(first)["plugin_version"] == "1"
    assert {opset.domain: opset.version for opset in once.opset_import} == {"": 21, "trt.plugins": 1}


def test_wide_windows_become_the_widest() -> None:
    case = _BY_ID["window-huge-left"]
    (node,) = prepare_for_tensorrt(one_node(case, case.inputs())).graph.node
    assert attributes_of(node)["left_window_size"] == 2**31 - 1


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"q_num_heads": 2**32 + 4}, "'q_num_heads' is expected to fit into 32 bits"),
        ({"left_window_size": -(2**40)}, "'left_window_size' is expected to fit into 32 bits"),
        ({"window": 3}, "no attribute 'window'"),
    ],
)
def test_attributes_that_tensorrt_would_mangle_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_for_tensorrt(two_nodes(**attributes))


def test_prepares_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_nodes(), path)
    assert prepare_for_tensorrt(path) == prepare_for_tensorrt(two_nodes())
    assert prepare_for_tensorrt(onnx_ir.from_proto(two_nodes())).graph.node[2].op_type == "Cast"


def test_reads_weights_in_other_files(tmp_path: Path) -> None:
    model = two_nodes()
    weight = helper.make_tensor("w", FLOAT, (3, 100), bytes(range(240)) * 5, raw=True)
    model.graph.initializer.append(weight)
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    onnx_ir_model = onnx_ir.load(path)
    for prepared in (prepare_for_tensorrt(path), prepare_for_tensorrt(onnx_ir_model)):
        assert prepared.graph.initializer[0].raw_data == weight.raw_data
    (tmp_path / "weights").unlink()
    with pytest.raises(FileNotFoundError, match="weights"):
        prepare_for_tensorrt(path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(FileNotFoundError, match=r"no ONNX model at '.*model\.onnx'"):
        prepare_for_tensorrt(path)
    whole = two_nodes().SerializeToString()
    for content in (b"", b"not a model at all", whole[: len(whole) // 2], whole[:-3]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"'.*model\.onnx' is not an ONNX model"):
            prepare_for_tensorrt(path)
    with pytest.raises(ValueError, match="the model is not an ONNX model"):
        prepare_for_tensorrt(onnx.ModelProto())
    with pytest.raises(TypeError, match=r"expected a path, .* got bytes"):
        prepare_for_tensorrt(whole)  # type: ignore[arg-type]
