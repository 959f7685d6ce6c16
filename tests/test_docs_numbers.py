"""The tables of docs/performance.md and docs/generation.md have the numbers of benchmarks/results/, as they say."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "performance.md").read_text()
MODELS = ("cuDNN", "FA4", "FA2", "ORT-Attention", "ORT-MHA", "ORT-GQA", "ORT-unfused")
NAMES = {
    "BERT-base, 8 × 512": "bert-b8-s512",
    "BERT-base, 32 × 128": "bert-b32-s128",
    "ViT-L/16, 16 images": "vitl16-b16",
    "Llama of 1.5 billion, 2048": "llama1b-s2048",
    "the same, 8192": "llama1b-s8192",
}
Rows = dict[str, dict[str, dict[str, str]]]


def measured(file: str, subject: str, way: str) -> Rows:
    """Rows by subject and way."""
    found: Rows = defaultdict(dict)
    with (ROOT / "benchmarks" / "results" / file).open() as lines:
        for row in csv.DictReader(lines):
            found[row[subject]][row[way]] = row
    return found


def table(head: str) -> Iterator[list[str]]:
    """The cells of each row under the line that begins with `head`."""
    lines = PAGE[PAGE.index(head) :].splitlines()[2:]
    for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def says(cell: str, value: float) -> bool:
    """Whether the cell is that number, rounded to as many places as it has."""
    number = cell.removesuffix(r"\*")
    digits = len(number.partition(".")[2]) if "e" not in number else -1
    return number == f"{value:.4g}" if digits < 0 else abs(float(number) - value) <= 0.51 * 10**-digits


def test_models() -> None:
    rows, seen = measured("h200-models.csv", "workload", "backend"), 0
    for name, microseconds, tflops, *times in table("| | ours, µs |"):
        ours = rows[name]["ours"]
        assert says(microseconds, 1e3 * float(ours["median_ms"])) and says(tflops, float(ours["tflops"])), name
        for way, cell in zip(MODELS, times, strict=True):
            speedup = rows[name].get(way, {}).get("ours_speedup", "")
            assert says(cell, float(speedup)) if speedup else cell == "–", (name, way)
            seen += bool(speedup)
    assert seen > 80


def test_cells() -> None:
    rows = measured("h200-cells.csv", "workload", "backend")
    ways = {way: [float(row[way]["ours_speedup"]) for row in rows.values()] for way in ("FA4", "cuDNN")}
    ways["better"] = list(map(min, *ways.values()))
    for name, way in (
        ("FlashAttention-4", "FA4"),
        ("cuDNN", "cuDNN"),
        ("the better of the last two in each", "better"),
    ):
        line = re.search(rf"^\| {name} \| ([\d.]+) times as fast \(worst ([\d.]+), best ([\d.]+)\) \|$", PAGE, re.M)
        assert line is not None, name
        mean = math.exp(sum(map(math.log, ways[way])) / len(ways[way]))
        assert all(map(says, line.groups(), (mean, min(ways[way]), max(ways[way])))), (name, mean)


def test_float32() -> None:
    rows = measured("h200-float32.csv", "workload", "backend")
    for dim, length, *cells in table("| head size | tokens | `tf32` |"):
        for form, (ours, theirs, times) in (("full", cells[:3]), ("causal", cells[3:])):
            fast, slow = (float(rows[f"fp32-d{dim}-s{length}-{form}"][way]["tflops"]) for way in ("ours", "mem-eff"))
            assert says(ours, fast) and says(theirs, slow) and says(times.split()[0], fast / slow)


def test_growth() -> None:
    """One sequence of 16384 tokens, written out and fused."""
    rows = measured("h200-models.csv", "workload", "backend")["growth-s16384"]
    found = re.search(r"At 16384 tokens that is ([\d.]+) ms and ([\d.]+) GiB for ([\d.]+) ms and (\d+) MiB", PAGE)
    assert found is not None
    plain, ours = (rows[way] for way in ("ORT-unfused", "ours"))
    memory = float(plain["peak_mib"]) / 1024, float(ours["peak_mib"])
    times = float(plain["median_ms"]), float(ours["median_ms"])
    assert all(map(says, found.groups(), (times[0], memory[0], times[1], memory[1])))


def test_generation() -> None:
    """The table of docs/generation.md."""
    rows, seen = measured("h200-generation.csv", "batch", "way"), 0
    page = (ROOT / "docs" / "generation.md").read_text()
    names = {
        "`Generator`": "ours",
        "the same, in pages": "ours-paged",
        "its graph with": "gqa",
        "PyTorch's": "concatenated",
    }
    for name, way in names.items():
        cells = re.search(rf"^\| {name}[^|]*\| (\d+) \| (\d+) \|$", page, re.M)
        assert cells is not None, name
        for batch, cell in zip(("1", "8"), cells.groups(), strict=True):
            assert says(cell, float(rows[batch][way]["tokens_per_second"])), (name, batch)
            seen += 1
    assert seen == 8


@pytest.mark.parametrize("name", NAMES)
def test_whole_models(name: str) -> None:
    """A star says that the graph without MatMulAddFusion is the faster one."""
    rows = measured("h200-end-to-end.csv", "subject", "variant")[NAMES[name]]
    (cells,) = [cells for first, *cells in table("| | plain | ours |") if first == name]
    milliseconds = {way: float(row["median_ms"]) for way, row in rows.items() if row["median_ms"]}
    best = next(row["best_ort"] for row in rows.values())
    ways = ("plain", "ours", best.removesuffix("+add"), "ours-on-ort", "ours-on-ort-no-attention")
    found = []
    for way, cell in zip(ways, cells, strict=False):
        added = milliseconds.get(f"{way}+add")
        chosen = added if cell.endswith("*") else milliseconds.get(way)
        found.append(chosen if added is None or chosen is None else min(chosen, added))
        assert cell == "fails" if chosen is None else says(cell, found[-1] or 0), (way, cell, chosen)
    plain, _, ort, ours, bare = found
    assert says(cells[5], plain / ours) if plain else cells[5] == "–"
    assert says(cells[6], ort / ours) and says(cells[7], ort / bare)
