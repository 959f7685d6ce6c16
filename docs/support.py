"""Writes support.md from the kernels' table: `python docs/support.py`. A test sees that the page is current.

The rows stand in plugin/kernels/attention.cpp (kTable), their meaning in table.h.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
KERNELS = ROOT / "plugin" / "kernels"

HEAD = """\
# What is supported

<!-- written by docs/support.py from plugin/kernels/attention.cpp; do not edit -->

Every kernel of the library. A problem gets the first one, from the left, that is for its device and does all it asks
for, so faster kernels stand before more general ones; `FLASHONNX_LOG=1` prints which one that was. Where none fits, the
session says so with each kernel's reason. Before any kernel runs, a past is joined with the new keys and values, new
keys are appended to a cache, and rotary embeddings are applied, so none of these is a kernel's own.

"""
TAIL = """
The largest head size is that of Q and K or of V, whichever is larger; the two may differ. A kernel may leave more to
the next one. The reasons, as an error would say them (`kernel NAME ...`):

"""


def page() -> str:
    """The text of support.md."""
    source = (KERNELS / "attention.cpp").read_text()
    features = _features(source)
    table = re.search(r"kTable\[\] = \{(.+?)\n\};", source, re.DOTALL)
    assert table is not None, "plugin/kernels/attention.cpp: no kTable"
    rows = [_row(text) for text in re.findall(r"\{(\"\w+\".+?)\}", table[1], re.DOTALL)]
    columns = [[name, _device(row), _types(source, row[4]), row[5]] for name, row in rows]
    columns = [[*column, *_marks(source, row[6], features)] for column, (_, row) in zip(columns, rows, strict=True)]
    labels = ["", "runs on", "types of Q, K, V", "largest head size", *features]
    lines = ["| " + " | ".join(cells) + " |" for cells in zip(labels, *columns, strict=True)]
    lines.insert(1, "|---" * (len(rows) + 1) + "|")
    reasons = [f"- `{name}` {reason}" for name, _ in rows for reason in _refusals(name)]
    return HEAD + "\n".join(lines) + "\n" + TAIL + "\n".join(reasons) + "\n"


def _row(text: str) -> tuple[str, list[str]]:
    fields = [field.strip() for field in text.split(",")]
    return fields[0].strip('"'), fields


def _device(fields: list[str]) -> str:
    if fields[1] == "FLASHONNX_CPU":
        return "CPU"
    low, high = (f"{int(arch) // 10}.{int(arch) % 10}" if arch.isdigit() else "" for arch in fields[2:4])
    return f"GPU, compute capability {low}" + ("" if low == high else " and newer" if not high else f" to {high}")


def _constant(source: str, name: str) -> str:
    found = re.search(rf"constexpr uint32_t {name} =(.+?);", source, re.DOTALL)
    assert found is not None, f"plugin/kernels/attention.cpp: no {name}"
    return found[1]


def _types(source: str, name: str) -> str:
    return ", ".join(kind.lower() for kind in re.findall(r"1u << FLASHONNX_(\w+)", _constant(source, name)))


def _features(source: str) -> dict[str, str]:
    """What errors call a feature, and its name in the code, in the order of their bits."""
    enum = re.findall(r"^  (k\w+) = 1u << (\d+)", (KERNELS / "table.h").read_text(), re.MULTILINE)
    names = re.search(r"kFeatureNames\[\] = \{(.+?)\};", source, re.DOTALL)
    assert names is not None, "plugin/kernels/attention.cpp: no kFeatureNames"
    words = re.findall(r'"([^"]+)"', names[1])
    named = dict(zip(words, (code for code, _ in enum), strict=True))
    return {word: code for word, code in named.items() if code not in ("kCache", "kRotary")}


def _marks(source: str, expression: str, features: dict[str, str]) -> list[str]:
    has = _bits(source, expression)
    return ["yes" if has & _bits(source, code) else "no" for code in features.values()]


def _bits(source: str, expression: str) -> int:
    """What an expression of features and constants (a | b & ~c) comes to."""
    bits = dict(re.findall(r"^  (k\w+) = 1u << (\d+)", (KERNELS / "table.h").read_text(), re.MULTILINE))
    names = set(re.findall(r"k\w+", expression))
    values = {n: 1 << int(bits[n]) if n in bits else _bits(source, _constant(source, n)) for n in names}
    return eval(" ".join(expression.split()), {"__builtins__": {}}, values)  # C's operators are Python's


def _refusals(name: str) -> list[str]:
    """The texts that a kernel's own check returns."""
    texts = []
    for file in sorted((KERNELS / name).glob("launch.c*")):
        body = re.search(r"const char\* refusal\(.+?^\}", file.read_text(), re.DOTALL | re.MULTILINE)
        if body is not None:
            texts += re.findall(r'return "([^"]+)"', body[0])
            texts += [text for other in re.findall(r"return (\w+)::refusal", body[0]) for text in _refusals(other)]
    return texts


if __name__ == "__main__":
    PAGE.write_text(page())
