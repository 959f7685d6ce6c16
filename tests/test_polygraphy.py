"""flashonnx in `polygraphy run`: what users type, as docs/polygraphy.md has it, and what they are told."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import flashonnx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parent.parent
DRIVER = Path(__file__).with_name("polygraphy_driver.py")
GROUP = "polygraphy.run.plugins"
SHAPES = ("--input-shapes", "src:[2,20,32]")
BLOCK = re.compile(r"^<!-- not run: (?P<reason>.+?) -->\n```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("polygraphy") is None, reason="no Polygraphy (pip install flashonnx[polygraphy])"
)


def attention(width: int) -> onnx.ModelProto:
    """Self-attention of four heads over src (batch, sequence, width), written out, and a Relu."""
    random = np.random.default_rng(0)
    nodes, weights = [], {"heads": np.array([0, 0, 4, width // 4]), "flat": np.array([0, 0, width])}
    for name, permutation in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        weights[f"w{name}"] = (random.standard_normal((width, width)) / 4).astype(np.float32)
        nodes += [
            helper.make_node("MatMul", ["src", f"w{name}"], [f"{name}_flat"]),
            helper.make_node("Reshape", [f"{name}_flat", "heads"], [f"{name}_heads"]),
            helper.make_node("Transpose", [f"{name}_heads"], [name], perm=permutation),
        ]
    weights["scale"] = np.array((width // 4) ** -0.5, np.float32)
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=-1),
        helper.make_node("MatMul", ["probabilities", "v"], ["attended"]),
        helper.make_node("Transpose", ["attended"], ["joined"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["joined", "flat"], ["attention"]),
        helper.make_node("Relu", ["attention"], ["y"]),
    ]
    shape = ["batch", "sequence", width]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("src", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def with_wrong_scale(fused: onnx.ModelProto) -> onnx.ModelProto:
    """The kernel gets another scale; the function body keeps the right one."""
    wrong = onnx.ModelProto()
    wrong.CopyFrom(fused)
    node = next(node for node in wrong.graph.node if node.op_type == "FlashAttention")
    kept = [attribute for attribute in node.attribute if attribute.name != "scale"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("scale", 3.0)])
    return wrong


def save_models(folder: Path, width: int) -> Path:
    plain = attention(width)
    fused, report = flashonnx.fuse(plain)
    assert report.fused == report.total == 1
    (folder / "elsewhere").mkdir()
    for name, model in (("plain", plain), ("fused", fused), ("wrong", with_wrong_scale(fused))):
        onnx.save(model, folder / f"{name}.onnx")
    onnx.save(
        plain,
        folder / "elsewhere" / "external.onnx",
        save_as_external_data=True,
        location="external.data",
        size_threshold=1024,
    )
    relu = helper.make_graph([plain.graph.node[-1]], "relu", [helper.make_tensor_value_info(
        "attention", TensorProto.FLOAT, ["batch", "sequence", width])], plain.graph.output)  # fmt: skip
    onnx.save(helper.make_model(relu, opset_imports=plain.opset_import, ir_version=10), folder / "relu.onnx")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With plain.onnx, fused.onnx, wrong.onnx, relu.onnx and elsewhere/external.onnx."""
    return save_models(tmp_path_factory.mktemp("models"), 32)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, library_path: str) -> dict[str, str]:
    """Of a process in which Polygraphy finds the extension.

    It looks for entry points of installed packages. For a clone that is not installed, a folder on the path says what
    an installation would, out of pyproject.toml.
    """
    path = list(filter(None, sys.path))
    if "flashonnx" not in metadata.entry_points(group=GROUP).names:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        installed = tmp_path_factory.mktemp("installed")
        described = installed / "flashonnx-0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: flashonnx\nVersion: 0\n")
        lines = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
        (described / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        path.insert(0, str(installed))
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PYTHONPATH": os.pathsep.join(path), "FLASHONNX_LIBRARY": library_path, "PATH": commands}
    return os.environ | variables


def drive(jobs: list[dict[str, Any]], folder: Path, environment: dict[str, str]) -> list[tuple[int, str]]:
    done = subprocess.run([sys.executable, str(DRIVER)], input=json.dumps(jobs), cwd=folder, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [(status, said) for status, said in json.loads(done.stdout)]


ERRORS = {  # what is typed, what else the job says, and what the user is told
    "wrong": (["run", "wrong.onnx", "--flashonnx-onnxrt", "--onnxrt"], {}, "Mismatched outputs: ['y']"),
    "wrong-other": (
        ["run", "plain.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-model", "wrong.onnx"], {},
        "Mismatched outputs: ['y']",
    ),
    "not-fused": (
        ["run", "plain.onnx", "--flashonnx-onnxrt", "--onnxrt"], {},
        "plain.onnx has no flashonnx::FlashAttention node, so there is nothing to test: fuse it",
    ),
    "no-file": (
        ["run", "plain.onnx", "--flashonnx-onnxrt", "--flashonnx-model", "nowhere.onnx"], {},
        "--flashonnx-model: there is no file nowhere.onnx",
    ),
    "no-provider": (
        ["run", "fused.onnx", "--flashonnx-onnxrt", "--flashonnx-providers", "abacus"], {},
        "flashonnx: there is no execution provider 'abacus' here, but ",
    ),
    "no-library": (
        ["run", "fused.onnx", "--flashonnx-onnxrt"], {"library": "/nowhere/libflashonnx.so"},
        "flashonnx: the flashonnx library /nowhere/libflashonnx.so (named by FLASHONNX_LIBRARY) does not exist",
    ),
    "no-onnxruntime": (
        ["run", "fused.onnx", "--flashonnx-onnxrt"], {"missing": "onnxruntime"},
        "flashonnx: flashonnx needs ONNX Runtime 1.28 or newer, and onnxruntime cannot be imported",
    ),
    "no-tensorrt": (
        ["run", "fused.onnx", "--flashonnx-trt"], {"missing": "tensorrt"},
        "flashonnx: tensorrt is not installed, but tensorrt_rtx is: set POLYGRAPHY_USE_TENSORRT_RTX=1 before "
        if importlib.util.find_spec("tensorrt_rtx")
        else "flashonnx: neither tensorrt nor tensorrt_rtx is installed: pip install tensorrt; or pip install ",
    ),
}  # fmt: skip
AGREE = {
    "levels": ["run", "plain.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-model", "fused.onnx",
               "--graph-optimization-level", "ORT_DISABLE_ALL"],
    "inner-outputs": ["run", "plain.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-fuse",
                      "--onnx-outputs", "attention", "y"],
    "weights-in-a-file": ["run", "elsewhere/external.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-fuse"],
    "nothing-to-fuse": ["run", "relu.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-fuse"],
}  # fmt: skip
SCRIPT = ["run", "plain.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-model"]


def documented(words: str) -> list[list[str]]:
    """Commands of docs/polygraphy.md in blocks whose reason has these words, with smaller shapes."""
    text = (ROOT / "docs" / "polygraphy.md").read_text().replace("100,256", "20,32").replace(",256]", ",32]")
    blocks = [match["code"].replace("\\\n", " ") for match in BLOCK.finditer(text) if words in match["reason"]]
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def said(folder: Path, environment: dict[str, str]) -> dict[str, tuple[int, str]]:
    """What came of each command, all run in one process."""
    jobs: dict[str, dict[str, Any]] = {
        f"doc-{i}": {"command": command[1:]} for i, command in enumerate(documented("with models of its own"))
    }
    jobs |= {name: {"command": [*command, *SHAPES]} for name, command in AGREE.items() if name != "nothing-to-fuse"}
    jobs["nothing-to-fuse"] = {"command": [*AGREE["nothing-to-fuse"], "--input-shapes", "attention:[2,20,32]"]}
    jobs |= {name: {"command": [*command, *SHAPES], **more} for name, (command, more, _) in ERRORS.items()}
    for model in ("fused", "wrong"):
        written = f"{model}.py"
        jobs[f"write-{model}"] = {"command": [*SCRIPT, f"{model}.onnx", *SHAPES, "--gen-script", written]}
        jobs[f"script-{model}"] = {"script": written}
    (with_gpu,) = documented("writes the program")
    jobs["write-gpu"] = {"command": [*with_gpu[1:], "--gen-script", "gpu.py"]}
    return dict(zip(jobs, drive(list(jobs.values()), folder, environment), strict=True))


def test_documented_commands(said: dict[str, tuple[int, str]]) -> None:
    results = {name: result for name, result in said.items() if name.startswith("doc-")}
    assert len(results) == 5
    for name, (status, text) in results.items():
        assert status == 0, f"{name}: {text}"
    compared = [text for _, text in results.values() if "Pass Rate: 100.00%" in text]
    assert len(compared) == 4  # one only saves what the next compares with
    assert all("flashonnx-onnxrt" in text for text in compared)


@pytest.mark.parametrize("name", AGREE)
def test_runners_agree(said: dict[str, tuple[int, str]], name: str) -> None:
    status, text = said[name]
    assert status == 0 and "Pass Rate: 100.00%" in text, text
    if name == "inner-outputs":
        assert "All outputs matched | Outputs: ['attention', 'y']" in text and "1 of 1 attentions fused" in text
    if name == "nothing-to-fuse":
        assert re.search(r"\[W\] flashonnx: .*relu.onnx: ", text), text


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_said(said: dict[str, tuple[int, str]], name: str) -> None:
    status, text = said[name]
    assert status == 1 and ERRORS[name][2] in text, text
    assert "Traceback" not in text and "Pass Rate: 100.00%" not in text


def test_generated_scripts(said: dict[str, tuple[int, str]], folder: Path) -> None:
    """They are Python that runs alone, pass where the models agree and fail where they do not."""
    assert [said[f"write-{model}"][0] for model in ("fused", "wrong")] == [0, 0]
    assert "FlashonnxSession(fused_model)" in (folder / "fused.py").read_text()
    assert said["script-fused"][0] == 0 and "Pass Rate: 100.00%" in said["script-fused"][1], said["script-fused"][1]
    assert said["script-wrong"][0] == 99 and "PolygraphyException: FAILED" in said["script-wrong"][1]
    assert said["write-gpu"][0] == 0, said["write-gpu"][1]
    written = (folder / "gpu.py").read_text()
    # The plugin is the outermost loader, so it is there before the parser and before the engine is loaded.
    assert re.search(r"plugin_network = PluginNetwork\(fused_model\)", written)
    assert re.search(r"with_plugin = WithPlugin\(deserialize_engine\)", written)
    assert written.index("OnnxrtRunner(build") < written.index("flashonnx-onnxrt'") < written.index("flashonnx-trt'")


MISSING = {  # POLYGRAPHY_USE_TENSORRT_RTX, what is installed, and what is said
    "rtx there": (
        False,
        "tensorrt_rtx",
        "tensorrt is not installed, but tensorrt_rtx is: set POLYGRAPHY_USE_TENSORRT_",
    ),
    "trt there": (
        True,
        "tensorrt",
        "tensorrt_rtx is not installed, but tensorrt is: unset POLYGRAPHY_USE_TENSORRT_RTX",
    ),
    "neither": (False, "", "neither tensorrt nor tensorrt_rtx is installed: pip install tensorrt; or pip install "),
    "neither, rtx": (True, "", "neither tensorrt_rtx nor tensorrt is installed: pip install tensorrt-rtx; or pip "),
    "broken": (False, "broken", "tensorrt is installed, but cannot be imported: no libnvinfer.so.10; install tensorrt"),
}


@pytest.mark.parametrize("case", MISSING)
def test_no_tensorrt(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What to install, or which switch Polygraphy needs for what is installed."""
    rtx, there, expected = MISSING[case]
    from flashonnx.polygraphy import loaders
    from polygraphy.exception import PolygraphyException

    monkeypatch.setattr(loaders.config, "USE_TENSORRT_RTX", rtx)
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    if there == "broken":
        (tmp_path / "tensorrt.py").write_text("raise ImportError('no libnvinfer.so.10')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "tensorrt")
    elif there:
        (tmp_path / f"{there}.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, there)
    with pytest.raises(PolygraphyException, match=re.escape(expected)):
        loaders.WithPlugin(None)()


def test_nothing_of_polygraphy_is_imported_early() -> None:
    code = "import sys, flashonnx, flashonnx.polygraphy; assert 'polygraphy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True,
                   env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})  # fmt: skip


@pytest.mark.tensorrt
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tier tensorrt: no tensorrt_rtx")
def test_engine_is_built_with_the_plugin(folder: Path, environment: dict[str, str], library_path: str) -> None:
    """In one command with ONNX Runtime; where TensorRT-RTX has no GPU, that is as far as it goes."""
    if not hasattr(ctypes.CDLL(library_path), "getCreators"):
        pytest.skip("tier tensorrt: the library was built without TensorRT's headers")
    (folder / "target.py").write_text(
        "import tensorrt_rtx as trt\n\n\ndef postprocess_config(builder, network, config):\n"
        "    config.num_compute_capabilities = 1\n"
        "    config.set_compute_capability(trt.ComputeCapability.SM89, 0)\n"
    )
    command = ["run", "plain.onnx", "--onnxrt", "--flashonnx-onnxrt", "--flashonnx-trt", "--flashonnx-fuse", *SHAPES,
               "--trt-config-postprocess-script", "target.py", "--save-engine", "model.engine"]  # fmt: skip
    variables = environment | {"POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    ((status, text),) = drive([{"command": command}], folder, variables)
    assert (folder / "model.engine").exists(), text
    assert b"planned_workspace\0" in (folder / "model.engine").read_bytes()  # a field of the plugin's
    assert status == 0 or "Could not deserialize engine" in text, text


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("onnx_graphsurgeon") is None, reason="`polygraphy debug` needs onnx-graphsurgeon"
)
def test_reduction_leaves_the_wrong_node(tmp_path: Path, environment: dict[str, str]) -> None:
    save_models(tmp_path, 32)
    (tmp_path / "wrong.onnx").replace(tmp_path / "fused.onnx")
    (command,) = documented("a model in which one attention has a wrong scale")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [node.op_type for node in onnx.load(tmp_path / "reduced.onnx").graph.node] == ["FlashAttention"]
