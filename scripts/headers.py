"""The headers of ONNX Runtime and TensorRT, which their wheels lack, and of CUTLASS, brought into build/headers.

CMakeLists.txt looks there, and a source distribution takes them along.

ONNX Runtime's are the system's where it has them; else those of Debian's libonnxruntime-dev, of a suite newer than this
machine's where that is needed, downloaded with this machine's own apt and unpacked without being installed; else, where
there is an npm, those in ONNX Runtime's framework for iOS that the npm package com.github.asus4.onnxruntime carries
(150 MB). TensorRT's are those of the wheel kernel-lens; CUTLASS's, those of nvidia-cutlass that our kernels include.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from steps import BUILD, CONSTRAINTS, ROOT, SetupError, pip, run

ORT_FOLDER, ORT_HEADER = BUILD / "headers" / "onnxruntime", "onnxruntime_c_api.h"
TENSORRT_FOLDER, TENSORRT_HEADER = BUILD / "headers" / "tensorrt", "NvInfer.h"
CUTLASS_FOLDER = BUILD / "headers" / "cutlass"
ORT_PACKAGE = "libonnxruntime-dev"
ORT_SUITE = "trixie"  # the first Debian that has it
ORT_NPM_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"
TENSORRT_WHEEL = "kernel-lens"
CUTLASS_WHEEL = "nvidia-cutlass"


def bring_headers(ort_given: str | None, tensorrt_given: str | None, cutlass_given: str | None = None) -> str:
    """Fills build/headers from the folders given, or from where they are to be had if they are not there."""
    told = []
    for folder, header, given, bring in (
        (ORT_FOLDER, ORT_HEADER, ort_given, bring_ort_headers),
        (TENSORRT_FOLDER, TENSORRT_HEADER, tensorrt_given, bring_tensorrt_headers),
    ):
        if given:
            if not (Path(given) / header).exists():
                raise SetupError(f"there is no {header} in {given}")
            copy(Path(given), folder)
        elif not (folder / header).exists():
            told.append(f"{header} from {bring()}")
    wanted = included(ROOT / "plugin" / "kernels", (".cuh", ".cu", ".h"))
    if cutlass_given:
        copy_included(wanted, Path(cutlass_given))
    elif not all((CUTLASS_FOLDER / header).exists() for header in wanted):
        told.append(f"CUTLASS from {bring_cutlass_headers(wanted)}")
    return ", ".join(told) or "are there"


def bring_ort_headers() -> str:
    refusals = []
    work = BUILD / "ort_headers"
    sources: tuple[tuple[str, Callable[[Path], Path]], ...] = (
        ("the system", ort_headers_of_system),
        (f"Debian's {ORT_PACKAGE}", ort_headers_of_debian),
        (f"npm's {ORT_NPM_PACKAGE}", ort_headers_of_npm),
    )
    for name, source in sources:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            copy(source(work), ORT_FOLDER)
        except SetupError as error:
            refusals.append(f"{name}: {error}")
        else:
            shutil.rmtree(work)
            return name
    raise SetupError(
        f"ONNX Runtime's headers could not be had. Name a folder that holds {ORT_HEADER} (ONNX Runtime's release "
        "archives have it in include/): --ort-headers DIR, or FLASHONNX_ORT_INCLUDE_DIR=DIR\n" + "\n".join(refusals)
    )


def ort_headers_of_system(_: Path) -> Path:
    roots = ["/usr/include", "/usr/local/include", *(f"{p}/include" for p in [os.environ.get("CONDA_PREFIX")] if p)]
    for root in roots:
        for part in ("onnxruntime", "onnxruntime/core/session", "."):
            if (Path(root) / part / ORT_HEADER).exists():
                return Path(root) / part
    raise SetupError(f"no {ORT_HEADER} in {', '.join(roots)}")


def ort_headers_of_debian(work: Path) -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise SetupError("there is no apt here")
    for part in ("sources", "lists/partial", "cache/archives/partial", "unpacked"):
        (work / part).mkdir(parents=True)
    (work / "sources" / "debian.sources").write_text(debian_source())
    options = [
        f"Dir::Etc::sourceparts={work / 'sources'}",
        "Dir::Etc::sourcelist=/dev/null",
        f"Dir::State::Lists={work / 'lists'}",
        f"Dir::Cache={work / 'cache'}",
        "APT::Sandbox::User=root",
    ]
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    run([*apt, "update"], cwd=work)
    run([*apt, "download", ORT_PACKAGE], cwd=work)
    run(["dpkg-deb", "-x", str(first(work.glob("*.deb"))), str(work / "unpacked")])
    return first((work / "unpacked").rglob(ORT_HEADER)).parent


def debian_source() -> str:
    """This machine's own source of Debian packages, turned to the suite that has the headers."""
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            if re.search(r"^URIs:\s*\S+/debian/?\s*$", stanza, re.M) and re.search(r"^Suites:", stanza, re.M):
                stanza = re.sub(r"^Types:.*$", "Types: deb", stanza, flags=re.M)
                return re.sub(r"^Suites:.*$", f"Suites: {ORT_SUITE}", stanza, flags=re.M).strip() + "\n"
    lists = Path("/etc/apt/sources.list")
    line = re.search(r"^deb\s+(?:\[.*?\]\s+)?(\S+/debian)/?\s", lists.read_text() if lists.exists() else "", re.M)
    if line:
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        return f"Types: deb\nURIs: {line[1]}\nSuites: {ORT_SUITE}\nComponents: main\nSigned-By: {keyring}\n"
    raise SetupError("apt on this machine knows no Debian source")


