"""`flashonnx bench`."""

from __future__ import annotations

import csv
import io
import json as json_module
import tempfile
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from flashonnx.cli._files import report_files, write
from flashonnx.cli._output import Dim, Json, emit, lengths, say, table, units, working

if TYPE_CHECKING:
    from flashonnx.cli._contenders import Contender
    from flashonnx.cli._measure import Result

KINDS = ("html", "json", "png", "csv")
_LENGTHS = {"cpu": "128,256,512,1024,2048", "cuda": "512,1024,2048,4096,8192,16384"}
HEADS, SIZE = 8, 64  # of attention alone
FIXED = 0  # the length of a model of which no axis varies
_CLOSE = 1e-2  # of the largest value: what float16 models differ by at most, when nothing is wrong


class Device(StrEnum):
    """Where to measure."""

    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """Of the operator's inputs."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


def bench(
    model: Annotated[
        Path | None, typer.Argument(help="The original ONNX file. Default: attention alone.", show_default=False)
    ] = None,
    fused: Annotated[
        Path | None, typer.Argument(help="The fused file. Default: MODEL, fused on the way.", show_default=False)
    ] = None,
    length: Annotated[
        str | None, typer.Option("--lengths", metavar="N,N,...", help="Sequence lengths, or what else is not fixed.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Size of the batch.")] = 1,
    dim: Dim = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of attention alone.")] = HEADS,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads; default: as many as query heads.")] = None,
    size: Annotated[int, typer.Option(min=1, help="Size of a head.")] = SIZE,
    dtype: Annotated[
        DType | None, typer.Option(help="Type of attention alone; default: float16 on a GPU, else float32.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    device: Annotated[Device | None, typer.Option(help="Default: cuda where ONNX Runtime and a GPU are there.")] = None,
    peers: Annotated[
        str, typer.Option(metavar="NAMES", help="Of those named in the table, separated by commas; default: all.")
    ] = "",
    budget: Annotated[float, typer.Option(min=0, metavar="S", help="Seconds for each one at each length.")] = 0.5,
    threads: Annotated[int, typer.Option(min=0, help="Of the CPU; 0: the runtime's own choice.")] = 0,
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report", metavar="html|json|png|csv|FILE", help="Also write a report, the figure or data. Repeatable."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure time and peak memory by length: of a model before and after, or of attention beside its peers.

    Times are those of whole calls, in turns, inputs and outputs on the device. Every answer is checked, and a wrong
    one gets no time. Exits with 1 if the fused one was wrong, or was measured at no length; a length beyond what the
    model takes, or the machine has memory for, has a line that says so.
    """
    stem = Path(f"{model.stem}.bench" if model is not None else "attention.bench")
    files = report_files(report, KINDS, stem)
    if "png" in files:
        from flashonnx.cli._figures import require

        require()
    alone = {
        "--heads": heads != HEADS,
        "--kv-heads": kv_heads,
        "--size": size != SIZE,
        "--dtype": dtype,
        "--causal": causal,
    }
    for option in [option for option, given in alone.items() if given and model is not None]:
        raise ValueError(f"bench: {option} is of attention alone, not of a model")
    if dim and model is None:
        raise ValueError("bench: --dim is of a model, of which none is given")
    best = _default_device(model is not None)
    if device is Device.CUDA and best is not Device.CUDA:
        raise ValueError("bench: --device cuda: nothing here can use a GPU; flashonnx doctor says why")
    where = (device or best).value
    wanted = _lengths(length) if length else None
    kind = (dtype or (DType.FLOAT16 if where == "cuda" else DType.FLOAT32)).value
    with working("measuring"), tempfile.TemporaryDirectory(prefix="flashonnx-") as scratch:
        if model is None:
            if kv_heads is not None and heads % kv_heads:
                raise ValueError(
                    f"bench: --heads is expected to be a multiple of --kv-heads, got {heads} and {kv_heads}"
                )
            problem = (batch, heads, kv_heads or heads, size, kind, causal)
            title, results = _operator(problem, wanted or _lengths(_LENGTHS[where]), where, peers, budget, threads)
        else:
            if peers:
                raise ValueError("bench: --peers are of attention alone, not of a model")
            fixed = lengths(dim)
            title, results = _model(model, fused, Path(scratch), wanted, batch, fixed, where, budget, threads)
        content = _content(title, results, where, threads)
        _write(content, results, files)
    if json:
        emit(content | {"reports": list(files.values())})
    else:
        _tell(content, results)
        for path in files.values():
            say(f"report: {path}", "dim")
    ours = [result for result in results if result.ours]
    if not any(r.median_ms for r in ours) or any(r.status.startswith("wrong") for r in ours):
        raise typer.Exit(1)


