"""What is shipped: the installed files, and what the library exports, needs and holds.

tests/test_package_wheel.py builds distributions, or takes those of `make wheel`, and asks the same of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from binary import Binary
from flashonnx._library import LibraryError

ROOT = Path(__file__).parent.parent
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
# Entry points: of ONNX Runtime, of TensorRT, and of the C API that attention.h declares.
ONNXRUNTIME = {"RegisterCustomOps"}
TENSORRT = {"getCreators", "setLoggerFinder", "flashonnx_tensorrt_register", "flashonnx_tensorrt_last_error"}
# The C library, as glibc splits it up. Everything else is inside, or looked up when a device is there.
SYSTEM = {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
PYTHON_LIMIT = 5 << 18  # bytes of everything else in the wheel, of which sources are 1.07 million by now
LIBRARY = "flashonnx/lib/libflashonnx.so"
COMPANIONS = {"flashonnx/lib/libflashonnx_trt_autoload.so", "flashonnx/lib/rtx/libtensorrt_rtx.so"}  # of TensorRT


@pytest.fixture
def binary(library_path: str) -> Binary:
    return Binary(Path(library_path))


def test_exported_symbols(binary: Binary) -> None:
    """Those of the header, as exports.map lets them out, and nothing else."""
    header = (ROOT / "plugin" / "include" / "flashonnx" / "attention.h").read_text()
    seam = set(re.findall(r"FLASHONNX_API[\s\w*]*\b(flashonnx_\w+)\(", header))
    assert len(seam) >= 7
    assert binary.exported - TENSORRT == seam | ONNXRUNTIME
    assert binary.exported & TENSORRT in (set(), TENSORRT)  # built with TensorRT's headers, or without
    map_file = (ROOT / "plugin" / "exports.map").read_text()
    exports = re.findall(r"([\w*]+);", map_file[map_file.index("global:") : map_file.index("local:")])
    assert [name for name in exports if not name.endswith("*") and name not in ONNXRUNTIME | TENSORRT] == []


def test_nothing_is_linked_but_the_c_library(binary: Binary) -> None:
    assert {name for name in binary.needed - SYSTEM if not name.startswith("ld-linux")} == set()
    assert not re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", binary.dynamic)
    # ONNX Runtime closes the library while TensorRT may still hold our creators.
    assert re.search(r"\(FLAGS_1\).*\bNODELETE\b", binary.dynamic)
    # Another flashonnx in the process, or another libcudart, is not to answer for ours.
    assert re.search(r"\(FLAGS\).*\bSYMBOLIC\b", binary.dynamic)


def test_undefined_symbols(binary: Binary) -> None:
    """Each is of a version of glibc or libgcc, or may be absent: none of a runtime, of CUDA or of the C++ library."""
    undefined = binary.undefined.items()
    assert [name for name, version in undefined if not re.fullmatch(r"(GLIBC|GCC)_[\d.]+|weak", version)] == []
    assert not re.search(r"\b(OrtGetApiBase|cu[A-Z]\w+|cuda[A-Z]\w+|_ZN8nvinfer1|_ZN?St)", " ".join(binary.undefined))


def test_cuda_code_for_every_later_device(binary: Binary) -> None:
    """A library with code that other devices can use has PTX of the lowest architecture, for all from there on."""
    code = binary.cuda_code
    if not code:
        pytest.skip("a library without CUDA")
    machine = [name.removeprefix("sm_") for name in code if name.startswith("sm_")]
    portable = sorted((name for name in machine if name.isdigit()), key=int)
    ptx = {name for name in code if name.startswith("compute_")}
    assert ptx == ({f"compute_{portable[0]}"} if portable else set())
    if portable:
        assert code[f"compute_{portable[0]}"] == code[f"sm_{portable[0]}"]  # each of its modules


NVINFER = """
static int calls;
int calls_of_registry(void) { return calls; }
int getInferLibMajorVersion(void) { return 10; }
void* getPluginRegistry(void) { ++calls; return 0; }
"""


@pytest.mark.parametrize(("name", "calls"), [("libflashonnx.so", 0), ("libflashonnx_trt_autoload.so", 1)])
def test_loading_registers_nothing(binary: Binary, name: str, calls: int, tmp_path: Path) -> None:
    """Opening the library leaves TensorRT alone; the companion that is there for it does ask for the registry."""
    compiler = shutil.which("cc")
    opened = binary.path.with_name(name)
    if compiler is None or not binary.exported & TENSORRT or not opened.exists():
        pytest.skip("needs a C compiler, a library with the TensorRT plugin, and its companion")
    (tmp_path / "nvinfer.c").write_text(NVINFER)
    nvinfer = tmp_path / "libnvinfer.so.10"
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-Wl,-soname,{nvinfer.name}", "-o", nvinfer, tmp_path / "nvinfer.c"], check=True
    )
    script = f"""
import ctypes
nvinfer = ctypes.CDLL({str(nvinfer)!r})
ctypes.CDLL({str(opened)!r})
print(nvinfer.calls_of_registry())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(calls)), done.stderr