def ort_headers_of_npm(work: Path) -> Path:
    if shutil.which("npm") is None:
        raise SetupError("there is no npm here")
    run(["npm", "pack", "--silent", ORT_NPM_PACKAGE], cwd=work)
    with tarfile.open(first(work.glob("*.tgz"))) as archive:
        # The framework holds them once for each kind of device, all the same.
        headers = [member for member in archive if member.isfile() and "/Headers/" in member.name]
        for header in headers:
            if file := archive.extractfile(header):
                (work / Path(header.name).name).write_bytes(file.read())
    return first(work.glob(ORT_HEADER)).parent


def bring_tensorrt_headers() -> str:
    try:
        copy(first(unpacked(TENSORRT_WHEEL).rglob(TENSORRT_HEADER)).parent, TENSORRT_FOLDER)
    except SetupError as error:
        raise SetupError(
            f"TensorRT's headers come from the wheel {TENSORRT_WHEEL}, which could not be had. Name a folder that "
            f"holds {TENSORRT_HEADER}: --tensorrt-headers DIR, or FLASHONNX_TENSORRT_INCLUDE_DIR=DIR\n{error}"
        ) from None
    return f"the wheel {TENSORRT_WHEEL}"


def bring_cutlass_headers(wanted: set[str]) -> str:
    try:
        copy_included(wanted, first(unpacked(CUTLASS_WHEEL).rglob("include/cute")).parent)
    except SetupError as error:
        raise SetupError(
            f"CUTLASS's headers come from the wheel {CUTLASS_WHEEL}, which could not be had. Name a folder that "
            f"holds cute/ and cutlass/: --cutlass-headers DIR, or FLASHONNX_CUTLASS_INCLUDE_DIR=DIR\n{error}"
        ) from None
    return f"the wheel {CUTLASS_WHEEL}"


def unpacked(wheel: str) -> Path:
    """A folder with what is in a wheel of PyPI."""
    work = BUILD / "wheels" / wheel
    shutil.rmtree(work, ignore_errors=True)
    pip("download", "--no-deps", "-c", str(CONSTRAINTS), "-d", str(work), wheel)
    with zipfile.ZipFile(first(work.glob("*.whl"))) as archive:
        archive.extractall(work)
    return work


def included(path: Path, suffixes: tuple[str, ...]) -> set[str]:
    """The headers of CUTLASS that the files of a folder name."""
    files = [file for file in path.rglob("*") if file.suffix in suffixes]
    return {name for file in files for name in includes(file) if name.startswith(("cute/", "cutlass/"))}


def includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(), re.M)


def copy_included(wanted: set[str], source: Path) -> None:
    """Copies headers of CUTLASS and those that they include: 7 of 800."""
    if source.resolve() == CUTLASS_FOLDER.resolve():
        return
    shutil.rmtree(CUTLASS_FOLDER, ignore_errors=True)
    pending = {source / header for header in wanted}
    while pending:
        header = pending.pop()
        copied = CUTLASS_FOLDER / header.relative_to(source)
        if not header.is_file():
            raise SetupError(f"there is no {header.relative_to(source)} in {source}")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header, copied)
        for folder in (source, header.parent):
            others = (folder / name for name in includes(header))
            pending |= {f for f in others if f.is_file() and not (CUTLASS_FOLDER / f.relative_to(source)).exists()}


def copy(source: Path, folder: Path) -> None:
    """Makes a folder of the headers that are ours to use: `source` may be a system's /usr/include."""
    if source.resolve() == folder.resolve():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for pattern in ("onnxruntime_*.h", "NvInfer*.h"):
        for header in source.glob(pattern):
            shutil.copyfile(header, folder / header.name)


def first(paths: Iterable[Path]) -> Path:
    found = next(iter(paths), None)
    if found is None:
        raise SetupError("what was downloaded is not what was expected")
    return found
