"""The TensorRT plugin: its creator by ctypes, and NVIDIA's own parser and builder (TensorRT-RTX), which need no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import onnx
import pytest
import trt_abi
from cases import Case
from flashonnx.tensorrt import prepare_for_tensorrt
from nodes import DOMAIN, asked_for, one_node
from onnx import TensorProto, helper

_DRIVER = Path(__file__).with_name("trt_driver.py")
_BY_ID = {case.id: case for case in cases.ALL}
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}

rtx = pytest.mark.tensorrt
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tier tensorrt: no tensorrt_rtx (pip install tensorrt-rtx)"
)


@pytest.fixture(scope="session")
def creator(library_path: str) -> int:
    library = ctypes.CDLL(library_path)
    if not hasattr(library, "getCreators"):
        pytest.skip("tier tensorrt: the library was built without TensorRT's headers")
    (only,) = trt_abi.creators(library)
    return only


@pytest.fixture(scope="session")
def rtx_environment(tmp_path_factory: pytest.TempPathFactory, library_path: str, creator: int) -> dict[str, str]:
    """Where the parser finds the link to libtensorrt_rtx.so that the wheel lacks."""
    import tensorrt_rtx_libs

    links = tmp_path_factory.mktemp("links")
    (links / "libtensorrt_rtx.so").symlink_to(Path(tensorrt_rtx_libs.__file__).with_name("libtensorrt_rtx.so.1"))
    return python_environment(library_path) | {"LD_LIBRARY_PATH": str(links)}


def python_environment(library_path: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FLASHONNX_LIBRARY": library_path}


def drive(environment: dict[str, str], jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The driver's results, one for each job; fails if TensorRT took the process down."""
    done = subprocess.run(
        [sys.executable, str(_DRIVER)], input=json.dumps(jobs), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(jobs)
    return results


def save(model: onnx.ModelProto, folder: Path, name: str = "model") -> str:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return str(path)


def two_nodes(elem_type: int = TensorProto.FLOAT16, **attributes: Any) -> onnx.ModelProto:
    """Attention, Add, attention: dynamic batch and sequences, grouped heads, a padding mask of booleans."""
    attributes = {"q_num_heads": 4, "kv_num_heads": 2} | attributes
    shapes = {"q": ("B", "S", 256), "k": ("B", "T", 128), "v": ("B", "T", 128)}
    inputs = [helper.make_tensor_value_info(name, elem_type, shape) for name, shape in shapes.items()]
    inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ("B", 1, 1, "T")))
    nodes = [
        helper.make_node("FlashAttention", ["q", "k", "v"], ["a"], "first", domain=DOMAIN, **attributes),
        helper.make_node("Add", ["a", "q"], ["b"]),
        helper.make_node(
            "FlashAttention", ["b", "k", "v", "mask"], ["y"], "second", domain=DOMAIN, is_causal=1, **attributes
        ),
    ]
    output = helper.make_tensor_value_info("y", elem_type, ("B", "S", 256))
    graph = helper.make_graph(nodes, "two_nodes", inputs, [output])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


PROFILE = {
    "q": [(1, 1, 256), (2, 64, 256), (8, 512, 256)],
    "k": [(1, 1, 128), (2, 64, 128), (8, 700, 128)],
    "v": [(1, 1, 128), (2, 64, 128), (8, 700, 128)],
    "mask": [(1, 1, 1, 1), (2, 1, 1, 64), (8, 1, 1, 700)],
}


# -- the creator, without any TensorRT


def test_creator_says_who_it_is(creator: int) -> None:
    names = [
        trt_abi.call(creator, slot, ctypes.c_char_p) for slot in (trt_abi.NAME, trt_abi.VERSION, trt_abi.NAMESPACE)
    ]
    assert names == [b"FlashAttention", b"1", b"flashonnx"]


def test_fields_survive_serialization(creator: int) -> None:
    given = {
        "is_causal": 1,
        "q_num_heads": 6,
        "kv_num_heads": 2,
        "scale": 0.1875,
        "softcap": 2.5,
        "left_window_size": 2**31 - 1,
        "right_window_size": 0,
        "softmax_precision": 10,
        "empty_row": "mean",
        "qkv_layout": "separate",
        "inputs": "Q,K,V,past_key,past_value",
        "outputs": "Y,present_key,lse",
    }
    plugin = trt_abi.create_plugin(creator, given)
    assert plugin is not None
    fields = trt_abi.serialized_fields(plugin)
    assert fields == given | {"planned_workspace": -1}
    fields["planned_workspace"] = 2**40 + 1  # as an engine planned on a large profile has it
    restored = trt_abi.create_plugin(creator, fields, trt_abi.RUNTIME_PHASE)
    assert restored is not None
    assert trt_abi.serialized_fields(restored) == fields


