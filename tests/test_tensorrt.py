"""The plugin in NVIDIA's own parser and builder (TensorRT-RTX), which need no GPU."""

from __future__ import annotations

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
from nodes import asked_for, one_node
from onnx import TensorProto, helper
from trt_models import attributes_of, two_nodes

_DRIVER = Path(__file__).with_name("trt_driver.py")
_BY_ID = {case.id: case for case in cases.ALL}
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}

pytestmark = [
    pytest.mark.tensorrt,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None,
        reason="tier tensorrt: no tensorrt_rtx (pip install tensorrt-rtx)",
    ),
]


@pytest.fixture(scope="session")
def creator(library_path: str) -> int:
    return trt_abi.only_creator(library_path)


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


PROFILE = {
    "q": [(1, 1, 256), (2, 64, 256), (8, 512, 256)],
    "k": [(1, 1, 128), (2, 64, 128), (8, 700, 128)],
    "v": [(1, 1, 128), (2, 64, 128), (8, 700, 128)],
    "mask": [(1, 1, 1, 1), (2, 1, 1, 64), (8, 1, 1, 700)],
}


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


def test_bad_nodes_are_parser_errors(tmp_path: Path, rtx_environment: dict[str, str]) -> None:
    """A clean refusal with the reason in TensorRT's log, whatever is wrong; the process lives on."""
    jobs = [{"model": save(make(), tmp_path, str(i))} for i, (make, _) in enumerate(_UNPARSED.values())]
    good = {"model": save(prepare_for_tensorrt(two_nodes()), tmp_path, "good")}
    *results, last = drive(rtx_environment, [*jobs, good])
    for (name, (_, reason)), result in zip(_UNPARSED.items(), results, strict=True):
        assert not result["parsed"], name
        assert any(reason in line for line in result["log"]), (name, result["log"])
    assert last["parsed"]


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


@pytest.mark.parametrize("order", ["by_python, by_python", "by_c, by_c", "by_c, by_python", "by_python, by_c"])
def test_registration_happens_once(rtx_environment: dict[str, str], order: str) -> None:
    done = subprocess.run([sys.executable, "-c", _REGISTER_TWICE.format(order=order)],
                          env=rtx_environment, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["1"], done.stderr
    assert "Error" not in done.stderr


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
