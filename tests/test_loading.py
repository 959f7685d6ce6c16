"""Loading: registration, unsuitable libraries and runtimes, the end of a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases
import flashonnx
import onnx
import pytest
from flashonnx._library import LibraryError
from nodes import DOMAIN, one_node

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("library_path")


@pytest.fixture
def model() -> onnx.ModelProto:
    case = cases.Case("model", lse=False)
    return one_node(case, case.inputs())


def test_register_twice(library_path: str, model: onnx.ModelProto) -> None:
    """Ours is idempotent; ONNX Runtime's own, called besides, fails with a text that we explain."""
    options = ort.SessionOptions()
    flashonnx.register(options)
    flashonnx.register(options)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    options.register_custom_ops_library(library_path)
    with pytest.raises(LibraryError, match=r"registered twice.*call only one of them"):
        flashonnx.session(model, ["CPUExecutionProvider"], options)


def test_old_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    with pytest.raises(LibraryError, match=r"needs ONNX Runtime 1\.28 or newer, found 1\.23\.2: pip install"):
        flashonnx.register(ort.SessionOptions())


def test_without_registration(model: onnx.ModelProto) -> None:
    with pytest.raises(Exception, match=f"{DOMAIN}:FlashAttention"):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["missing", "text", "directory", "other cpu", "other library"])
def test_wrong_library(kind: str, library_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error that names the file and says what to do (onnxruntime#8730)."""
    path = tmp_path / "libflashonnx.so"
    if kind == "text":
        path.write_text("not a library")
    elif kind == "directory":
        path.mkdir()
    elif kind == "other cpu":
        content = bytearray(Path(library_path).read_bytes())
        content[18:20] = (243).to_bytes(2, "little")  # e_machine: RISC-V
        path.write_bytes(content)
    elif kind == "other library":
        source = tmp_path / "other.c"
        source.write_text("int other(void) { return 0; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(path))
    said = {
        "missing": "does not exist",
        "text": "is not a shared library",
        "directory": "is a directory",
        "other cpu": r"is built for another CPU: riscv64",
        "other library": "RegisterCustomOps",
    }
    with pytest.raises(LibraryError, match=said[kind]) as error:
        flashonnx.register(ort.SessionOptions())
    assert str(path) in str(error.value)


def test_exit_with_an_open_session(library_path: str, tmp_path: Path, model: onnx.ModelProto) -> None:
    """A program that ends without closing anything ends well."""
    onnx.save(model, tmp_path / "model.onnx")
    program = f"""
import flashonnx, numpy as np
session = flashonnx.session({str(tmp_path / "model.onnx")!r}, ["CPUExecutionProvider"])
print(session.run(None, {{x.name: np.zeros(x.shape, "f4") for x in session.get_inputs()}})[0].shape)
"""
    environment = os.environ | {"FLASHONNX_LIBRARY": library_path}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "(2, 5, 64)\n"), done.stderr
