"""The set-up script's choices; that it works at all is what `make test` shows before any test runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.py"


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flashonnx_setup", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # where its parts are, as when it is run
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 9.0", "90a"),
        ("echo 8.6; echo 9.0", "86"),
        ("echo 12.0", "120"),
        ("echo No devices were found", None),
        ("exit 9", None),
    ],
)
def test_architecture_of_the_gpu_here(
    setup: ModuleType, script: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert setup.gpu_architecture() == expected


def test_no_gpu_here(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.gpu_architecture() is None


@pytest.mark.parametrize("done", [True, False], ids=["there", "installed"])
def test_what_is_told_of_packages(setup: ModuleType, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the name of the step, so it is not named again."""
    commands: list[tuple[str, ...]] = []
    steps = {"fresh": done, "value": "", "set": lambda: None}
    monkeypatch.setattr(setup, "Stamp", lambda *_: types.SimpleNamespace(**steps))
    monkeypatch.setattr(setup, "pip", lambda *command, **_: commands.append(command))
    told = "there" if done else "installed"
    assert setup.install_packages(False) == told
    assert setup.install_packages(True) == f"{told}, TensorRT-RTX {told}"
    assert len(commands) == (0 if done else 3)

    def refuse(name: str, wanted: list[str]) -> str:
        if name == "tensorrt":
            raise setup.SetupError("pip failed (1):\nmore")
        return told

    monkeypatch.setattr(setup, "install_group", refuse)
    assert setup.install_packages(True) == f"{told}, no TensorRT-RTX, so its tests will be skipped: pip failed (1):"


def test_mypy_checks_the_tree(setup: ModuleType, tmp_path: Path) -> None:
    """Not what is installed; export is a folder of its own, of which a link makes one package with the rest."""
    pytest.importorskip("mypy")
    for folder in ("python/flashonnx", "export"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("x: int = 'no number'\n")
    (tmp_path / "pyproject.toml").write_text((SCRIPT.parent.parent / "pyproject.toml").read_text())
    for _ in range(2):  # again changes nothing
        setup.link_export(tmp_path)
    said = subprocess.run([sys.executable, "-m", "mypy"], cwd=tmp_path, capture_output=True, text=True).stdout
    for file in ("python/flashonnx/__init__.py", "python/flashonnx/export/__init__.py"):
        assert f"{file}:1: error: Incompatible types in assignment" in said
    assert "checked 2 source files" in said


def test_ort_headers_of_the_system(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions and conda have them in folders of different depth; what else is there is not taken along."""
    headers = sys.modules["headers"]
    folder = tmp_path / "conda" / "include" / "onnxruntime" / "core" / "session"
    folder.mkdir(parents=True)
    for name in ("onnxruntime_c_api.h", "onnxruntime_ep_c_api.h", "stdlib.h"):
        (folder / name).write_text(name)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.setattr(headers, "ORT_FOLDER", tmp_path / "brought")
    monkeypatch.setattr(headers, "BUILD", tmp_path)
    assert headers.bring_ort_headers() == "the system"
    assert {file.name for file in (tmp_path / "brought").iterdir()} == {
        "onnxruntime_c_api.h",
        "onnxruntime_ep_c_api.h",
    }


def test_headers_that_are_in_their_place(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = sys.modules["headers"]
    for folder, header in (("ORT_FOLDER", "onnxruntime_c_api.h"), ("TENSORRT_FOLDER", "NvInfer.h")):
        (tmp_path / header).write_text("")
        monkeypatch.setattr(headers, folder, tmp_path)
    monkeypatch.setattr(headers, "ROOT", tmp_path)  # without kernels, so without CUTLASS
    assert headers.bring_headers(str(tmp_path), str(tmp_path)) == "are there"
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(setup.SetupError, match=r"there is no onnxruntime_c_api\.h in elsewhere"):
        headers.bring_headers("elsewhere", None)


def test_cutlass_headers(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a kernel includes, and what they include in turn, by full and by relative names; no others."""
    headers = sys.modules["headers"]
    texts = {
        "kernels/sm90/mma.cuh": "#include <cute/arch/mma.hpp>\n#include <cuda.h>",
        "include/cute/arch/mma.hpp": '#include "mma_ext.hpp"\n  #  include <cutlass/cutlass.h>',
        "include/cute/arch/mma_ext.hpp": "#include <cute/arch/mma.hpp>",
        "include/cutlass/cutlass.h": "#include <cuda_runtime.h>",
        "include/cutlass/gemm.h": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    brought = tmp_path / "brought"
    monkeypatch.setattr(headers, "CUTLASS_FOLDER", brought)
    wanted = headers.included(tmp_path / "kernels", (".cuh",))
    headers.copy_included(wanted, tmp_path / "include")
    files = {str(file.relative_to(brought)) for file in brought.rglob("*") if file.is_file()}
    assert files == {"cute/arch/mma.hpp", "cute/arch/mma_ext.hpp", "cutlass/cutlass.h"}
    with pytest.raises(setup.SetupError, match=r"there is no cute/arch/mma.hpp in"):
        headers.copy_included(wanted, tmp_path / "kernels")


def test_no_ort_headers(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a system that has them, apt or npm: what was tried, and what to do."""
    headers = sys.modules["headers"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(headers, "ORT_HEADER", "none_has_this.h")
    monkeypatch.setattr(headers, "BUILD", tmp_path)
    with pytest.raises(setup.SetupError, match=r"(?s)--ort-headers DIR.*the system: .*no apt here.*no npm here"):
        headers.bring_ort_headers()