def test_absent_fields_stay_absent(creator: int) -> None:
    plugin = trt_abi.create_plugin(creator, {})
    assert plugin is not None
    assert {"scale", "q_num_heads", "kv_num_heads"}.isdisjoint(trt_abi.serialized_fields(plugin))


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_causal": 2},
        {"is_causal": 1.0},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"scale": 1},
        {"q_num_heads": 0},
        {"q_num_heads": -1},
        {"left_window_size": -2},
        {"softcap": -1.0},
        {"softmax_precision": 11},
        {"empty_row": "nan"},
        {"qkv_layout": "hd3"},
        {"qkv_layout": "3hd", "inputs": "Q,K,V"},
        {"inputs": "Q,K"},
        {"inputs": "K,Q,V"},
        {"inputs": "Q,K,V,K"},
        {"inputs": "Q,K,V,"},
        {"inputs": "Q,K,V,bias"},
        {"inputs": "Q,K,V,past_key"},
        {"outputs": "lse"},
        {"outputs": ""},
    ],
    ids=str,
)
def test_creator_refuses(creator: int, wrong: dict[str, Any]) -> None:
    assert trt_abi.create_plugin(creator, wrong) is None


# -- TensorRT-RTX


@rtx
@needs_rtx
def test_every_case_is_parsed(tmp_path: Path, rtx_environment: dict[str, str]) -> None:
    """Types and shapes that TensorRT infers, against the operator's."""
    chosen = [case for case in cases.ALL if not case.gpu]
    models = [prepare_for_tensorrt(one_node(case, case.inputs())) for case in chosen]
    jobs = [{"model": save(model, tmp_path, str(i))} for i, model in enumerate(models)]
    for case, result in zip(chosen, drive(rtx_environment, jobs), strict=True):
        assert result["parsed"], (case.id, result["log"])
        assert result["layers"].count("PLUGIN_V3") == 1, case.id
        expected = {
            name: ["FLOAT" if name == "lse" else _TYPES[case.dtype], list(case.output_shapes()[name])]
            for name in filter(None, asked_for(case))
        }
        inferred = {name: result["tensors"][name] for name in expected}
        assert inferred == expected, case.id


@rtx
@needs_rtx
@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_engine_of_two_nodes(tmp_path: Path, rtx_environment: dict[str, str], dtype: str) -> None:
    model = prepare_for_tensorrt(two_nodes(TensorProto.DataType.Value(dtype)))
    remember = ["planned_workspace", "Q,K,V", "Q,K,V,attn_mask"]
    job = {"model": save(model, tmp_path), "build": True, "shapes": PROFILE, "remember": remember}
    (result,) = drive(rtx_environment, [job])
    assert result["layers"].count("PLUGIN_V3") == 2
    kind = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16"}[dtype]
    assert result["tensors"]["a"] == result["tensors"]["y"] == [kind, [-1, -1, 256]]
    assert result["plan_bytes"], result["log"]
    assert result["remembered"] == remember
    assert not [line for line in result["log"] if "FlashAttention" in line]


_BUILT = ("everything", "layout-3hd-float16", "layout-time_major-float32", "layout-gqa-8-2", "past-bhsd-64",
          "lengths-bfloat16", "mask-float32-float16", "mask-k-bool", "empty-row-0-mean", "no-keys-bshd")  # fmt: skip


@rtx
@needs_rtx
def test_engines_of_cases(tmp_path: Path, rtx_environment: dict[str, str]) -> None:
    """Every kind of input and output goes through the builder, static shapes included."""
    models = [prepare_for_tensorrt(one_node(_BY_ID[i], _BY_ID[i].inputs())) for i in _BUILT]
    jobs = [
        {"model": save(model, tmp_path, str(i)), "build": True, "remember": [attributes_of(node)["inputs"]]}
        for i, model in enumerate(models)
        for node in model.graph.node
        if node.op_type == "FlashAttention"
    ]
    for name, result in zip(_BUILT, drive(rtx_environment, jobs), strict=True):
        assert result["plan_bytes"], (name, result["log"])
        assert result["remembered"], name


def _without_preparation() -> onnx.ModelProto:
    case = Case("holes", lengths=(3, 7))
    return one_node(case, case.inputs())


def _of_shape(**shapes: tuple[int, ...]) -> onnx.ModelProto:
    model = two_nodes()
    for value in model.graph.input:
        if value.name in shapes:
            new = helper.make_tensor_value_info(value.name, TensorProto.FLOAT16, shapes[value.name])
            value.CopyFrom(new)
    del model.graph.value_info[:]
    return prepare_for_tensorrt(model)


def _with_inputs(text: str) -> onnx.ModelProto:
    model = prepare_for_tensorrt(two_nodes())
    (attribute,) = (a for a in model.graph.node[0].attribute if a.name == "inputs")
    attribute.s = text.encode()
    return model


