"""Where libflashonnx.so is, and whether it can be what it should be."""

from __future__ import annotations

import os
import platform
import struct
from importlib import resources
from pathlib import Path

ENVIRONMENT = "FLASHONNX_LIBRARY"
_FILE = "libflashonnx.so"
# ELF e_machine by platform.machine(): https://refspecs.linuxfoundation.org (ELF gABI, "Object file machine types").
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "s390x": 22, "riscv64": 243}


class LibraryError(RuntimeError):
    """libflashonnx.so, or the runtime that should load it, is missing or unsuitable; the message says what to do."""


def library_path() -> str:
    """The path of libflashonnx.so: the file that FLASHONNX_LIBRARY names, else the one inside this package.

    It is what `SessionOptions.register_custom_ops_library`, `dlopen` and TensorRT's `load_library` take. The file's
    header is checked, the library is not loaded.

    Returns:
        An absolute path.

    Raises:
        LibraryError: there is no such file, it is not a shared library, or it was built for another CPU.
    """
    named = os.environ.get(ENVIRONMENT)
    path = Path(named) if named else Path(str(resources.files("flashonnx") / "lib" / _FILE))
    origin = f"{path} (named by {ENVIRONMENT})" if named else str(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise LibraryError(f"the flashonnx library {origin} {what}: {_advice(bool(named))}")
    wrong = _unsuitable(path)
    if wrong:
        raise LibraryError(f"the flashonnx library {origin} {wrong}: {_advice(bool(named))}")
    return str(path.resolve())


def _advice(named: bool) -> str:
    if named:
        return f"set {ENVIRONMENT} to a libflashonnx.so built for this machine, or unset it to use the installed one"
    return (
        "install flashonnx on this machine again (pip install --force-reinstall with its wheel, or pip install . in a "
        f"clone), or set {ENVIRONMENT} to a libflashonnx.so that you built"
    )


def _unsuitable(path: Path) -> str:
    """Why this file cannot be loaded here, from its ELF header; empty if nothing speaks against it."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return "is not a shared library (no ELF header)"
    bits = {1: 32, 2: 64}.get(header[4], 0)
    order = ">" if header[5] == 2 else "<"
    kind, machine = struct.unpack(order + "HH", header[16:20])
    here = platform.machine()
    expected = _ELF_MACHINES.get(here)
    if expected is not None and (machine, bits) != (expected, 64):
        names = {number: name for name, number in _ELF_MACHINES.items()}
        theirs = names.get(machine, f"ELF machine {machine}")
        return f"is built for another CPU: {theirs}, {bits} bit; this is {here}, 64 bit"
    if kind != 3:  # ET_DYN
        return f"is not a shared library (ELF type {kind})"
    return ""
