"""The pages of docs/ say what the code says: messages that it quotes exist, generated pages are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# The words of ONNX Runtime and PyTorch.
FOREIGN = {
    "… is not a registered function/op",
    "Could not find an implementation for …",
    "bound to different types (tensor(float16) and tensor(float)",
    "Failed to export the model with torch.export",
    "Exporting a model while it is in training mode",
}


def sources() -> str:
    """All strings of the code as they read when adjacent literals are one."""
    files = [
        *(ROOT / "export").rglob("*.py"),
        *(path for path in (ROOT / "python" / "flashonnx").rglob("*.py") if "export" not in path.parts),
        *(path for path in (ROOT / "plugin").rglob("*.c*") if path.is_file()),
    ]
    text = "\n".join(path.read_text() for path in sorted(files))
    return re.sub(r'"\s*\n?\s*[rf]?"', "", text)


def quoted() -> list[str]:
    """The bold code of the troubleshooting page."""
    return re.findall(r"\*\*`([^`]+)`\*\*", (DOCS / "troubleshooting.md").read_text())


def test_quoted_messages_exist() -> None:
    """Each piece between the dots, in this order, in one message."""
    text, missing = sources(), []
    for message in quoted():
        pieces = [piece.strip() for piece in message.split("…") if len(piece.strip()) > 2]
        pattern = r"[^\n]{0,80}?".join(re.escape(piece.replace("\\", "")) for piece in pieces)
        if message not in FOREIGN and not re.search(pattern, text):
            missing.append(message)
    assert len(quoted()) > 25
    assert not missing


def test_support_page_is_current() -> None:
    """`python docs/support.py` writes it anew."""
    spec = importlib.util.spec_from_file_location("support", DOCS / "support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "support.md").read_text() == module.page()


def test_site_lists_every_page() -> None:
    """mkdocs.yml names each page once, and no other; what is not in docs/ is there as well."""
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(name for name in named if "/" not in name) == sorted(page.name for page in DOCS.glob("*.md"))
    assert all((ROOT / name).is_file() for name in named if "/" in name)
