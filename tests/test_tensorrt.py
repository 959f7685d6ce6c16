"""The plugin in NVIDIA's own parser and builder (TensorRT-RTX), which need no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import onnx
import pytest
from cases import Case
from flashonnx.tensorrt import prepare_for_tensorrt
from nodes import asked_for, one_node
from onnx import TensorProto, helper
from trt_host import larger
from trt_models import TRANSFORMERS, attributes_of, calls_of_functions, transformer, two_nodes

_DRIVER = Path(__file__).with_name("trt_driver.py")
_BY_ID = {case.id: case for case in cases.ALL}
_CAPABILITIES = ["8.0", "8.9", "12.0"]
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}

pytestmark = [
    pytest.mark.tensorrt,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None,
        reason="tier tensorrt: no tensorrt_rtx (pip install tensorrt-rtx)",
    ),
]


@pytest.fixture(scope="session")
def environment(library_path: str) -> dict[str, str]:
    """Of a Python process with this library; nothing helps TensorRT-RTX to find what its wheel lacks."""
    if not hasattr(ctypes.CDLL(library_path), "getCreators"):
        pytest.skip("tier tensorrt: the library was built without TensorRT's headers")
    path = os.pathsep.join(filter(None, sys.path))
    variables = os.environ | {"PYTHONPATH": path, "FLASHONNX_LIBRARY": library_path}
    variables.pop("LD_LIBRARY_PATH", None)
    return variables


def drive(environment: dict[str, str], jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The driver's results, one for each job; fails if TensorRT took the process down."""
    done = subprocess.run(
        [sys.executable, str(_DRIVER)], input=json.dumps(jobs), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(line.startswith("{") for line in done.stdout.splitlines()), done.stdout  # it is the caller's
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


def test_every_case_is_parsed(tmp_path: Path, environment: dict[str, str]) -> None:
    """Types and shapes that TensorRT infers, against the operator's."""
    chosen = [case for case in cases.ALL if not case.gpu]
    models = [prepare_for_tensorrt(one_node(case, case.inputs())) for case in chosen]
    jobs = [{"model": save(model, tmp_path, str(i))} for i, model in enumerate(models)]
    for case, result in zip(chosen, drive(environment, jobs), strict=True):
        assert result["parsed"], (case.id, result["log"])
        assert result["layers"].count("PLUGIN_V3") == 1, case.id
        expected = {
            name: ["FLOAT" if name == "lse" else _TYPES[case.dtype], list(case.output_shapes()[name])]
            for name in filter(None, asked_for(case))
        }
        inferred = {name: result["tensors"][name] for name in expected}
        assert inferred == expected, case.id


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_two_nodes(tmp_path: Path, environment: dict[str, str], dtype: str) -> None:
    path = save(prepare_for_tensorrt(two_nodes(TensorProto.DataType.Value(dtype))), tmp_path)
    remember = ["planned_workspace", "Q,K,V", "Q,K,V,attn_mask"]
    engine = {"profiles": PROFILE, "compute_capabilities": ["8.0"]}
    parsed, built = drive(environment, [{"model": path}, {"model": path, "engine": engine, "remember": remember}])
    assert parsed["layers"].count("PLUGIN_V3") == 2
    kind = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16"}[dtype]
    assert parsed["tensors"]["a"] == parsed["tensors"]["y"] == [kind, [-1, -1, 256]]
    assert not [line for line in parsed["log"] if "FlashAttention" in line]
    assert "error" not in built, built
    assert built["remembered"] == remember


def test_devices_and_the_library_inside(tmp_path: Path, environment: dict[str, str], library_path: str) -> None:
    """An engine for several GPUs and profiles, not prepared; with the library in it, it is larger by that."""
    path = save(two_nodes(), tmp_path)
    narrow = {name: [shapes[0], shapes[0], shapes[1]] for name, shapes in PROFILE.items()}
    engine = {"profiles": [narrow, PROFILE], "compute_capabilities": _CAPABILITIES, "progress": True}
    symbol = ["flashonnx_tensorrt_register"]
    jobs = [
        {"model": path, "engine": engine | {"embed_plugin": inside}, "remember": symbol} for inside in (False, True)
    ]
    without, within = drive(environment, jobs)
    assert without["remembered"] == []
    assert within["remembered"] == symbol
    assert within["plan_bytes"] - without["plan_bytes"] >= Path(library_path).stat().st_size


def test_provider_form_is_parsed(tmp_path: Path, environment: dict[str, str]) -> None:
    """As ONNX Runtime's TensorRT provider gives it to the parser."""
    model = prepare_for_tensorrt(two_nodes(), onnxruntime=True)
    assert {node.domain for node in model.graph.node if node.op_type == "FlashAttention"} == {"trt.plugins"}
    (result,) = drive(environment, [{"model": save(model, tmp_path)}])
    assert result["layers"].count("PLUGIN_V3") == 2, result["log"]


def test_functions_are_parsed(tmp_path: Path, environment: dict[str, str]) -> None:
    """Those with masks as part of the graph, one without as the function it is."""
    (result,) = drive(environment, [{"model": save(prepare_for_tensorrt(calls_of_functions()), tmp_path)}])
    assert result["layers"].count("PLUGIN_V3") == 3, result["log"]


_BUILT = ("everything", "layout-3hd-float16", "layout-time_major-float32", "layout-gqa-8-2", "past-bhsd-64",
          "lengths-bfloat16", "mask-float32-float16", "mask-k-bool", "empty-row-0-mean", "no-keys-bshd",
          "no-batch-bhsd")  # fmt: skip


_FORMS = ("static", "dynamic", "library inside")


@pytest.mark.parametrize(
    ("form", "ids"),
    [
        *(pytest.param(form, _BUILT, id=f"some-{form}") for form in ("static", "library inside")),
        *(pytest.param(form, tuple(_BY_ID), id=f"all-{form}", marks=pytest.mark.slow) for form in _FORMS),
    ],
)
def test_engines_of_cases(tmp_path: Path, environment: dict[str, str], form: str, ids: tuple[str, ...]) -> None:
    """Every kind of input and output goes through the builder for several GPUs.

    But for "static" every size is open, and the profile's bounds are the case's shapes and larger ones.
    """
    jobs = []
    chosen = [_BY_ID[i] for i in ids if not _BY_ID[i].gpu]
    for i, case in enumerate(chosen):
        least, most = case.inputs(), larger(case).inputs()
        model = prepare_for_tensorrt(one_node(case, least, dynamic=form != "static"))
        (node,) = (node for node in model.graph.node if node.op_type == "FlashAttention")
        remember = [
            attributes_of(node)["inputs"],
            *(["flashonnx_tensorrt_register"] if form == "library inside" else []),
        ]
        engine: dict[str, Any] = {"compute_capabilities": _CAPABILITIES, "embed_plugin": form == "library inside"}
        if form != "static":
            bounds = zip(model.graph.input, least.values(), most.values(), strict=True)
            engine["profiles"] = {value.name: [a.shape, a.shape, b.shape] for value, a, b in bounds}
        jobs.append({"model": save(model, tmp_path, str(i)), "engine": engine, "remember": remember})
    for case, job, result in zip(chosen, jobs, drive(environment, jobs), strict=True):
        assert "error" not in result, (case.id, result)
        assert result["remembered"] == job["remember"], case.id


_DTYPES = ("float32", "float16", "bfloat16")
_SLOW = [(name, dtype) for name in TRANSFORMERS for dtype in _DTYPES if (name, dtype) != ("minilm", "float16")]
_TRANSFORMERS = [("minilm", "float16"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _SLOW)]


@pytest.mark.parametrize(("name", "dtype"), _TRANSFORMERS)
def test_transformers(tmp_path: Path, environment: dict[str, str], name: str, dtype: str) -> None:
    """Exported and fused, every attention is the plugin's, and it is built for several GPUs with dynamic shapes."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = transformer(name, dtype)
    sizes = (1, 2, 8) if name == "vit" else (1, 16, 64)
    profile = {
        value.name: [
            [dim.dim_value if dim.HasField("dim_value") else size for dim in value.type.tensor_type.shape.dim]
            for size in sizes
        ]
        for value in model.graph.input
    }
    engine = {"profiles": profile, "compute_capabilities": _CAPABILITIES}
    prepared, fused = (save(m, tmp_path, n) for n, m in (("prepared", prepare_for_tensorrt(model)), ("fused", model)))
    jobs = [{"model": prepared}, *({"model": fused, "engine": engine | {"embed_plugin": e}} for e in (False, True))]
    parsed, without, within = drive(environment, jobs)
    assert parsed["layers"].count("PLUGIN_V3") == 2, parsed["log"]
    assert not {"SOFTMAX", "ATTENTION_INPUT"} & set(parsed["layers"])
    assert without["plan_bytes"] < within["plan_bytes"]


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
    "a boolean mask not prepared": (two_nodes, "flashonnx.tensorrt.prepare_for_tensorrt writes them"),
}  # fmt: skip


def test_bad_nodes_are_parser_errors(tmp_path: Path, environment: dict[str, str]) -> None:
    """A clean refusal with the reason in TensorRT's log, whatever is wrong; the process lives on."""
    jobs = [{"model": save(make(), tmp_path, str(i))} for i, (make, _) in enumerate(_UNPARSED.values())]
    good = {"model": save(prepare_for_tensorrt(two_nodes()), tmp_path, "good")}
    *results, last = drive(environment, [*jobs, good])
    for (name, (_, reason)), result in zip(_UNPARSED.items(), results, strict=True):
        assert not result["parsed"], name
        assert any(reason in line for line in result["log"]), (name, result["log"])
    assert last["parsed"]


_UNBUILT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "head size": (lambda: _wide(), {}, "EngineError: .*FlashAttention: .*head dimensions up to .* got 4096"),
    "layout": (lambda: two_nodes(qkv_layout="hd3"), {"profiles": PROFILE}, "EngineError: .*'qkv_layout' is expected"),
    "attribute": (lambda: two_nodes(is_causal=2), {"profiles": PROFILE}, "EngineError: .*'is_causal' is expected"),
    "precision": (lambda: two_nodes(softmax_precision=11), {"profiles": PROFILE}, "EngineError: .*got 11 .double."),
    "type": (lambda: _with_type(k=TensorProto.FLOAT), {"profiles": PROFILE}, "EngineError: .*'K' is expected to have"),
    "type of all": (
        lambda: _with_type(q=TensorProto.INT32), {"profiles": PROFILE}, "EngineError: .*'Q' is expected to have"
    ),
    "type of a mask": (
        lambda: two_nodes(mask_type=TensorProto.INT64), {"profiles": PROFILE}, "EngineError: .*'attn_mask' is expected"
    ),
    "not ours": (
        lambda: _of_shape(v=(2, 2, 64, 64), k=(3, 3)), {"profiles": {"q": PROFILE["q"]}}, "'mask' has the dynamic shape"
    ),
    "no profile": (two_nodes, {}, r"ValueError: input 'q' has the dynamic shape \(B, S, 256\): give"),
    "profile of nothing": (two_nodes, {"profiles": {"x": []}}, "ValueError: profile: the model has no input 'x'"),
    "profile of two": (
        two_nodes, {"profiles": {"q": PROFILE["q"][:2]}}, "ValueError: .*'q' is expected to have three shapes"
    ),
    "capability": (two_nodes, {"profiles": PROFILE, "compute_capabilities": ["80"]}, 'expected texts such as "8.0"'),
    "no such GPU": (two_nodes, {"profiles": PROFILE, "compute_capabilities": ["9.0"]}, "EngineError: .*9.0"),
}  # fmt: skip


