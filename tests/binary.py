"""What a shared library says of itself: its dynamic section, symbols and CUDA code, by binutils and cuobjdump."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Binary:
    """An ELF file. Each property is read from the file; a test that needs a tool that is not here is skipped."""

    path: Path

    @property
    def exported(self) -> set[str]:
        listed = _tool("nm", "--dynamic", "--defined-only", self.path)
        return {line.split()[-1].split("@")[0] for line in listed.splitlines()}

    @property
    def undefined(self) -> dict[str, str]:
        """What has to come from elsewhere: symbol → version ("GLIBC_2.34"), or "weak", or "" for one without any."""
        found = {}
        for line in _tool("nm", "--dynamic", "--undefined-only", "--with-symbol-versions", self.path).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.replace("@@", "@").partition("@")
            found[name] = version or ("weak" if kind == "w" else "")
        return found

    @property
    def dynamic(self) -> str:
        return _tool("readelf", "--dynamic", "--wide", self.path)

    @property
    def needed(self) -> set[str]:
        return set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", self.dynamic))

    @property
    def cuda_code(self) -> dict[str, int]:
        """How many modules of machine code ("sm_80") and of PTX ("compute_80") there are of each architecture."""
        counts: dict[str, int] = {}
        for option, kind in (("--list-elf", "sm_"), ("--list-ptx", "compute_")):
            # It names modules file.N.sm_80.cubin and file.N.sm_80.ptx, and complains if there are none of a kind.
            listed = subprocess.run([_cuobjdump(), option, str(self.path)], capture_output=True, text=True).stdout
            for architecture in re.findall(r"\.sm_(\d+[af]?)\.(?:cubin|ptx)", listed):
                counts[kind + architecture] = counts.get(kind + architecture, 0) + 1
        return counts


@functools.cache
def _tool(name: str, *arguments: str | Path) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} (binutils)")
    return subprocess.run([name, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def _cuobjdump() -> str:
    in_wheel = (Path(folder) / "nvidia" for folder in sys.path)
    found = shutil.which("cuobjdump") or next((str(f) for r in in_wheel for f in r.glob("cu*/bin/cuobjdump")), None)
    if found is None:
        pytest.skip("no cuobjdump (pip install nvidia-cuda-cuobjdump)")
    return found
