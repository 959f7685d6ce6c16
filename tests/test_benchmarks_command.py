"""The benchmarks from the command to files, tables and figures, on small problems."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_benchmarks import CEILINGS, HERE, SETTINGS, TINY, Stub, measure, torch

from benchmarks import cli, long_context, plots, results, table, workloads
from benchmarks.environment import Ceilings
from benchmarks.results import MEASURED
from benchmarks.workloads import Workload


def test_from_the_command_to_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [Workload(f"d8-s{s}-{c}", "cells", "float32", 1, (2, 2), (s, s), 8, c == "causal")
             for s in (16, 32) for c in ("full", "causal")]  # fmt: skip
    growth = [Workload(f"growth-s{s}", "growth", "float32", 1, (2, 2), (s, s), 8) for s in (16, 32)]
    monkeypatch.setattr(workloads, "for_device", lambda device: [*cells, *growth, TINY])
    made = Ceilings(dict.fromkeys(("float32",), 1e12), 1e9, "made up")
    monkeypatch.setattr(cli.environment, "ceilings", lambda *_: made)
    file = tmp_path / "new" / "results.csv"
    arguments = [
        "--device",
        "cpu",
        "--budget",
        "0.001",
        "--backends",
        "ours,FA2,FA4,ORT-unfused",
        "--output",
        str(file),
    ]
    assert cli.main([*arguments, "--only", "cells,growth", "--commit", "abc"]) == 0
    printed = capsys.readouterr().out
    assert "FA4 is left out: for GPUs" in printed and "d8-s16-full: ours " in printed

    rows = results.read(file)
    assert len(rows) == 4 * 6
    for row in rows:
        assert row.status == (MEASURED if row.backend != "FA4" else "for GPUs")
        assert (row.commit, row.peer, row.ceilings) == ("abc", row.backend != "ours", "made up")
        assert "torch=" in row.versions and row.date and row.device
        assert (row.median_ms is None) == (row.backend == "FA4")
    shown = table.render(rows)
    assert "| d8-s32-causal |" in shown and "- FA4, 6×: for GPUs" in shown and "- ours / FA2: " in shown

    pytest.importorskip("matplotlib")
    named = [replace(row, group="models") for row in rows[:4]]
    figures = plots.draw([*rows, *named], tmp_path)
    assert [path.name for path in figures] == ["throughput.png", "models.png", "growth.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in figures)
    assert plots.draw([row for row in rows if row.backend == "FA4"], tmp_path / "none") == []


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = measure(
        TINY, [Stub("ours", lambda y: y, ours=True), Stub("zeros", torch.zeros_like)], SETTINGS, HERE, CEILINGS
    )
    writer = results.Writer(tmp_path / "rows.csv")
    writer.write(rows)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3  # there before the run has ended
    writer.close()
    back = results.read(tmp_path / "rows.csv")
    for row, copy in zip(rows, back, strict=True):
        for name in results.Row.__dataclass_fields__:
            value = getattr(row, name)
            assert getattr(copy, name) == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a file of results, it has no column backend, status, workload"):
        results.read(tmp_path / "other.csv")


def test_tables_of_made_up_rows() -> None:
    base = measure(TINY, [Stub("ours", lambda y: y, ours=True), Stub("peer", lambda y: y)], SETTINGS, HERE, CEILINGS)
    ours, peer = (replace(row, bound="arithmetic", group="cells") for row in base)
    rows = []
    for name, fast, slow in (("a", 400.0, 200.0), ("b", 100.0, 200.0)):
        share = fast / 800
        rows.append(replace(ours, workload=name, tflops=fast, median_ms=1.5, share_of_ceiling=share, best_peer="peer",
                            ratio_to_best_peer=fast / slow))  # fmt: skip
        rows.append(replace(peer, workload=name, tflops=slow, share_of_ceiling=slow / 800, ours_speedup=fast / slow))
    shown = table.render(rows)
    assert "| a | **400** | 200 | 800 | 2.000 peer | 50% | 1500.0 |" in shown
    assert "| b | 100 | **200** | 800 | 0.500 peer | 12% | 1500.0 |" in shown
    assert "- ours / peer: 1.000× over 2, worst 0.500× (b)" in shown
    assert table.geomean([1, 4]) == pytest.approx(2)


def test_time_that_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--device",
        "cpu",
        "--backends",
        "ours",
        "--only",
        "vit-b-b1,decode",
        "--output",
        str(tmp_path / "r.csv"),
    ]
    assert cli.main([*arguments, "--limit", "-1"]) == 1
    assert "--limit: 2 workloads were not begun: vit-b-b1, decode-b1-s2048" in capsys.readouterr().out


def test_list_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--device", "cpu", "--list", "--output", str(tmp_path / "none.csv")]) == 0
    shown = capsys.readouterr().out
    assert "minilm-b4-s512" in shown and "FA4" in shown and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        cli.main(["--device", "cpu", "--only", "nothing"])
    assert "no workload or group is called 'nothing'" in capsys.readouterr().err


def test_memory_of_a_long_context(tmp_path: Path) -> None:
    """Every variant is right, in chunks and in a step; what a plain graph holds is far more."""
    file = tmp_path / "new" / "context.csv"
    arguments = ["--device", "cpu", "--contexts", "300", "--chunk", "128", "--page-size", "16", "--output", str(file)]
    assert long_context.main(arguments) == 0
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["variant"], row["phase"]) for row in rows] == [
        (variant, phase) for variant in ("ours", "ours, pages of 16", "concat") for phase in ("prefill", "decode")
    ]
    assert {row["status"] for row in rows} == {MEASURED}
    assert {float(row["cache_mib"]) for row in rows} == {2 * 300 * 8 * 128 * 2 / 2**20}
