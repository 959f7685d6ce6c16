"""How scripts/setup.py runs commands, and how it knows what has been done. Only the standard library is used."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PYTHON = ROOT / ".venv" / "bin" / "python"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
LOG = BUILD / "setup.log"


class SetupError(Exception):
    """What went wrong and what to do about it."""


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