def _wide() -> onnx.ModelProto:
    case = Case("wide", head_dim=4096)
    return one_node(case, case.inputs())


def test_build_engine_says_why_not(tmp_path: Path, environment: dict[str, str]) -> None:
    jobs = [
        {"model": save(make(), tmp_path, str(i)), "engine": {"compute_capabilities": ["8.0"]} | engine}
        for i, (make, engine, _) in enumerate(_UNBUILT.values())
    ]
    for (name, (_, _, reason)), result in zip(_UNBUILT.items(), drive(environment, jobs), strict=True):
        assert "error" in result, name
        assert re.search(reason, result["error"], re.DOTALL), (name, result)
        if "FlashAttention: " in result["error"]:  # the plugin's own words stand in TensorRT's log too
            said = result["error"].partition("FlashAttention: ")[2]
            assert any(said in line for line in result["log"]), (name, result)


_REGISTER = """
import ctypes, sys, flashonnx, tensorrt_rtx, flashonnx.tensorrt
class Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * 508))
library = ctypes.CDLL(flashonnx.library_path())
library.flashonnx_tensorrt_register.restype = Status
def by_c():
    status = library.flashonnx_tensorrt_register()
    assert status.code == 0, status.message
def by_python():
    flashonnx.tensorrt.register()
def by_opening():
    ctypes.CDLL(flashonnx.tensorrt.autoload_path())
def session():
    assert flashonnx.session(sys.argv[1], ["CPUExecutionProvider"])  # which closes the library at once
for step in ({order}):
    step()
creators = tensorrt_rtx.get_plugin_registry().all_creators
print(sum(creator.name == "FlashAttention" for creator in creators))
"""


