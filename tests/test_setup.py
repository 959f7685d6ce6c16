"""The set-up script's choices; that it works at all is what `make test` shows before any test runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.py"


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flashonnx_setup", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
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
