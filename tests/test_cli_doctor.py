"""`flashonnx doctor`: what it finds here, and what it says of machines on which something is wrong."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import flashonnx
import numpy as np
import pytest
from cli_driver import Command, flashonnx_command
from flashonnx.cli import _checks
from flashonnx.reference import attention

onnxruntime = pytest.importorskip("onnxruntime")
__all__ = ["flashonnx_command"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the slow ones, which start processes."""
    kept = {name: check for name, check in _checks.every().items() if not name.startswith("TensorRT")}
    monkeypatch.setattr(_checks, "every", lambda: kept)


def state(done: Any) -> dict[str, str]:
    return {check["name"]: check["state"] for check in done["checks"]}


def test_this_machine(few: None, flashonnx_command: Command) -> None:
    done = flashonnx_command.json("doctor")
    found = state(done)
    assert done["ok"] and {found[name] for name in ("library", "kernels", "ONNX Runtime", "ONNX Runtime CPU")} == {"ok"}
    text = {check["name"]: check["found"] for check in done["checks"]}
    assert flashonnx.library_path() in text["library"] and "cpu (float32, float16, bfloat16)" in text["kernels"]
    assert onnxruntime.__version__ in text["ONNX Runtime"]
    said = flashonnx_command("doctor")
    assert "Nothing is wrong here." in said and "✓ library" in said


def test_a_missing_and_a_foreign_library(
    few: None, flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path / "missing.so"))
    done = flashonnx_command.json("doctor", code=1)
    checks = {check["name"]: check for check in done["checks"]}
    assert not done["ok"] and checks["library"]["state"] == "wrong"
    assert "does not exist" in checks["library"]["found"] and "unset it" in checks["library"]["todo"]
    for name in ("device", "kernels", "ONNX Runtime CPU"):
        assert checks[name]["state"] == "absent" and checks[name]["found"] == "not tried, as there is no library"
    for name in ("TensorRT", "TensorRT-RTX"):
        check = _checks._tensorrt(name, "json" if name == "TensorRT" else "surely_not_installed")
        assert "plugin" not in check.found and not check.todo, "the library is what is missing, not its plugin"
    foreign = next(Path(onnxruntime.__file__).parent.glob("capi/*.so*"))
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(foreign))
    said = flashonnx_command("doctor", code=1)
    assert "a shared library, but not flashonnx's" in said
    said = " ".join(said.split())
    assert "1 to mend: library first library: install a wheel that was made for this machine" in said


def test_no_and_old_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", types.SimpleNamespace(__version__="1.20.1"))
    check = _checks.onnxruntime()
    assert check.state == "wrong" and "found 1.20.1" in check.found and "pip install" in check.todo
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "cannot be imported" in _checks.onnxruntime().found


def test_two_packages_over_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one folder they overwrite each other's files; in two, one of them is simply not seen."""
    here = Path(onnxruntime.__file__).parent.parent
    folders = {"onnxruntime": here, "onnxruntime-gpu": here}

    def distribution(name: str) -> Any:
        if name not in folders:
            raise _checks.metadata.PackageNotFoundError
        return types.SimpleNamespace(locate_file=lambda _: folders[name])

    monkeypatch.setattr(_checks.metadata, "distribution", distribution)
    check = _checks.onnxruntime()
    assert check.state == "warning" and "onnxruntime and onnxruntime-gpu overwrite each other" in check.todo
    folders["onnxruntime-gpu"] = tmp_path
    assert _checks.onnxruntime().state == "ok"


def test_a_session_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "_truth", lambda *x: np.ones((1, 33, 64)))
    check = _checks._session("ONNX Runtime CPU", "CPUExecutionProvider")
    assert check.state == "wrong" and "off by" in check.found


def test_its_truth_is_that_of_the_reference() -> None:
    x = np.random.default_rng(1).standard_normal((3, 1, 33, 64)).astype(np.float32)
    q, k, v = (part.astype(np.float64).reshape(1, 33, 4, 16).swapaxes(1, 2) for part in x)
    expected = attention(q, k, v, is_causal=True)[0].swapaxes(1, 2).reshape(1, 33, 64)
    np.testing.assert_allclose(_checks._truth(*x), expected, atol=1e-12)


