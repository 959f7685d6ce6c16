"""The samples run, as their READMEs say; each checks its own answers and fails if they are wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import flashonnx
import onnx
import pytest

SAMPLES = Path(__file__).parent.parent / "samples"
NEEDS = {
    "bert_padding": ("torch", "transformers"),
    "diffusion": ("torch", "diffusers"),
    "hand_written": ("torch",),
    "vit": ("torch", "transformers"),
    "whisper": ("torch", "transformers"),
}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Its result, run in that folder with the modules of this Python."""
    modules = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(modules)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def require(*modules: str) -> None:
    missing = [name for name in (*modules, "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"samples: {', '.join(missing)} not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_sample(name: str, tmp_path: Path, library_path: str) -> None:
    require(*NEEDS[name])
    run([sys.executable, str(SAMPLES / name / "run.py")], tmp_path)


def attention() -> onnx.ModelProto:
    """Standard attention over (batch, sequence, 32), of two heads, fused: x is query, key and value."""
    shape = ("batch", "sequence", 32)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy")
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    node = onnx.helper.make_node("Attention", ["x", "x", "x"], ["y"], is_causal=1, **heads)
    graph = onnx.helper.make_graph([node], "attention", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 23)]
    fused, report = flashonnx.fuse(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert report.fused == 1
    return fused


@pytest.mark.slow
def test_cpp_onnxruntime(tmp_path: Path, library_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README compiles it; the log shows that the kernel ran in the one session and not in the other."""
    require()
    headers = SAMPLES.parent / "build" / "headers" / "onnxruntime"
    if shutil.which("g++") is None or not headers.is_dir():
        pytest.skip("samples: no g++ or no build/headers/onnxruntime")
    ort = Path(importlib.util.find_spec("onnxruntime").submodule_search_locations[0]) / "capi"
    (shared,) = ort.glob("libonnxruntime.so.*")
    onnx.save(attention(), tmp_path / "fused.onnx")
    source = SAMPLES / "cpp_onnxruntime" / "main.cpp"
    warnings = ("-std=c++17", "-O1", "-Wall", "-Werror")
    (tmp_path / "libonnxruntime.so.1").symlink_to(shared)
    files = ["-isystem", str(headers), str(source), "libonnxruntime.so.1", "-o", "main"]
    run(["g++", *warnings, *files, "-Wl,-rpath,$ORIGIN"], tmp_path)
    monkeypatch.setenv("FLASHONNX_LOG", "1")
    done = run(["./main", "fused.onnx", library_path], tmp_path)
    assert "8192 numbers" in done.stdout
    assert done.stderr.count("flashonnx: cpu for B16 Hq2") == 1