def _default_device(is_model: bool) -> Device:
    """CUDA where something can be measured on it: by ONNX Runtime, or attention alone by PyTorch."""
    import importlib.util

    from flashonnx._runtime import cuda_unavailable, default_providers

    if default_providers()[0].startswith("CUDA"):
        return Device.CUDA
    if not is_model and importlib.util.find_spec("torch") is not None and cuda_unavailable() is None:
        import torch

        return Device.CUDA if torch.cuda.is_available() else Device.CPU
    return Device.CPU


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"bench: --lengths are expected as numbers, separated by commas, got '{text}'")
    return sorted({int(part) for part in parts})


def _operator(
    shape: tuple[int, int, int, int, str, bool], wanted: list[int], device: str, peers: str, budget: float, threads: int
) -> tuple[str, list[Result]]:
    from flashonnx.cli._contenders import Operator, operator_contenders, wrong
    from flashonnx.cli._measure import measure

    problem = Operator(*shape)
    contenders = _chosen(list(operator_contenders(problem, device, threads)), peers)

    def judge(length: int, _: str, outputs: list[Any]) -> str:
        return wrong(problem, length, outputs[0])

    return f"Attention: {problem}", measure(contenders, wanted, device, budget, problem.flops, judge)


def _chosen(contenders: list[Contender], names: str) -> list[Contender]:
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    known = [contender.name.lower() for contender in contenders]
    for name in wanted:
        if name not in known:
            raise ValueError(f"bench: --peers are {', '.join(c.name for c in contenders)}, got '{name}'")
    return [c for c in contenders if not wanted or c.name == "flashonnx" or c.name.lower() in wanted]


def _model(
    original: Path,
    fused: Path | None,
    scratch: Path,
    wanted: list[int] | None,
    batch: int,
    fixed: Mapping[str, int],
    device: str,
    budget: float,
    threads: int,
) -> tuple[str, list[Result]]:
    import flashonnx
    from flashonnx._progress import step
    from flashonnx.cli._contenders import model_contenders
    from flashonnx.cli._measure import measure
    from flashonnx.export.model import files

    for path in (original, fused):
        if path is not None:
            files.load(path)  # says what is wrong with it
    fused_before = _has_nodes(original)
    if fused is not None and not _has_nodes(fused):
        swapped = f"{original} has nodes of flashonnx and {fused} has none"
        raise ValueError(
            "bench: the original is expected first, the fused file second, but "
            + (swapped if fused_before else f"{fused} has no nodes of flashonnx")
        )
    if fused is None:
        step("fusing")
        fused = scratch / "fused.onnx"
        report = flashonnx.fuse(original, fused)[1]
        if not report.fused:
            raise ValueError(f"bench: no attention of {original} was fused, so there is nothing to compare: {report}")
    feeds, varied, others = _feeds(original, batch, fixed)
    if not varied and wanted:
        given = ", ".join(f"{name}={size}" for name, size in others.items())
        why = f"no axis of an input of {original} varies" + (f" beside {given}" if given else "")
        raise ValueError(f"bench: --lengths: {why}, so there is one length alone")
    wanted = (wanted or _lengths(_LENGTHS[device])) if varied else [FIXED]
    answers: dict[int, list[Any]] = {}

    def judge(length: int, _: str, outputs: list[Any]) -> str:
        return _differs(outputs, answers.setdefault(length, outputs))

    name = "function bodies" if fused_before else "original"
    contenders = model_contenders(original, fused, feeds, device, threads, name)
    order = [contenders[1], contenders[0]]  # the original's answers come first, for comparison
    results = measure(order, wanted, device, budget, wrong=judge)
    by = [f"by {' = '.join(varied)}"] if varied else []
    at = [f"at {', '.join(f'{name}={size}' for name, size in others.items())}"] if others else []
    return f"{original.name}, {' '.join(by + at) or 'whose shapes are fixed'}", results


def _has_nodes(model: Path) -> bool:
    import onnx

    from flashonnx._candidate import is_fused

    return is_fused(onnx.load(model, load_external_data=False))


