"""register() and autoload_path(): what they refuse, and the lean runtimes of TensorRT 10 and 11 as they are."""

from __future__ import annotations

import _ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashonnx._library import LibraryError
from flashonnx.tensorrt import _register, autoload_path, register


def _tensorrt(loads: bool, name: str = "tensorrt") -> Any:
    """A module whose registry loads any library, or none, and has no creator afterwards either way."""
    registry = SimpleNamespace(all_creators=[], load_library=lambda path: object() if loads else None)
    return SimpleNamespace(__name__=name, __version__="10.0.1", get_plugin_registry=lambda: registry)


@pytest.fixture
def adapter(library_path: str) -> str:
    if not Path(library_path).with_name("libflashonnx_trt_autoload.so").exists():
        pytest.skip("tier tensorrt: the library was built without TensorRT's headers")
    return library_path


@pytest.mark.parametrize("loads", [False, True])
def test_old_tensorrt(adapter: str, loads: bool) -> None:
    """One that refuses the library, and one that looks for other entry points."""
    with pytest.raises(LibraryError, match=r"tensorrt 10\.0\.1 refused .*libflashonnx\.so; .* \(10\.3 and later"):
        register(_tensorrt(loads))


def test_no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt", "tensorrt_rtx", "tensorrt_lean"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [])  # nothing that is not imported yet can be found
    with pytest.raises(ModuleNotFoundError, match=r"pip install tensorrt \(or tensorrt-rtx\)"):
        register()


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path / "missing.so"))
    for call in (lambda: register(_tensorrt(True)), autoload_path):
        with pytest.raises(LibraryError, match=r"missing\.so"):
            call()


def test_library_without_the_adapter(monkeypatch: pytest.MonkeyPatch, library_path: str, tmp_path: Path) -> None:
    monkeypatch.setattr(_register, "library_path", lambda: _ctypes.__file__)
    for name in ("tensorrt", "tensorrt_rtx"):  # before anything is said of the latter's parser
        with pytest.raises(LibraryError, match="built without the TensorRT adapter: build it again"):
            register(_tensorrt(True, name))
    monkeypatch.setattr(_register, "library_path", lambda: shutil.copy(library_path, tmp_path))
    with pytest.raises(LibraryError, match=r"there is no .*libflashonnx_trt_autoload\.so: .*build it again"):
        autoload_path()


_LEAN = """
import ctypes, json, sys
import numpy as np
import tensorrt_lean as trt
import flashonnx.tensorrt

class Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * 508))

class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []
    def log(self, severity, message):
        self.lines.append(message)

def by_c():
    library = ctypes.CDLL(flashonnx.library_path())
    library.flashonnx_tensorrt_register.restype = Status
    assert library.flashonnx_tensorrt_register().code == 0
def by_python():
    flashonnx.tensorrt.register(trt)
def by_opening():
    ctypes.CDLL(flashonnx.tensorrt.autoload_path())

log = Log()
runtime = trt.Runtime(log)
for step in sys.argv[1].split(","):
    globals()[step]()
registry = trt.get_plugin_registry()
def make(causal):
    field = trt.PluginField("is_causal", np.array([causal], np.int32), trt.PluginFieldType.INT32)
    creator = registry.get_creator("FlashAttention", "1", "flashonnx")
    return creator.create_plugin("attention", trt.PluginFieldCollection([field]), trt.TensorRTPhase.RUNTIME)
count = sum(creator.name == "FlashAttention" for creator in registry.all_creators)
print(json.dumps([trt.__version__, count, make(1) is not None, make(2) is not None, log.lines]))
"""


@pytest.mark.tensorrt
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_lean") is None,
    reason="tier tensorrt: no tensorrt_lean (pip install tensorrt-lean-cu13, of 10 or 11)",
)
@pytest.mark.parametrize("order", ["by_c,by_python", "by_python,by_c", "by_opening,by_python", "by_python,by_opening"])
def test_lean_runtime(adapter: str, order: str) -> None:
    """NVIDIA's libnvinfer_lean has the registry and logger of its version of TensorRT; the logger with a GPU only."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FLASHONNX_LIBRARY": adapter}
    done = subprocess.run([sys.executable, "-c", _LEAN, order], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    version, count, good, bad, log = json.loads(done.stdout)
    assert (count, good, bad) == (1, True, False), version
    if not any("CUDA initialization failure" in line for line in log):
        assert any("attribute 'is_causal' is expected to be 0 or 1, got 2" in line for line in log), (version, log)
