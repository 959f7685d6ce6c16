"""Finding the library, registering it, opening sessions: what works and what each mistake is told."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flashonnx
import numpy as np
import onnx
import pytest
from flashonnx import LibraryError, _large, _library, _runtime
from onnx import TensorProto, helper

ort = pytest.importorskip("onnxruntime")
CPU = ["CPUExecutionProvider"]
X86_64, AARCH64, DYNAMIC, EXECUTABLE = 62, 183, 3, 2
HERE = {"x86_64": X86_64, "aarch64": AARCH64}.get(platform.machine(), 0)
ELSEWHERE = X86_64 if HERE == AARCH64 else AARCH64


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """One attention over (1, 2, 3, 4)."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 2, 3, 4)) for name in "QKVY"]
    node = helper.make_node("FlashAttention", ["Q", "K", "V"], ["Y"], domain="flashonnx")
    graph = helper.make_graph([node], "attention", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def runs(session: ort.InferenceSession) -> bool:
    """With equal keys the result is the mean of the values."""
    values = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    ones = np.ones_like(values)
    out = session.run(None, {"Q": ones, "K": ones, "V": values})[0]
    return np.allclose(out, values.mean(axis=2, keepdims=True))


def elf(path: Path, machine: int = HERE, bits: int = 64, kind: int = DYNAMIC) -> Path:
    """A file with the header of a library, and nothing else."""
    ident = b"\x7fELF" + bytes([bits // 32, 1, 1]) + bytes(9)
    path.write_bytes(ident + struct.pack("<HH", kind, machine) + bytes(100))
    return path


def test_import_is_light() -> None:
    heavy = "numpy", "onnx", "onnxruntime", "torch", "rich", "typer"
    code = f"import sys, flashonnx; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    pytest.importorskip("torch")
    for name in flashonnx.__all__:
        assert getattr(flashonnx, name) is not None
        assert name in dir(flashonnx)
    assert callable(flashonnx.verify)  # and not the module that holds it
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flashonnx.nothing


def test_path_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(elf(tmp_path / "other.so")))
    assert flashonnx.library_path() == str((tmp_path / "other.so").resolve())


def test_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(LibraryError, match=r"missing\.so.*FLASHONNX_LIBRARY.* does not exist.*unset it"):
        flashonnx.library_path()
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path))
    with pytest.raises(LibraryError, match="is a directory"):
        flashonnx.library_path()


def test_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHONNX_LIBRARY", raising=False)
    monkeypatch.setattr(_library, "resources", SimpleNamespace(files=lambda package: tmp_path))
    with pytest.raises(LibraryError, match=r"lib/libflashonnx\.so does not exist: install flashonnx .*again"):
        flashonnx.library_path()


@pytest.mark.parametrize(
    ("machine", "bits", "kind", "said"),
    [
        (ELSEWHERE, 64, DYNAMIC, "another CPU"),
        (HERE, 32, DYNAMIC, "another CPU: .*32 bit"),
        (0x1234, 64, DYNAMIC, "another CPU: ELF machine 4660"),
        (HERE, 64, EXECUTABLE, "not a shared library"),
    ],
)
@pytest.mark.skipif(not HERE, reason="the test knows x86_64 and aarch64")
def test_wrong_header(
    machine: int, bits: int, kind: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(elf(tmp_path / "wrong.so", machine, bits, kind)))
    with pytest.raises(LibraryError, match=f"{said}.*built for this machine"):
        flashonnx.register(ort.SessionOptions())


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"not a library, however long the text that stands in it may be"])
def test_not_a_library(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_bytes(content)
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path / "text.so"))
    with pytest.raises(LibraryError, match="is not a shared library"):
        flashonnx.library_path()


def test_other_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shared library, but not this one."""
    (tmp_path / "other.c").write_text("int other(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "other.c"), "-o", str(tmp_path / "other.so")], check=True)
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(tmp_path / "other.so"))
    with pytest.raises(LibraryError, match=r"cannot load .*other\.so.*RegisterCustomOps"):
        flashonnx.register(ort.SessionOptions())


def test_unloadable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A right header does not make a library: what the loader says is passed on."""
    monkeypatch.setenv("FLASHONNX_LIBRARY", str(elf(tmp_path / "hollow.so")))
    with pytest.raises(LibraryError, match=r"cannot load .*hollow\.so"):
        flashonnx.register(ort.SessionOptions())


def test_register_twice(model: onnx.ModelProto) -> None:
    options = ort.SessionOptions()
    flashonnx.register(options)
    flashonnx.register(options)
    assert runs(ort.InferenceSession(model.SerializeToString(), options, providers=CPU))
    assert runs(flashonnx.session(model, CPU, options))  # the third time, and a second session


def test_register_then_again_by_hand(model: onnx.ModelProto) -> None:
    options = ort.SessionOptions()
    flashonnx.register(options)
    options.register_custom_ops_library(flashonnx.library_path())
    with pytest.raises(Exception, match="Domain already set in registry"):
        ort.InferenceSession(model.SerializeToString(), options, providers=CPU)
    with pytest.raises(LibraryError, match=r"registered twice.*call only one of them"):
        flashonnx.session(model, CPU, options)


def test_without_registration(model: onnx.ModelProto) -> None:
    with pytest.raises(Exception, match="flashonnx:FlashAttention"):
        ort.InferenceSession(model.SerializeToString(), providers=CPU)


def test_register_two_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    flashonnx.register(options)
    monkeypatch.setenv("FLASHONNX_LIBRARY", shutil.copy(flashonnx.library_path(), str(tmp_path / "copy.so")))
    with pytest.raises(LibraryError, match=r"already have .*copy\.so too"):
        flashonnx.register(options)