@pytest.mark.parametrize(
    "order",
    ["by_python, by_python", "by_c, by_c", "by_c, by_python", "by_python, by_c", "by_opening, by_python",
     "by_python, by_opening", "session, by_python, session", "session, by_opening, session"],
)  # fmt: skip
def test_registration_happens_once(tmp_path: Path, environment: dict[str, str], order: str) -> None:
    """TensorRT refuses a library that has a plugin it knows; ONNX Runtime closes one that TensorRT still needs."""
    case = Case("small")
    model = save(one_node(case, case.inputs()), tmp_path)
    done = subprocess.run([sys.executable, "-c", _REGISTER.format(order=order), model],
                          env=environment, capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["1"], done.stderr
    assert "Error" not in done.stderr


def test_what_the_wheel_lacks(tmp_path: Path, environment: dict[str, str], library_path: str) -> None:
    """Where flashonnx's own stand-in is missing too, the message says what to do before the parser aborts."""
    import tensorrt_rtx_libs

    if Path(tensorrt_rtx_libs.__file__).with_name("libtensorrt_rtx.so").exists():
        pytest.skip("this installation of tensorrt_rtx has the link")
    alone = shutil.copy(library_path, tmp_path)
    code = "import tensorrt_rtx, flashonnx.tensorrt as t; t.register(parser=False); t.register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=environment | {"FLASHONNX_LIBRARY": alone})  # fmt: skip
    assert "LibraryError: TensorRT-RTX's ONNX parser opens libtensorrt_rtx.so" in done.stderr
    assert "ln -s libtensorrt_rtx.so.1" in done.stderr


def test_polygraphy_opens_autoload(tmp_path: Path, environment: dict[str, str], library_path: str) -> None:
    """`polygraphy convert --plugins` does no more than that, which is enough for TensorRT-RTX's wheel too."""
    pytest.importorskip("polygraphy")
    model, plan = save(prepare_for_tensorrt(two_nodes()), tmp_path), tmp_path / "model.engine"
    shapes = [f"{name}:[{','.join(map(str, shape))}]" for name, shape in ((n, s[1]) for n, s in PROFILE.items())]
    sizes = [word for bound in ("min", "opt", "max") for word in (f"--trt-{bound}-shapes", *shapes)]
    autoload = str(Path(library_path).with_name("libflashonnx_trt_autoload.so"))
    program = str(Path(sys.executable).with_name("polygraphy"))
    command = [program, "convert", model, "-o", str(plan), "--plugins", autoload, *sizes]
    done = subprocess.run([*command, "--compute-capabilities", "8.0"], capture_output=True, text=True,
                          env=environment | {"POLYGRAPHY_USE_TENSORRT_RTX": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert b"planned_workspace\0" in plan.read_bytes()


@pytest.mark.slow
def test_python_sample(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("torch")
    sample = Path(__file__).parent.parent / "samples" / "tensorrt_python" / "encoder.py"
    command = [sys.executable, str(sample), "--folder", str(tmp_path), "--compute-capability", "12.0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    # On a GPU that TensorRT-RTX does not know the engine is built, and refused.
    assert done.returncode == 0 or "cannot load the engine on this machine" in done.stderr, done.stderr[-4000:]
    assert (tmp_path / "encoder.engine").stat().st_size > 0