def _feeds(
    model: Path, batch: int, fixed: Mapping[str, int]
) -> tuple[Callable[[int], Mapping[str, Any]], list[str], dict[str, int]]:
    """Inputs by length, the dimensions that are that length, and the sizes of the others that have a name."""
    import onnx

    from flashonnx._inputs import generate, input_specs, is_batch, is_ends, sums, symbols_of

    specs = input_specs(onnx.load(model, load_external_data=False))
    symbols = symbols_of(specs)
    for name in fixed:
        if name not in symbols:
            there = ", ".join(symbols) or "none with a name"
            raise ValueError(f"bench: no input of {model} has a dimension '{name}'; there are {there}")
    batches = [name for name in symbols if is_batch(name, specs) and name not in fixed]
    ends = [name for name in symbols if is_ends(name, specs) and name not in fixed]
    varied = [name for name in symbols if name not in (*fixed, *batches, *ends, *sums(specs))]
    if batch > 1 and not (batches or ends):
        raise ValueError(f"bench: --batch: the inputs of {model} have no batch that varies")

    others = dict.fromkeys(batches, batch) | dict(fixed)

    def feeds(length: int) -> Mapping[str, Any]:
        sizes = others | dict.fromkeys(ends, batch + 1) | dict.fromkeys(varied, length)
        return next(generate(specs, {name: [value] for name, value in sizes.items()}))[1]

    return feeds, varied, others


def _differs(outputs: list[Any], expected: list[Any]) -> str:
    import numpy as np

    for x, y in zip(outputs, expected, strict=True):
        if x.dtype.kind != "f" or x.shape != y.shape:
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        scale = np.abs(np.where(finite, y, 0)).max(initial=0)
        error = np.abs(np.where(finite, x - y, 0)).max(initial=0)
        if error > _CLOSE * scale:
            return f"wrong: off by {error:.3g} where values are up to {scale:.3g}: see flashonnx verify"
    return ""


def _content(title: str, results: list[Result], device: str, threads: int) -> dict[str, Any]:
    from flashonnx.cli._measure import where

    return {
        "title": title,
        "environment": where(device) | ({"threads": str(threads)} if threads else {}),
        "results": [result.content() for result in results],
    }


def _write(content: dict[str, Any], results: list[Result], files: dict[str, Path]) -> None:
    if "json" in files:
        write(files["json"], json_module.dumps(content, indent=2, allow_nan=False))
    if "csv" in files:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(results[0].content()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.content() for result in results)
        write(files["csv"], text.getvalue())
    if "png" in files:
        from flashonnx.cli._figures import growth

        write(files["png"], growth(content["title"], results))
    if "html" in files:
        from flashonnx.cli._bench_page import page

        write(files["html"], page(content, results))


def _tell(content: dict[str, Any], results: list[Result]) -> None:
    say(content["title"], "bold")
    named = (what if name in ("device", "host") else f"{name} {what}" for name, what in content["environment"].items())
    say("; ".join(named) + "\n", "dim")
    fastest: dict[int, float] = {}
    for result in results:
        if result.median_ms:
            fastest[result.length] = min(result.median_ms, fastest.get(result.length, result.median_ms))
    rows = []
    failed: dict[tuple[int, str], list[str]] = {}  # who failed for the same reason share a line
    for result in results:
        if result.median_ms is None:
            failed.setdefault((result.length, result.status), []).append(result.contender)
    for result in sorted(results, key=lambda r: (r.length, r.median_ms is None, r.median_ms or 0)):
        name = Text(result.contender, "bold" if result.ours else "")
        if result.median_ms is None:
            continue
        spread = f"{((result.high_ms or 0) - (result.low_ms or 0)) / result.median_ms:.0%}"
        ratio = result.median_ms / fastest[result.length]
        tflops = f"{result.tflops:.3g}" if result.tflops is not None else ""
        peak = units(result.peak_bytes) if result.peak_bytes is not None else ""
        rows.append([result.length or "", name, f"{result.median_ms:.4g}", spread, f"{ratio:.2f}×", tflops, peak])
    heads = ["length", "", "ms", "spread", "slower", "TFLOP/s", "peak memory"]  # 80 columns with all peers
    shown = [i for i in range(len(heads)) if i == 1 or any(str(row[i]) for row in rows)]
    if rows:
        right = [n for n, i in enumerate(shown) if i != 1]
        table([heads[i] for i in shown], [[row[i] for i in shown] for row in rows], right=right)
    for (length, status), names in failed.items():
        say(f"{f'at length {length}, ' if length else ''}{', '.join(names)}: {status}", "red")
