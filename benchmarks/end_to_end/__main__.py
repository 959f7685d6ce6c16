"""`python -m benchmarks.end_to_end prepare FOLDER`, then `python -m benchmarks.end_to_end run FOLDER --output FILE`.

The two may be on different machines: `prepare` needs PyTorch, transformers and ONNX Runtime but no GPU, and with
--no-weights its folder is small; `run` fills in random weights that are missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import environment
from benchmarks.end_to_end import measure, models, prepare, results, weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Does one of the two."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.step == "prepare":
        try:
            chosen = models.select(options.only)
        except ValueError as error:
            parser.error(str(error))
        for subject in chosen:
            prepare.prepare(subject, options.folder, _say)
        if not options.no_weights:
            for path in weights.fill(sorted(options.folder.glob("*.onnx"))):
                _say(f"{path.name}: random weights, {path.stat().st_size >> 20} MiB")
        return 0
    return _run(options, parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parser.add_subparsers(dest="step", required=True)
    names = ", ".join(subject.name for subject in models.SUBJECTS)
    make = steps.add_parser("prepare", help="make the graphs, and compare small ones of the same kind on the CPU")
    run = steps.add_parser("run", help="measure what was prepared")
    for step in (make, run):
        step.add_argument("folder", type=Path)
        step.add_argument("--only", default="", metavar="NAMES", help=f"of {names}; with commas, * and ?")
    make.add_argument("--no-weights", action="store_true", help="leave them to `run`")
    add = run.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="CSV; rows are added to what is there")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch has it")
    add("--variants", default="", metavar="NAMES", help="separated by commas; default: all")
    add("--budget", type=float, default=1.0, metavar="S", help="seconds of measured time for each session")
    add("--cuda-graph", action="store_true", help="let ONNX Runtime capture each session in a CUDA graph")
    add("--profile", type=Path, metavar="FILE", help="also write where the device's time goes, kernel by kernel")
    add("--commit", help="what to note as the commit; default: what git says")
    return parser


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = sorted(options.folder.glob("*.json"))
    if options.only:
        names = {subject.name for subject in models.select(options.only)}
        found = [path for path in found if path.stem in names]
    if not found:
        parser.error(f"nothing was prepared in {options.folder}")
    only = tuple(filter(None, options.variants.split(",")))
    settings = measure.Settings(device, options.budget, options.cuda_graph, only)
    from benchmarks.cli import library_version

    where = environment.describe(device, library_version(), options.commit)
    for path in found:
        subject, _ = measure.load(path)
        done = measure.measure(path, settings, _say, options.profile)
        clocks = environment.clocks() if device == "cuda" else ""
        made = results.rows(subject, done, settings, where, clocks)
        results.append(options.output, made)
        for row in made:
            if row.median_ms is not None:
                _say(_line(row))
    return 0


def _line(row: results.Row) -> str:
    parts = [f"{row.subject:15} {row.launch:6} {row.variant:26} {row.median_ms:8.3f} ms"]
    parts += [] if row.over_plain is None else [f"{row.over_plain:.2f}x plain"]
    parts += [] if row.over_ort is None else [f"{row.over_ort:.2f}x {row.best_ort}"]
    parts += [] if row.device_mib is None else [f"{row.device_mib:.0f} MiB"]
    parts += [] if row.error is None else [f"error {row.error:.1e}"]
    return "  ".join(parts)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
