"""Makes everything that `make test` and `make demo` need, in this clone alone: .venv/ and build/.

    python3 scripts/setup.py [--archs "80;90a"] [--ort-headers DIR] [--tensorrt-headers DIR]

Four steps; one whose inputs have not changed is skipped, so a second run takes seconds:

1. environment: .venv, from the Python that runs this script (3.11 or newer); and python/flashonnx/export, a link that
   makes one package of the sources, for mypy and for runs from the tree
2. packages: what pyproject.toml names, in the versions of scripts/constraints.txt
3. headers: those of ONNX Runtime, TensorRT and CUTLASS into build/headers, as scripts/headers.py says (the system is
   not touched), or from folders named by --ort-headers, --tensorrt-headers and --cutlass-headers, or by
   FLASHONNX_ORT_INCLUDE_DIR, FLASHONNX_TENSORRT_INCLUDE_DIR and FLASHONNX_CUTLASS_INCLUDE_DIR
4. flashonnx: built with CMake into build/wheel and installed into .venv, as a user's `pip install .` would

What the tools say goes to build/setup.log.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from headers import ORT_FOLDER, TENSORRT_FOLDER, bring_headers
from steps import BUILD, CONSTRAINTS, LOG, PYTHON, ROOT, SetupError, Stamp, contents, pip, run

VENV = ROOT / ".venv"
EXTRAS = ("torch", "demo", "plots", "polygraphy", "test", "dev")


def main() -> int:
    arguments = parse_arguments()
    BUILD.mkdir(exist_ok=True)
    LOG.write_text("")
    steps = [
        ("environment", lambda: make_environment()),
        ("packages", lambda: install_packages(arguments.tensorrt)),
        (
            "headers",
            lambda: bring_headers(arguments.ort_headers, arguments.tensorrt_headers, arguments.cutlass_headers),
        ),
        ("flashonnx", lambda: install_flashonnx(arguments)),
    ]
    if arguments.no_build:
        steps.pop()
    for number, (name, step) in enumerate(steps, 1):
        start = time.monotonic()
        print(f"[{number}/{len(steps)}] {name}", end=" ", flush=True)
        try:
            result = step()
        except SetupError as error:
            print(f"\nsetup: {name}: {error}", file=sys.stderr)
            return 1
        print(f"{result} ({time.monotonic() - start:.1f} s)", flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--archs",
        default=gpu_architecture() or "90a",
        help='CUDA architectures to compile for, e.g. "80;90a;120"; default: that of the GPU here, else 90a',
    )
    parser.add_argument("--tensorrt", action="store_true", help="also TensorRT-RTX, for the tests of its plugin")
    parser.add_argument("--no-build", action="store_true", help="stop after the headers")
    parser.add_argument("--ort-headers", default=os.environ.get("FLASHONNX_ORT_INCLUDE_DIR"), metavar="DIR")
    parser.add_argument("--tensorrt-headers", default=os.environ.get("FLASHONNX_TENSORRT_INCLUDE_DIR"), metavar="DIR")
    parser.add_argument("--cutlass-headers", default=os.environ.get("FLASHONNX_CUTLASS_INCLUDE_DIR"), metavar="DIR")
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="another CMake option")
    return parser.parse_args()


def gpu_architecture() -> str | None:
    """The architecture of the NVIDIA GPU here as CMake writes it ("86", "90a"), or None."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.match(r"(\d+)\.(\d)\s", said)
    if found is None:
        return None
    number = found[1] + found[2]
    return "90a" if number == "90" else number


# -- the steps: each returns what to tell the user


def make_environment() -> str:
    if sys.version_info < (3, 11):  # noqa: UP036
        raise SetupError(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: run it with a newer one")
    link_export(ROOT)
    stamp = Stamp("environment", sys.version)
    if PYTHON.exists() and stamp.fresh:
        return "is there"
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        run([sys.executable, "-m", "venv", str(VENV)])
    except SetupError as error:
        raise SetupError(f"{error}\nOn Debian the package python3-venv has to be installed.") from None
    stamp.set()
    return f"made .venv with Python {sys.version.split()[0]}"


def link_export(root: Path) -> None:
    """flashonnx.export is a folder of its own here; git ignores the link, and no package is made of it."""
    link = root / "python" / "flashonnx" / "export"
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", "..", "export"))


def install_packages(tensorrt: bool) -> str:
    import tomllib  # from Python 3.11 on: an older one has been told so by now

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
    wanted += [
        requirement for extra in ("gpu" if gpu_architecture() else "ort", *EXTRAS) for requirement in extras[extra]
    ]
    told = install_group("packages", wanted)
    if tensorrt:
        try:
            told += f", TensorRT-RTX {install_group('tensorrt', extras['tensorrt'])}"
        except SetupError as error:
            told += f", no TensorRT-RTX, so its tests will be skipped: {str(error).splitlines()[0]}"
    return told


def install_group(name: str, wanted: list[str]) -> str:
    wanted = sorted({requirement for requirement in wanted if not requirement.startswith("flashonnx[")})
    stamp = Stamp(name, *wanted, CONSTRAINTS.read_text(), Stamp("environment", sys.version).value)
    if stamp.fresh:
        return "there"
    pip(
        "install",
        "--progress-bar",
        "off",
        "-c",
        str(CONSTRAINTS),
        *wanted,
        show=r"Downloading \S+ \(.*?\)|Installing collected packages",
    )
    stamp.set()
    return "installed"


def install_flashonnx(arguments: argparse.Namespace) -> str:
    defines = {
        "FLASHONNX_CUDA": "AUTO",  # all are given every time: CMake remembers what it was told before
        "FLASHONNX_NVCC": "",
        "FLASHONNX_CUDA_ARCHITECTURES": arguments.archs,
        "FLASHONNX_ORT_INCLUDE_DIR": str(ORT_FOLDER),
        "FLASHONNX_TENSORRT_INCLUDE_DIR": str(TENSORRT_FOLDER),
        "FLASHONNX_TESTS": "ON" if arguments.tensorrt else "OFF",
        "FLASHONNX_WERROR": "ON",
    }
    for definition in arguments.define:
        name, separator, value = definition.partition("=")
        if not separator:
            raise SetupError(f"--define is expected to be NAME=VALUE, got {definition}")
        defines[name] = value
    options = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    stamp = Stamp("flashonnx", *options, *contents(sources()), Stamp("environment", sys.version).value)
    if stamp.fresh:
        return "is up to date"
    pip("install", "--no-build-isolation", "--no-deps", "--force-reinstall", "-v", *options, str(ROOT),
        show=r"-- flashonnx: .*|CMake Warning.*|flashonnx: NO .*|\[\d+/\d+\] (?:Building|Linking).*")  # fmt: skip
    stamp.set()
    return "built and installed"


def sources() -> list[Path]:
    """The files that the installed package, and what is built beside it, are made of."""
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "README.md"]
    for folder in ("plugin", "python", "export", "tests/cpp"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(files)


if __name__ == "__main__":
    sys.exit(main())