def test_register_something_else() -> None:
    with pytest.raises(TypeError, match=r"expected an onnxruntime\.SessionOptions, got str"):
        flashonnx.register("model.onnx")


@pytest.mark.parametrize("version", ["1.27.1", "1.9.0", "0.1", "unknown"])
def test_old_runtime(version: str, monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    with pytest.raises(LibraryError, match=f"needs ONNX Runtime 1.28 or newer, found {version}: pip install"):
        flashonnx.session(model)


@pytest.mark.parametrize("version", ["1.28.0", "1.100.0.dev1", "2.0"])
def test_new_runtime(version: str, monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    assert runs(flashonnx.session(model, CPU))


def test_no_runtime(monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(LibraryError, match=r"cannot be imported.*pip install"):
        flashonnx.session(model)


def test_session_takes_files_bytes_and_protos(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    for given in (path, str(path), path.read_bytes(), model):
        assert runs(flashonnx.session(given, CPU))
    with pytest.raises(FileNotFoundError, match=r"no model file .*missing\.onnx"):
        flashonnx.session(tmp_path / "missing.onnx", CPU)
    with pytest.raises(TypeError, match="got int"):
        flashonnx.session(7, CPU)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x0a\x3a\xff\xff\x01"])
def test_not_a_model(content: bytes, tmp_path: Path) -> None:
    """The error names the file, or says that it was none."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"session: .*broken\.onnx is not an ONNX model: "):
        flashonnx.session(path, CPU)
    with pytest.raises(ValueError, match="session: what was given is not an ONNX model: "):
        flashonnx.session(content, CPU)


def test_models_beyond_2_gb_go_through_a_file(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_large, "LIMIT", 100)
    assert runs(flashonnx.session(model, CPU))


def test_protobuf_does_not_count_beyond_2_gb() -> None:
    """It raises instead, which is the answer as well."""
    from google.protobuf.message import EncodeError

    class Huge:
        def ByteSize(self) -> int:  # noqa: N802
            raise EncodeError("Failed to serialize proto")

    assert _large.is_large(Huge())  # type: ignore[arg-type]


def test_default_providers(model: onnx.ModelProto) -> None:
    providers = _runtime.default_providers()
    assert providers[-1] == "CPUExecutionProvider"
    assert len(providers) == 1 + (
        "CUDAExecutionProvider" in ort.get_available_providers() and _runtime.cuda_unavailable() is None
    )
    assert runs(flashonnx.session(model))


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this ONNX Runtime has CUDA")
def test_type_that_a_provider_does_not_have() -> None:
    """ONNX Runtime's error stays what it is, and says what to do."""
    values = [helper.make_tensor_value_info(name, TensorProto.BFLOAT16, (2, 2)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "product", values[:1], values[1:])
    product = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with pytest.raises(Exception, match="Could not find an implementation for MatMul") as raised:
        flashonnx.session(product, CPU)
    assert "none of CPUExecutionProvider has this operator in this type" in raised.value.__notes__[0]


def test_provider_that_is_not_in_a_list(model: onnx.ModelProto) -> None:
    """A string is a sequence of strings too."""
    with pytest.raises(TypeError, match=r"expected to be a list.*\['CPUExecutionProvider'\]"):
        flashonnx.session(model, "CPUExecutionProvider")  # type: ignore[arg-type]


def test_provider_that_is_not_there(model: onnx.ModelProto) -> None:
    with pytest.warns(UserWarning, match="could not use CUDAExecutionProvider"):
        assert runs(flashonnx.session(model, ["CUDAExecutionProvider", *CPU]))


def test_exit_with_an_open_session(tmp_path: Path, model: onnx.ModelProto) -> None:
    """A program that ends without closing anything ends well."""
    onnx.save(model, tmp_path / "model.onnx")
    program = f"""
import flashonnx, numpy as np
session = flashonnx.session({str(tmp_path / "model.onnx")!r}, ["CPUExecutionProvider"])
print(session.run(None, {{x.name: np.zeros(x.shape, "f4") for x in session.get_inputs()}})[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "(1, 2, 3, 4)\n"), done.stderr


USE = """
import sys
import numpy as np
from flashonnx._capi import CPU, CUDA, Library, attention_params
library = Library(sys.argv[1])
if sys.argv[2] == "device":
    library.device(CUDA, 0)
x = np.ones((1, 1, 2, 8), np.float32)
library.run(attention_params(library, library.device(CPU), x, x, x, np.empty_like(x)))
"""


def use(library_path: str, what: str, **environment: str) -> str:
    """What a process says that runs one attention on the CPU, or looks for a GPU before."""
    command = [sys.executable, "-c", USE, library_path, what]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True).stderr


@pytest.mark.parametrize(("value", "count"), [("", 0), ("0", 0), ("1", 1)])
def test_log(value: str, count: int, library_path: str) -> None:
    assert use(library_path, "run", FLASHONNX_LOG=value).count("flashonnx: cpu for B1 Hq1 Hkv1 Sq2 Sk2") == count


DRIVER = "int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (12040, "the NVIDIA driver here is one of CUDA 12.4, too old for this library, built with CUDA"),
        (0, "there is no NVIDIA device or driver here"),
    ],
)
def test_old_driver(version: int, message: str, library_path: str, tmp_path: Path) -> None:
    """CUDA says the same of none and of an old one; here each is told by its name."""
    compiler = shutil.which("cc")
    if compiler is None or "no CUDA kernels" in use(library_path, "device"):
        pytest.skip("needs a C compiler and a library with CUDA")
    (tmp_path / "driver.c").write_text(DRIVER.format(version=version))
    subprocess.run([compiler, "-shared", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    assert message in use(library_path, "device", LD_LIBRARY_PATH=str(tmp_path))