@pytest.mark.parametrize(("version", "expected"), [("580.65.06", "ok"), ("570.1", "warning"), ("", "ok")])
def test_drivers(version: str, expected: str) -> None:
    check = _checks._judged(version, "CUDA 13.0", "")
    assert check.state == expected and ("580" in check.todo) == (expected == "warning")


def test_old_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "_version", lambda name: {"torch": "2.5.0"}.get(name))
    old = _checks._optional("PyTorch", "torch", (2, 9), "to export models")
    assert old.state == "warning" and old.todo == "pip install 'torch>=2.9'"
    assert _checks._optional("Polygraphy", "polygraphy", (0, 53), "to compare", "polygraphy").state == "absent"
    assert _checks.packages().state in ("wrong", "warning")


@pytest.mark.parametrize("gpus", [[], ["NVIDIA H200, 140 GiB"]])
@pytest.mark.parametrize("driver", [False, True])
def test_a_library_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: list[str], driver: bool) -> None:
    """Nothing to do on a machine without a GPU; with one, how to have kernels for it, not another ONNX Runtime."""

    def device(library: Any, kind: int, ordinal: int = -1) -> Any:
        raise NotImplementedError(f"flashonnx_device_query: device {ordinal}: no CUDA kernels")

    monkeypatch.setattr("flashonnx._capi.Library.device", device)
    monkeypatch.setattr(_checks, "device_names", lambda: gpus)
    monkeypatch.setattr(_checks, "_KERNEL_MODULE", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n")
    check = _checks.device()
    assert check.state == ("warning" if gpus else "absent")
    assert "no CUDA kernels in this build" in check.found and all(gpu in check.found for gpu in gpus)
    assert ("FLASHONNX_CUDA=ON" in check.todo) == bool(gpus or driver)
    monkeypatch.setattr(_checks, "_installed", lambda: ["onnxruntime"])
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert not _checks._session("ONNX Runtime CUDA", "CUDAExecutionProvider").todo
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    assert "FLASHONNX_CUDA=ON" in _checks._session("ONNX Runtime CUDA", "CUDAExecutionProvider").found
    plain = types.SimpleNamespace(has_tensorrt_plugin=False)
    monkeypatch.setattr(_checks, "loaded", lambda: plain)
    assert "build the library" in _checks._tensorrt("TensorRT", "json").todo
    assert not _checks._tensorrt("TensorRT", "surely_not_installed").todo


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.14.1"])
def test_a_torchvision_of_another_torch(torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks the import of every model of transformers, whose message names neither."""
    versions = {"torch": torch, "torchvision": "0.29.1", "transformers": "5.24.0"}
    monkeypatch.setattr(_checks, "_version", versions.get)
    monkeypatch.setattr(_checks.metadata, "requires", lambda name: ["numpy", "torch (==2.14.1)"])
    check = _checks.transformers()
    assert check.state == ("ok" if torch == "2.14.1" else "warning")
    assert ("torchvision 0.29.1 is for torch 2.14.1, not 2.13.0" in check.found) == (check.state == "warning")
    versions["torchvision"] = None
    assert _checks.transformers().state == "ok"


@pytest.mark.tensorrt
def test_tensorrt_rtx() -> None:
    """The plugin is registered in a process of its own; a module that ends the process is an answer too."""
    pytest.importorskip("tensorrt_rtx")
    check = _checks._tensorrt("TensorRT-RTX", "tensorrt_rtx")
    library = _checks.loaded()
    assert library is not None
    if not library.has_tensorrt_plugin:
        assert check.state == "absent" and "no plugin" in check.found
        pytest.skip("a library without TensorRT's adapter")
    assert check.state == "ok", check
    assert "the plugin registers" in check.found


def test_a_broken_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "loaded", lambda: types.SimpleNamespace(has_tensorrt_plugin=True))
    monkeypatch.setattr(_checks, "_REGISTER", "import json\nprint('{module}')\nraise SystemExit('boom: it is broken')")
    check = _checks._tensorrt("TensorRT", "json")
    assert check.state == "wrong" and "it is broken" in check.found
    monkeypatch.setattr(_checks, "_REGISTER", "import os\nos.abort()  # {module}")
    assert _checks._tensorrt("TensorRT", "json").found == "the process ended with -6"
