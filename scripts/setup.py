"""Makes everything that `make test` and `make demo` need, in this clone alone: .venv/ and build/.

    python3 scripts/setup.py [--archs "80;90a"] [--ort-headers DIR] [--tensorrt-headers DIR]

Four steps; one whose inputs have not changed is skipped, so a second run takes seconds:

1. environment: .venv, from the Python that runs this script (3.11 or newer)
2. packages: what pyproject.toml names, in the versions of scripts/constraints.txt
3. headers: ONNX Runtime's from Debian's libonnxruntime-dev and TensorRT's from the wheel kernel-lens, unpacked into
   build/headers (the system is not touched); or folders named by --ort-headers and --tensorrt-headers, or by
   FLASHONNX_ORT_INCLUDE_DIR and FLASHONNX_TENSORRT_INCLUDE_DIR
4. flashonnx: built with CMake into build/wheel and installed into .venv, as a user's `pip install .` would

Only the standard library is used. What the tools say goes to build/setup.log.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
LOG = BUILD / "setup.log"
ORT_PACKAGE = "libonnxruntime-dev"
ORT_SUITE = "trixie"  # the first Debian that has it
TENSORRT_WHEEL = "kernel-lens"
EXTRAS = ("torch", "demo", "test", "dev")


class SetupError(Exception):
    """What went wrong and what to do about it."""


def main() -> int:
    arguments = parse_arguments()
    BUILD.mkdir(exist_ok=True)
    LOG.write_text("")
    steps = [
        ("environment", lambda: make_environment()),
        ("packages", lambda: install_packages(arguments.tensorrt)),
        ("headers", lambda: bring_headers(arguments)),
        ("flashonnx", lambda: install_flashonnx(arguments)),
    ]
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
    parser.add_argument("--ort-headers", default=os.environ.get("FLASHONNX_ORT_INCLUDE_DIR"), metavar="DIR")
    parser.add_argument("--tensorrt-headers", default=os.environ.get("FLASHONNX_TENSORRT_INCLUDE_DIR"), metavar="DIR")
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


def install_packages(tensorrt: bool) -> str:
    import tomllib  # from Python 3.11 on: an older one has been told so by now

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = project["build-system"]["requires"] + project["project"]["dependencies"]
    wanted += [
        requirement for extra in ("gpu" if gpu_architecture() else "ort", *EXTRAS) for requirement in extras[extra]
    ]
    told = [install_group("packages", wanted)]
    if tensorrt:
        try:
            told.append(install_group("tensorrt", extras["tensorrt"]))
        except SetupError as error:
            told.append(f"no TensorRT-RTX, so its tests will be skipped: {str(error).splitlines()[0]}")
    return ", ".join(told)


def install_group(name: str, wanted: list[str]) -> str:
    wanted = sorted({requirement for requirement in wanted if not requirement.startswith("flashonnx[")})
    stamp = Stamp(name, *wanted, CONSTRAINTS.read_text(), Stamp("environment", sys.version).value)
    if stamp.fresh:
        return f"{name}: there"
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
    return f"{name}: installed"


def bring_headers(arguments: argparse.Namespace) -> str:
    told = []
    for option, file, folder, bring in (
        ("ort_headers", "onnxruntime_c_api.h", BUILD / "headers" / "onnxruntime", bring_ort_headers),
        ("tensorrt_headers", "NvInfer.h", BUILD / "headers" / "tensorrt", bring_tensorrt_headers),
    ):
        given = getattr(arguments, option)
        if given is None:
            if not (folder / file).exists():
                bring(folder)
                told.append(f"brought {file}")
            setattr(arguments, option, str(folder))
        elif not (Path(given) / file).exists():
            raise SetupError(f"there is no {file} in {given}")
    return ", ".join(told) or "are there"


def install_flashonnx(arguments: argparse.Namespace) -> str:
    defines = {
        "FLASHONNX_CUDA": "AUTO",  # all are given every time: CMake remembers what it was told before
        "FLASHONNX_NVCC": "",
        "FLASHONNX_CUDA_ARCHITECTURES": arguments.archs,
        "FLASHONNX_ORT_INCLUDE_DIR": str(Path(arguments.ort_headers).resolve()),
        "FLASHONNX_TENSORRT_INCLUDE_DIR": str(Path(arguments.tensorrt_headers).resolve()),
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


# -- headers


def bring_ort_headers(folder: Path) -> None:
    advice = (
        "Name a folder that holds onnxruntime_c_api.h (ONNX Runtime's release archives have it in include/): "
        "--ort-headers DIR, or FLASHONNX_ORT_INCLUDE_DIR=DIR"
    )
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise SetupError(f"ONNX Runtime's headers come from Debian's {ORT_PACKAGE}, and there is no apt here. {advice}")
    work = BUILD / "apt"
    shutil.rmtree(work, ignore_errors=True)
    for part in ("sources", "lists/partial", "cache/archives/partial", "unpacked"):
        (work / part).mkdir(parents=True)
    try:
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
        run(["dpkg-deb", "-x", str(next(work.glob("*.deb"))), str(work / "unpacked")])
        header = next((work / "unpacked").rglob("onnxruntime_c_api.h"))
    except (SetupError, StopIteration) as error:
        raise SetupError(f"Debian's {ORT_PACKAGE} could not be had. {advice}\n{error}") from None
    shutil.copytree(header.parent, folder, dirs_exist_ok=True)
    shutil.rmtree(work)


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


def bring_tensorrt_headers(folder: Path) -> None:
    work = BUILD / "wheels"
    try:
        pip("download", "--no-deps", "-c", str(CONSTRAINTS), "-d", str(work), TENSORRT_WHEEL)
        wheel = next(work.glob("*.whl"))
    except (SetupError, StopIteration) as error:
        raise SetupError(
            f"TensorRT's headers come from the wheel {TENSORRT_WHEEL}, which could not be had. Name a folder that "
            f"holds NvInfer.h: --tensorrt-headers DIR, or FLASHONNX_TENSORRT_INCLUDE_DIR=DIR\n{error}"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/include/tensorrt/" in name and name.endswith(".h"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    shutil.rmtree(work)


# -- running, and knowing what has been done


def sources() -> list[Path]:
    """The files that the installed package is made of."""
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "README.md"]
    for folder in ("plugin", "python", "export"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(files)


def contents(files: Iterable[Path]) -> Iterable[str]:
    for path in files:
        yield str(path.relative_to(ROOT))
        yield hashlib.sha256(path.read_bytes()).hexdigest()


class Stamp:
    """A step's inputs, kept in a file once the step is done."""

    def __init__(self, name: str, *inputs: str) -> None:
        self.path = BUILD / "stamps" / name
        self.value = hashlib.sha256("\n".join(inputs).encode()).hexdigest()

    @property
    def fresh(self) -> bool:
        return self.path.exists() and self.path.read_text() == self.value

    def set(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.value)


def pip(*arguments: str, show: str | None = None) -> None:
    run([str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments], show=show)


def run(command: list[str], *, cwd: Path = ROOT, show: str | None = None) -> None:
    """Runs a command into the log. Lines that match `show` are told as they come; a failure tells the last lines."""
    lines: list[str] = []
    tell = teller(show)
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        with subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                log.write(line)
                lines.append(line)
                tell(line.strip())
    if process.returncode != 0:
        raise SetupError(f"{command[0]} failed ({process.returncode}):\n{''.join(lines[-30:])}(more in {LOG})")


def teller(show: str | None) -> Callable[[str], None]:
    """What to do with a line of output: print what matches on a line of its own."""

    def tell(line: str) -> None:
        match = re.search(show, line) if show else None
        if match:
            print(f"\n    {match[0][:110]}", end=" ", flush=True)

    return tell


if __name__ == "__main__":
    sys.exit(main())
