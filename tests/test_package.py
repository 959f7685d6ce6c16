"""What is shipped: the wheel's files, the library's symbols and dependencies, and how large it all is."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from flashonnx._library import LibraryError

ROOT = Path(__file__).parent.parent
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")
# Entry points: of ONNX Runtime, of TensorRT, and of the C API that attention.h declares.
ONNXRUNTIME = {"RegisterCustomOps"}
TENSORRT = {"getCreators", "setLoggerFinder", "flashonnx_tensorrt_register"}
# The C library, as glibc splits it up. Everything else is inside, or looked up when a device is there.
SYSTEM = {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
LIBRARY_LIMIT = 64 << 20  # bytes
PYTHON_LIMIT = 1 << 20  # bytes of everything else in the wheel


def _tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} (binutils)")
    return subprocess.run([name, *arguments], check=True, capture_output=True, text=True).stdout


def test_exported_symbols(library_path: str) -> None:
    listed = _tool("nm", "--dynamic", "--defined-only", library_path)
    symbols = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    header = (ROOT / "plugin" / "include" / "flashonnx" / "attention.h").read_text()
    seam = set(re.findall(r"FLASHONNX_API[\s\w*]*\b(flashonnx_\w+)\(", header))
    assert len(seam) >= 7
    assert symbols - TENSORRT == seam | ONNXRUNTIME
    assert symbols & TENSORRT in (set(), TENSORRT)  # built with TensorRT's headers, or without


def test_nothing_is_linked_but_the_c_library(library_path: str) -> None:
    dynamic = _tool("readelf", "--dynamic", "--wide", library_path)
    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", dynamic))
    assert {name for name in needed - SYSTEM if not name.startswith("ld-linux")} == set()
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    # ONNX Runtime closes the library while TensorRT may still hold our creators.
    assert re.search(r"\(FLAGS_1\).*NODELETE", dynamic)


def test_no_undefined_symbols_of_runtimes(library_path: str) -> None:
    undefined = _tool("nm", "--dynamic", "--undefined-only", "--demangle", library_path)
    assert not re.search(r"\b(OrtGetApiBase|cu[A-Z]\w+|cuda[A-Z]\w+|nvinfer1::\w+|std::\w+)", undefined)


def test_library_is_small(library_path: str) -> None:
    assert Path(library_path).stat().st_size < LIBRARY_LIMIT


@pytest.fixture
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("flashonnx")
    except metadata.PackageNotFoundError:
        pytest.skip("flashonnx is not installed, only on the path")


def test_wheel_contents(distribution: metadata.Distribution) -> None:
    """Exactly the sources, the library and what describes the package."""
    files = {str(file) for file in distribution.files or () if file.suffix != ".pyc"}
    info = {file for file in files if ".dist-info/" in file}
    described = {file.split(".dist-info/")[1] for file in info}
    # pip adds what says how it was installed.
    by_pip = {"INSTALLER", "REQUESTED", "direct_url.json"}
    assert described - by_pip == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    package = {file for file in files - info if not file.endswith("bin/flashonnx")}  # the command
    expected = {f"flashonnx/lib/{name}" for name in ("libflashonnx.so",)}
    for folder, prefix in ((ROOT / "python" / "flashonnx", "flashonnx"), (ROOT / "export", "flashonnx/export")):
        sources = (file.relative_to(folder) for file in folder.rglob("*") if file.suffix in (".py", ".typed"))
        # A clone for development has export/ linked into the package; an installed one has it there.
        expected |= {f"{prefix}/{file}" for file in sources if file.parts[0] != "export" or prefix != "flashonnx"}
    assert package == expected


def test_wheel_is_for_every_python(distribution: metadata.Distribution) -> None:
    wheel = distribution.read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: (.+)$", wheel, re.MULTILINE)
    assert tags
    assert all(re.fullmatch(r"py3-none-(many)?linux\w+", tag) for tag in tags)
    assert "Root-Is-Purelib: false" in wheel


def test_wheel_is_small(distribution: metadata.Distribution) -> None:
    files = [file for file in distribution.files or () if file.suffix not in (".so", ".pyc")]
    assert sum(file.size or 0 for file in files) < PYTHON_LIMIT


def test_the_library_in_the_wheel_is_found(
    distribution: metadata.Distribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashonnx._library import library_path

    monkeypatch.delenv("FLASHONNX_LIBRARY", raising=False)
    (inside,) = (file for file in distribution.files or () if file.suffix == ".so")
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
