"""Tokens per second of a decoder with its cache in our operator, in GroupQueryAttention, and concatenated.

    python -m benchmarks.generation prepare FOLDER             # exports SmolLM2-135M; needs transformers and no GPU
    python -m benchmarks.generation run FOLDER --device cuda   # needs the folder, ONNX Runtime and our library

`ours` is flashonnx.generate.Generator as users have it. Of the other ways (samples/generate/ways.py) only the steps are
timed, not the choice of a token. All read the same prompts of random tokens and take turns; a CUDA graph is replayed
for single tokens where there is one. `agree`: how many tokens until the first that differs from the first way's, of the
request where it comes first; random prompts make ties, and float16 decides them by the order of sums. `session_us`: a
run of single tokens alone, without what the loop does between two.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "samples" / "generate"))
import ways

WAYS = ("ours", "ours-paged", "ours-no-graph", "gqa", "gqa-no-graph", "concatenated")
COLUMNS = ("device", "batch", "prompt", "new", "way", "tokens_per_second", "step_us", "session_us", "agree")
Tokens = list[list[int]]


def prepare(folder: Path, half: bool, capacity: int) -> None:
    """Exports the model that samples/generate loads, in each form."""
    import concatenating
    import flashonnx
    import run

    folder.mkdir(parents=True, exist_ok=True)
    _, model = run.load()
    if half:  # not model.half(), which rounds rotary embeddings' frequencies, too
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
    opset = {"opset": 23} if half else {}  # docs/generation.md says why
    for kind in ("static", "paged"):
        flashonnx.export_onnx(model, (), folder / f"{kind}.onnx", kv_cache=kind, **opset)
    (folder / "gqa.onnx").write_bytes(ways.with_group_query(folder / "static.onnx", capacity))
    concatenating.export(model, folder / "concatenated.onnx")


def opened(
    folder: Path, way: str, batch: int, capacity: int, chunk: int, device: str
) -> tuple[Callable[..., Any], Callable[[], None] | None]:
    """Of prompts and a number of new tokens: the tokens, and how many came in a second after the prompts.

    And a run of single tokens by itself, where it can be repeated.
    """
    graph = not way.endswith("-no-graph")
    if way.startswith("ours"):
        from flashonnx.generate import Generator

        file = folder / ("paged.onnx" if way == "ours-paged" else "static.onnx")
        generator = Generator(file, batch=batch, capacity=capacity, chunk=chunk, device=device, cuda_graph=graph)

        def ours(prompts: np.ndarray, new: int) -> tuple[Tokens, float]:
            result = generator(list(prompts), new)
            return result.tokens, result.tokens_per_second

        return ours, generator._decoder.repeat
    if way == "concatenated":
        step, again = ways.concatenated(folder / "concatenated.onnx", device), None
    else:
        step = ways.GroupQuery(folder / "gqa.onnx", batch, capacity, device, graph)
        again = step.repeat
    return lambda prompts, new: ways.greedy(step, prompts, new), again


def alone(run: Callable[[], None], count: int = 50) -> float:
    """Median seconds of a run."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(folder: Path, names: Sequence[str], batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way; one that fails has none, and says why on stderr."""
    length, new = options.prompt, options.new
    prompts = np.random.default_rng(0).integers(options.words, size=(batch, length))
    running: dict[str, tuple[Callable[..., Any], Callable[[], None] | None]] = {}
    for name in names:
        try:
            running[name] = opened(folder, name, batch, length + new, length, options.device)
            running[name][0](prompts, 8)  # loads, captures
        except Exception as error:
            running.pop(name, None)
            print(f"{name}, batch {batch}: {type(error).__name__}: {error}"[:600], file=sys.stderr)
    tokens: dict[str, Tokens] = {}
    speeds: dict[str, list[float]] = {name: [] for name in running}
    sessions: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(options.rounds):
        for name, (generate, again) in running.items():
            tokens[name], speed = generate(prompts, new)
            speeds[name].append(speed)
            if again is not None:
                sessions[name].append(alone(again))
    first = next(iter(tokens.values()), [])
    rows = []
    for name, each in speeds.items():
        speed = statistics.median(each)
        agree = min(_common(a, b) for a, b in zip(first, tokens[name], strict=True))
        session = round(1e6 * statistics.median(sessions[name]), 1) if sessions[name] else ""
        step = round(1e6 * batch / speed, 1)
        values = (options.device, batch, length, new, name, round(speed, 1), step, session, agree)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main(arguments: Sequence[str] | None = None) -> int:
    """Does one of the two; `run` prints CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = parser.add_subparsers(dest="step", required=True)
    make, run = steps.add_parser("prepare"), steps.add_parser("run")
    for step in (make, run):
        step.add_argument("folder", type=Path)
    make.add_argument("--float32", action="store_true", help="instead of float16: for CPUs")
    make.add_argument("--capacity", type=int, default=4096, help="positions in GroupQueryAttention's tables")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    run.add_argument("--batch", default="1,8", help="separated by commas")
    run.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    run.add_argument("--new", type=int, default=128, help="tokens to generate")
    run.add_argument("--words", type=int, default=49152, help="tokens that the model knows")
    run.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.step == "prepare":
        prepare(options.folder, not options.float32, options.capacity)
        return 0
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for batch in map(int, options.batch.split(",")):
        writer.writerows(measure(options.folder, options.ways.split(","), batch, options))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