def _with_type(**types: int) -> onnx.ModelProto:
    model = prepare_for_tensorrt(two_nodes())
    for value in model.graph.input:
        if value.name in types:
            value.type.tensor_type.elem_type = types[value.name]
    return model


_UNPARSED = {
    "layout": (lambda: prepare_for_tensorrt(two_nodes(qkv_layout="hd3")), "attribute 'qkv_layout' is expected"),
    "scale": (lambda: prepare_for_tensorrt(two_nodes(scale=1)), "attribute 'scale' is expected to be a float"),
    "count": (lambda: _with_inputs("Q,K,V,sinks"), "4 inputs and 1 outputs are expected by the attributes"),
    "type": (lambda: _with_type(k=TensorProto.FLOAT), "input 'K' is expected to have type Q's type"),
    "rank": (lambda: _of_shape(v=(2, 2, 64, 64)), "input 'V' is expected to have 3 dimensions, got 4"),
    "not prepared": (_without_preparation, "flashonnx.tensorrt.prepare_for_tensorrt writes them"),
}  # fmt: skip


@rtx
@needs_rtx
def test_bad_nodes_are_parser_errors(tmp_path: Path, rtx_environment: dict[str, str]) -> None:
    """A clean refusal with the reason in TensorRT's log, whatever is wrong; the process lives on."""
    jobs = [{"model": save(make(), tmp_path, str(i))} for i, (make, _) in enumerate(_UNPARSED.values())]
    good = {"model": save(prepare_for_tensorrt(two_nodes()), tmp_path, "good")}
    *results, last = drive(rtx_environment, [*jobs, good])
    for (name, (_, reason)), result in zip(_UNPARSED.items(), results, strict=True):
        assert not result["parsed"], name
        assert any(reason in line for line in result["log"]), (name, result["log"])
    assert last["parsed"]


@rtx
@needs_rtx
def test_what_no_kernel_does_is_refused_at_build(tmp_path: Path, rtx_environment: dict[str, str]) -> None:
    case = Case("wide", head_dim=4096)
    job = {"model": save(prepare_for_tensorrt(one_node(case, case.inputs())), tmp_path), "build": True}
    (result,) = drive(rtx_environment, [job])
    assert result["parsed"]
    assert result["plan_bytes"] is None
    assert any("head dimensions up to" in line and "got 4096" in line for line in result["log"]), result["log"]


_REGISTER_TWICE = """
import ctypes, tensorrt_rtx, flashonnx.tensorrt
from flashonnx import library_path
class Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * 508))
library = ctypes.CDLL(library_path())
library.flashonnx_tensorrt_register.restype = Status
def by_c():
    status = library.flashonnx_tensorrt_register()
    assert status.code == 0, status.message
def by_python():
    flashonnx.tensorrt.register()
for step in ({order}):
    step()
creators = tensorrt_rtx.get_plugin_registry().all_creators
print(sum(creator.name == "FlashAttention" for creator in creators))
"""


@rtx
@needs_rtx
@pytest.mark.parametrize("order", ["by_python, by_python", "by_c, by_c", "by_c, by_python", "by_python, by_c"])
def test_registration_happens_once(rtx_environment: dict[str, str], order: str) -> None:
    done = subprocess.run([sys.executable, "-c", _REGISTER_TWICE.format(order=order)],
                          env=rtx_environment, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["1"], done.stderr
    assert "Error" not in done.stderr


@rtx
@needs_rtx
def test_missing_rtx_link_is_said(library_path: str, creator: int) -> None:
    import tensorrt_rtx_libs

    if Path(tensorrt_rtx_libs.__file__).with_name("libtensorrt_rtx.so").exists():
        pytest.skip("this installation of tensorrt_rtx has the link")
    environment = python_environment(library_path)
    environment.pop("LD_LIBRARY_PATH", None)
    code = "import tensorrt_rtx, flashonnx.tensorrt as t; t.register(parser=False); t.register()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "LibraryError: TensorRT-RTX's ONNX parser opens libtensorrt_rtx.so" in done.stderr
    assert "ln -s libtensorrt_rtx.so.1" in done.stderr


def test_no_tensorrt_in_the_process(library_path: str, creator: int) -> None:
    code = (
        "import ctypes, sys\n"
        "class Status(ctypes.Structure): _fields_ = (('code', ctypes.c_int32), ('message', ctypes.c_char * 508))\n"
        "register = ctypes.CDLL(sys.argv[1]).flashonnx_tensorrt_register\n"
        "register.restype = Status\n"
        "print(register().message.decode())"
    )
    done = subprocess.run([sys.executable, "-c", code, library_path], capture_output=True, text=True)
    assert "no TensorRT is loaded in this process" in done.stdout, done.stderr


# -- prepare_for_tensorrt


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}


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
    path = save(two_nodes(), tmp_path)
    assert prepare_for_tensorrt(path) == prepare_for_tensorrt(two_nodes())