def test_version_is_that_of_the_sources(library_path: str) -> None:
    """CMakeLists.txt has it, the library and the distribution have it from there."""
    (version,) = re.findall(r"project\(flashonnx VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    function = ctypes.CDLL(library_path).flashonnx_version
    function.restype = ctypes.c_char_p
    assert function().decode() == version
    with contextlib.suppress(metadata.PackageNotFoundError):  # not installed, only on the path
        assert metadata.version("flashonnx") == version


@pytest.fixture
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("flashonnx")
    except metadata.PackageNotFoundError:
        pytest.skip("flashonnx is not installed, only on the path")


def package_sources() -> set[str]:
    """Where the Python files of this tree are in a wheel."""
    found = set()
    for folder, prefix in ((ROOT / "python" / "flashonnx", "flashonnx"), (ROOT / "export", "flashonnx/export")):
        files = (file.relative_to(folder) for file in folder.rglob("*") if file.suffix in (".py", ".typed"))
        # A clone for development has export/ linked into the package; an installed one has it there.
        found |= {f"{prefix}/{file}" for file in files if file.parts[0] != "export" or prefix != "flashonnx"}
    return found


def assert_contents(files: set[str]) -> None:
    """Exactly the sources, the libraries and what describes the package."""
    info = {file for file in files if ".dist-info/" in file}
    described = {file.split(".dist-info/")[1] for file in info}
    assert described == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE"}
    assert files - info - COMPANIONS == package_sources() | {LIBRARY}
    assert files & COMPANIONS in (set(), COMPANIONS)


def test_installed_files(distribution: metadata.Distribution) -> None:
    by_pip = {"INSTALLER", "REQUESTED", "direct_url.json"}  # how it was installed
    files = {str(file) for file in distribution.files or () if file.suffix != ".pyc"}
    assert_contents({f for f in files if not f.endswith("bin/flashonnx") and f.split("/")[-1] not in by_pip})


def test_wheel_is_for_every_python(distribution: metadata.Distribution) -> None:
    wheel = distribution.read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: (.+)$", wheel, re.MULTILINE)
    assert tags
    assert all(re.fullmatch(r"py3-none-(many)?linux\w+", tag) for tag in tags)
    assert "Root-Is-Purelib: false" in wheel


def test_metadata(distribution: metadata.Distribution) -> None:
    described = distribution.metadata
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.11"
    assert described["Description-Content-Type"] == "text/markdown"
    assert {"Typing :: Typed", "Environment :: GPU :: NVIDIA CUDA"} <= set(described.get_all("Classifier") or ())
    required = {re.split(r"[ ;<>=\[]", r)[0] for r in distribution.requires or () if "extra ==" not in r}
    assert required == {"numpy", "onnx", "onnx-ir", "onnxscript", "rich", "typer"}  # neither a runtime nor PyTorch
    assert {"ort", "gpu", "torch", "tensorrt"} <= set(described.get_all("Provides-Extra") or ())


def test_wheel_is_small(distribution: metadata.Distribution) -> None:
    files = [file for file in distribution.files or () if file.suffix not in (".so", ".pyc")]
    assert sum(file.size or 0 for file in files) < PYTHON_LIMIT


def test_the_library_in_the_wheel_is_found(
    distribution: metadata.Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashonnx._library import library_path

    monkeypatch.delenv("FLASHONNX_LIBRARY", raising=False)
    (inside,) = (file for file in distribution.files or () if file.name == "libflashonnx.so")
    try:
        found = library_path()
    except LibraryError as error:
        pytest.fail(str(error))
    assert Path(found) == Path(str(inside.locate())).resolve()


def _sources(*folders: str) -> list[Path]:
    return [f for folder in folders for f in sorted((ROOT / folder).rglob("*")) if f.suffix in SOURCES and f.is_file()]


def test_kernels_know_no_runtime() -> None:
    """What computes attention includes nothing of ONNX Runtime, TensorRT, PyTorch or Python."""
    wrong = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in _sources("plugin/kernels", "plugin/include", "plugin/operator")
        for line in file.read_text().splitlines()
        if re.match(r"\s*#\s*include", line) and re.search(r"onnxruntime|NvInfer|torch/|ATen|c10/|Python\.h", line)
    ]
    assert not wrong


@pytest.mark.parametrize("suffix", SOURCES)
def test_files_are_short(suffix: str) -> None:
    """Who reads a file can hold it in mind: at most 500 lines, in Python 400."""
    limit = 400 if suffix == ".py" else 500
    files = [f for f in _sources("plugin", "python", "export", "tests", "scripts", "samples") if f.suffix == suffix]
    assert [f"{f.relative_to(ROOT)}: {n}" for f in files if (n := len(f.read_text().splitlines())) > limit] == []


def test_files_that_configurations_name_exist() -> None:
    """Tests and scripts in what make, CI and cibuildwheel run."""
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")]
    named = {
        name
        for file in files
        if file.is_file()
        for name in re.findall(r"\b(?:tests|scripts|samples)/[\w./]+\.py\b", file.read_text())
    }
    assert "tests/test_package.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
