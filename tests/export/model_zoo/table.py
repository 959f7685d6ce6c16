"""The table in docs/fusion.md: what the fusion makes of every export of the zoo, beside what others make of it.

    cd tests/export && python -m model_zoo.table FOLDER

exports what FOLDER does not hold yet, fuses and compares all of it, and writes the table. An export takes seconds,
FOLDER makes it possible to stop and to go on. The tests require of every export what the table says of it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "fusion.md"
_BEGIN, _END = "<!-- begin of what model_zoo/table.py writes -->", "<!-- end of it -->"
_PEERS = ("ONNX Runtime", "onnxscript")
_NONE = "–"


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    """The zoo as the table has it: by model and attention, its cases by column."""
    from model_zoo.cases import cases

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for case in cases():
        found.setdefault((case.entry.id, _variant(case)), {})[case.route] = case
    return found


def _variant(case: Any) -> str:
    more = [case.dtype] * (case.dtype != "float32") + ["fixed axes"] * case.fixed
    return ", ".join([case.attention, *more])


def expected() -> dict[str, tuple[int, int]]:
    """What the committed table says: for each export how many attentions are fused, and how many there are."""
    from model_zoo.check import ROUTES

    written = {}
    zoo = rows()
    for cells in _lines(DOCUMENT.read_text()):
        for route, cell in zip(ROUTES, cells[2:], strict=False):
            if counts := re.fullmatch(r"(\d+) of (\d+)", cell):
                case = zoo[cells[0], cells[1]][route]
                written[case.id] = (int(counts[1]), int(counts[2]))
    return written


def _lines(text: str) -> list[list[str]]:
    """The cells of every row below the head."""
    table = text[text.index(_BEGIN) : text.index(_END)]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def outcomes(folder: Path, chosen: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """What became of the exports, or of those with a word of `chosen` in their ids; what `folder` has is kept."""
    from model_zoo import peers
    from model_zoo.cases import cases
    from model_zoo.check import outcome

    shown = [_for_peers(by_route) for by_route in rows().values()]
    done = {}
    for case in cases():
        if chosen and not any(part in case.id for part in chosen):
            continue
        kept = folder / f"{case.file}.json"
        if not kept.exists():
            result: dict[str, Any] = dataclasses.asdict(outcome(case, folder))
            if case in shown:
                for name, fusion in zip(_PEERS, (peers.onnxruntime, peers.onnxscript), strict=True):
                    result[name] = peers.cell(fusion, folder / f"{case.file}.onnx", case)
            kept.write_text(json.dumps(result, indent=1))
            print(case.id, {key: value for key, value in result.items() if value not in ((), [])}, flush=True)
        done[case.id] = json.loads(kept.read_text())
    return done


def _for_peers(by_route: dict[str, Any]) -> Any:
    """The export of a row that the others' fusions are tried on; None without one."""
    return by_route.get("torch 18", by_route.get("TorchScript"))


def text(done: dict[str, dict[str, Any]]) -> str:
    """The table and what is left, in Markdown."""
    from model_zoo.check import ROUTES

    head = ["model", "attention", *ROUTES, *_PEERS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    reasons: dict[str, dict[str, None]] = {}
    sums = {"exports": 0, "sites": 0, "fused": 0, **dict.fromkeys(_PEERS, 0)}
    compared = faulty = 0
    for (model, variant), by_route in rows().items():
        cells = []
        for route in ROUTES:
            result = done[by_route[route].id] if route in by_route else None
            cells.append(f"{result['fused']} of {result['found']}" if result else _NONE)
            if result is None:
                continue
            sums["exports"] += 1
            sums["sites"] += result["found"]
            sums["fused"] += result["fused"]
            for reason in result["reasons"]:
                reasons.setdefault(_general(reason), {})[f"{model} ({variant}, {route})"] = None
        plain = _for_peers(by_route)
        theirs = [done[plain.id][name] if plain else _NONE for name in _PEERS]
        for name, cell in zip(_PEERS, theirs, strict=True):
            sums[name] += int(cell.split()[0]) if cell[0].isdigit() else 0
            faulty += "(" in cell or "fails" in cell
        compared += done[plain.id]["found"] if plain else 0
        cells += theirs
        lines.append(f"| {model} | {variant} | {' | '.join(cells)} |")
    wrong = [id for id, result in done.items() if result["wrong"]]
    summary = (
        f"{len({model for model, _ in rows()})} models, {sums['exports']} exports, {sums['sites']} attentions: "
        f"{sums['fused']} fused, {sums['sites'] - sums['fused']} left with a reason, {len(wrong)} exports "
        f"with a wrong answer. Of the {compared} attentions in the files that the last two columns are about, ONNX "
        f"Runtime's optimizer fuses {sums[_PEERS[0]]}, onnxscript's fusions {sums[_PEERS[1]]}; {faulty} of these "
        "cells say what is wrong with the result."
    )
    left = [f"- {reason}: {', '.join(where)}" for reason, where in sorted(reasons.items())]
    rest = ["", "What is left, and the report's reason:", "", *left] if left else []
    return "\n".join([summary, "", *lines, *rest])


def _general(reason: str) -> str:
    """A reason without the names and numbers of one graph."""
    return re.sub(r"\?\d+", "?", re.sub(r"'[^']*'", "'…'", reason))


def main(folder: Path, chosen: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    done = outcomes(folder, chosen)
    if chosen:
        return
    before, _, rest = DOCUMENT.read_text().partition(_BEGIN)
    DOCUMENT.write_text(f"{before}{_BEGIN}\n{text(done)}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
