"""Markdown tables of a CSV file: `python -m benchmarks.table FILE.csv ...`."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.results import MEASURED, Row, read


def render(rows: Sequence[Row]) -> str:
    """All tables: where and with what, one table a group, what peers lose against ours, what was not measured."""
    if not rows:
        return "No rows."
    parts = [_header(rows)]
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        parts += [f"## {group}", _group(mine), _summary(mine)]
    parts.append(_missing(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _header(rows: Sequence[Row]) -> str:
    runs = dict.fromkeys((r.device, r.driver, r.versions, r.commit, r.date, r.ceilings) for r in rows)
    lines = []
    for device, driver, versions, commit, date, ceilings in runs:
        more = (f"driver {driver}" if driver else "", versions, f"commit {commit}" if commit else "", date)
        lines.append("; ".join(["**" + device + "**", *filter(None, more), f"ceilings: {ceilings}"]))
    return "\n\n".join(lines)


def _group(rows: Sequence[Row]) -> str:
    """A line for each workload: each backend's speed, ours against the best peer, and the share of the ceiling."""
    backends = list(dict.fromkeys(r.backend for r in rows if r.status == MEASURED))
    if not backends:
        return "Nothing was measured."
    in_memory = all(row.bound == "memory" for row in rows)
    unit = "GB/s" if in_memory else "TFLOP/s"
    lines = [
        ["workload", *backends, "ceiling", "ours / best peer", "of ceiling", "ours, µs"],
        ["---", *["---:"] * (len(backends) + 4)],
    ]
    for workload in dict.fromkeys(r.workload for r in rows):
        cells = {r.backend: r for r in rows if r.workload == workload}
        speeds = {name: _speed(row, in_memory) for name, row in cells.items() if row.status == MEASURED}
        fastest = max(speeds.values(), default=0)
        texts = [_bold(speeds[b], fastest) if b in speeds else "–" for b in backends]
        ours = cells.get("ours")
        ceiling = _ceiling(speeds, cells)
        if ours is None or ours.status != MEASURED or ours.median_ms is None:
            last = ["–"] * 3
        else:
            ratio = f"{ours.ratio_to_best_peer:.3f} {ours.best_peer}" if ours.ratio_to_best_peer else "–"
            last = [ratio, f"{ours.share_of_ceiling:.0%}", f"{ours.median_ms * 1e3:.1f}"]
        lines.append([workload, *texts, ceiling, *last])
    return f"{unit}:\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _summary(rows: Sequence[Row]) -> str:
    """How much faster ours is than each other backend: geometric mean, and the worst cell."""
    lines = []
    for backend in dict.fromkeys(r.backend for r in rows if r.backend != "ours"):
        cells = [r for r in rows if r.backend == backend and r.status == MEASURED and r.ours_speedup]
        if cells:
            worst = min(cells, key=lambda r: r.ours_speedup or 0)
            mean = geomean(r.ours_speedup or 0 for r in cells)
            lines.append(f"- ours / {backend}: {mean:.3f}× over {len(cells)}, worst {worst.ours_speedup:.3f}× "
                         f"({worst.workload})")  # fmt: skip
    best = [r for r in rows if r.backend == "ours" and r.status == MEASURED and r.ratio_to_best_peer]
    if best:
        worst = min(best, key=lambda r: r.ratio_to_best_peer or 0)
        mean = geomean(r.ratio_to_best_peer or 0 for r in best)
        lines.append(f"- ours / best peer of each: {mean:.3f}× over {len(best)}, worst {worst.ratio_to_best_peer:.3f}× "
                     f"({worst.workload})")  # fmt: skip
    return "\n".join(lines)


def _missing(rows: Sequence[Row]) -> str:
    reasons = Counter((r.backend, r.status) for r in rows if r.status != MEASURED)
    if not reasons:
        return ""
    lines = [f"- {backend}, {count}×: {reason}" for (backend, reason), count in reasons.items()]
    return "\n".join(["## Not measured", "", *lines])


def _speed(row: Row, in_memory: bool) -> float:
    return (row.gbps if in_memory else row.tflops) or 0.0


def _ceiling(speeds: dict[str, float], cells: dict[str, Row]) -> str:
    """The ceiling in the table's unit; any measured row gives the conversion from time."""
    for name, speed in speeds.items():
        share = cells[name].share_of_ceiling
        if share:
            return _number(speed / share)
    return "–"


def _bold(value: float, fastest: float) -> str:
    return f"**{_number(value)}**" if value == fastest else _number(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    print(render(read(*parser.parse_args(arguments).csv)), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
