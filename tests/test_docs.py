"""The documents tell the truth: their code runs, their links lead somewhere.

A block that is not run says why, in the line before it: <!-- not run: reason -->
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "samples").rglob("*.md")})
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
RUN = {"python": "python", "py": "python", "bash": "bash", "sh": "bash", "console": "bash"}
TIMEOUT = 240  # seconds
# What torch's exporter says of itself where a document calls it, as readers do.
OF_TORCH = re.compile(r"torchvision is not installed|treespec, LeafSpec|# The axis name: \w+ will not be used")


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[str]:
    """The blocks of that language that are to be run."""
    found = FENCE.finditer(document.read_text())
    return [m["code"] for m in found if RUN.get(m["language"]) == language and not m["reason"]]


def _execute(command: list[str], folder: Path) -> None:
    """With this Python's commands and modules, whatever the folder."""
    modules = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(modules),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    warned = [line for line in done.stderr.splitlines() if re.search(r"Warning: |warning: ", line)]
    assert not [line for line in warned if not OF_TORCH.search(line)], done.stderr


def test_there_is_a_readme() -> None:
    assert ROOT / "README.md" in DOCUMENTS


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")], ids=_name)
def test_python_blocks_run(document: Path, tmp_path: Path, library_path: str) -> None:
    """All of a document, one after the other in one program, as a reader would type them."""
    program = tmp_path / "document.py"
    program.write_text("\n".join(blocks(document, "python")))
    _execute([sys.executable, str(program)], tmp_path)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "bash")], ids=_name)
def test_bash_blocks_run(document: Path, library_path: str) -> None:
    """In the repository's root; a leading "$ " is the prompt."""
    code = "\n".join(re.sub(r"^\$ ", "", block, flags=re.MULTILINE) for block in blocks(document, "bash"))
    _execute(["bash", "-euo", "pipefail", "-c", code], ROOT)


def test_what_inspect_is_shown_to_say(library_path: str, tmp_path: Path) -> None:
    """The text under the first commands of docs/cli.md, kernels of GPUs included."""
    from flashonnx._capi import CUDA, Library

    try:
        Library(library_path).device(CUDA, 0)
    except NotImplementedError:
        pytest.skip("a library without CUDA")
    except RuntimeError:
        pass  # there need not be a device
    page = ROOT / "docs" / "cli.md"
    model, inspect = blocks(page, "bash")[:2]
    (shown,) = [match["code"] for match in FENCE.finditer(page.read_text()) if match["code"].startswith("2 attentions")]
    command = ["bash", "-c", f"{model}\n{inspect}".replace('cd "$(mktemp -d)"', f"cd '{tmp_path}'")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout == shown, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(document: Path) -> None:
    """Files exist, anchors are headings; addresses on the web are well-formed (they are not fetched)."""
    text = FENCE.sub("", document.read_text())
    wrong = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"https?://[\w.-]+(/\S*)?$|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document if not path else (document.parent / path)
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            wrong.append(target)
    assert not wrong


def _anchors(document: Path) -> set[str]:
    """GitHub's names of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_fence_is_understood() -> None:
    """A fence that the pattern misses would silently not be run."""
    for document in DOCUMENTS:
        lines = [line for line in document.read_text().splitlines() if line.startswith("```")]
        assert len(lines) == 2 * len(list(FENCE.finditer(document.read_text()))), _name(document)
