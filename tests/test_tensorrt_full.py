"""Full TensorRT on a GPU: engines that run, and the programs of its release.

None of this has been run where flashonnx was developed; docs/tensorrt.md says what was. TENSORRT_ROOT names the folder
of a release from NVIDIA (bin/trtexec, include/, lib/), for programs that are not on PATH.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import cases
import nodes
import numpy as np
import onnx
import pytest
from flashonnx.tensorrt import autoload_path, build_engine, polygraphy_runner, prepare_for_tensorrt, runner
from seam import check_outputs
from trt_models import two_nodes

_ROOT = Path(__file__).parent.parent
_RELEASE = os.environ.get("TENSORRT_ROOT", "")
_TRTEXEC = shutil.which("trtexec", path=os.pathsep.join((os.environ["PATH"], str(Path(_RELEASE, "bin")))))
_BY_ID = {case.id: case for case in cases.ALL}
_SHAPES = {
    "q": ((1, 1, 256), (2, 64, 256), (8, 512, 256)),
    "k": ((1, 1, 128), (2, 64, 128), (8, 700, 128)),
    "v": ((1, 1, 128), (2, 64, 128), (8, 700, 128)),
    "mask": ((1, 1, 1, 1), (2, 1, 1, 64), (8, 1, 1, 700)),
}

pytestmark = pytest.mark.gpu
with_package = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is None,
    reason="full TensorRT: not installed (pip install tensorrt); TensorRT-RTX does not run on every GPU",
)
with_trtexec = pytest.mark.skipif(
    _TRTEXEC is None, reason="full TensorRT: no trtexec (on PATH, or in TENSORRT_ROOT's bin)"
)


@with_package
@pytest.mark.parametrize("embed_plugin", [False, True])
def test_engine_of_two_nodes(tmp_path: Path, embed_plugin: bool) -> None:
    """Built, run with and without graphs, and by Polygraphy, against the reference."""
    import tensorrt
    from flashonnx.reference import attention

    path = tmp_path / "engine"
    path.write_bytes(build_engine(two_nodes(), _SHAPES, tensorrt=tensorrt, embed_plugin=embed_plugin))
    random = np.random.default_rng(0)
    for batch, queries, keys in ((1, 1, 1), (3, 50, 33), (8, 512, 700)):
        shapes = {"q": (batch, queries, 256), "k": (batch, keys, 128), "v": (batch, keys, 128)}
        feed = {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
        feed["mask"] = random.random((batch, 1, 1, keys)) < 0.8
        heads = {"q_num_heads": 4, "kv_num_heads": 2}
        first = attention(feed["q"], feed["k"], feed["v"], **heads)[0]
        expected = attention(
            (first.astype(np.float16) + feed["q"]), feed["k"], feed["v"], feed["mask"], is_causal=1, **heads
        )[0]
        for cuda_graphs in (False, True):
            with runner(path, tensorrt=tensorrt, cuda_graphs=cuda_graphs, allow_code=embed_plugin) as run:
                for _ in range(2):
                    np.testing.assert_allclose(run(feed)["y"], expected, atol=4e-3)
        if not embed_plugin:
            with polygraphy_runner(path, tensorrt=tensorrt) as compared:
                np.testing.assert_allclose(compared.infer(feed)["y"], expected, atol=4e-3)


@with_package
@pytest.mark.parametrize(
    "name",
    ["everything", "layout-3hd-float16", "layout-time_major-float32", "layout-gqa-8-2", "past-bhsd-64",
     "lengths-bfloat16", "mask-float32-float16", "mask-k-bool", "empty-row-0-mean", "no-keys-bshd",
     "llama-decode-float16"],
)  # fmt: skip
def test_engine_of_case(name: str) -> None:
    import tensorrt

    case = _BY_ID[name]
    inputs = case.inputs()
    model = nodes.one_node(case, inputs)
    with runner(build_engine(model, tensorrt=tensorrt), tensorrt=tensorrt) as run:
        session = SimpleNamespace(run=lambda _, feeds: [run(feeds)[value.name] for value in model.graph.output])
        check_outputs(case, inputs, nodes.run(session, case, inputs))


@with_trtexec
@pytest.mark.parametrize("way", ["dynamicPlugins", "staticPlugins", "setPluginsToSerialize"])
def test_trtexec(tmp_path: Path, library_path: str, way: str) -> None:
    """The commands of docs/tensorrt.md."""
    model, plan = tmp_path / "prepared.onnx", tmp_path / "model.engine"
    onnx.save(prepare_for_tensorrt(two_nodes()), model)
    plugin = f"--staticPlugins={autoload_path()}" if way == "staticPlugins" else f"--dynamicPlugins={library_path}"
    inside = [f"--setPluginsToSerialize={library_path}"] if way == "setPluginsToSerialize" else []
    sizes = [
        f"--{bound}Shapes=" + ",".join(f"{name}:{'x'.join(map(str, shapes[i]))}" for name, shapes in _SHAPES.items())
        for i, bound in enumerate(("min", "opt", "max"))
    ]
    _succeeds([str(_TRTEXEC), f"--onnx={model}", plugin, *inside, *sizes, "--stronglyTyped", f"--saveEngine={plan}"])
    if not inside:  # which would be refused beside the library itself
        shapes = sizes[1].replace("--optShapes", "--shapes")
        _succeeds([str(_TRTEXEC), f"--loadEngine={plan}", plugin, shapes])


@with_package
@pytest.mark.skipif(not _RELEASE, reason="full TensorRT: TENSORRT_ROOT names no release to link with")
def test_cpp_sample(tmp_path: Path, library_path: str) -> None:
    import tensorrt

    plan = tmp_path / "model.engine"
    plan.write_bytes(build_engine(two_nodes(), _SHAPES, tensorrt=tensorrt))
    folder = str(tmp_path / "build")
    _succeeds(["cmake", "-S", str(_ROOT / "samples/tensorrt_cpp"), "-B", folder, f"-DTENSORRT_ROOT={_RELEASE}"])
    _succeeds(["cmake", "--build", folder])
    _succeeds(
        [f"{folder}/run_engine", library_path, str(plan), "q=3x50x256", "k=3x33x128", "v=3x33x128", "mask=3x1x1x33"]
    )


def test_onnxruntimes_provider(tmp_path: Path) -> None:
    """The sample, which compares with the CUDA provider."""
    onnxruntime = pytest.importorskip("onnxruntime")
    if "TensorrtExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("full TensorRT: this ONNX Runtime has no TensorRT provider")
    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        pytest.skip("full TensorRT: no libnvinfer.so.10 for ONNX Runtime's provider")
    model = tmp_path / "fused.onnx"
    onnx.save(two_nodes(), model)
    sample = str(_ROOT / "samples/onnxruntime_tensorrt/run.py")
    shapes = [
        word for name, bounds in _SHAPES.items() for word in ("--shape", f"{name}={'x'.join(map(str, bounds[1]))}")
    ]
    said = _succeeds([sys.executable, sample, str(model), *shapes])
    assert float(said.rpartition("largest difference ")[2]) < 4e-3


def _succeeds(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
