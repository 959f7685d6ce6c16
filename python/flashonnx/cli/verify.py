"""`flashonnx verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from flashonnx.cli._files import given_inputs, report_files, write
from flashonnx.cli._output import Json, dims, emit, mark, number, say, table, working

if TYPE_CHECKING:
    from flashonnx._bisect import NodeError
    from flashonnx._compare import OutputError
    from flashonnx._verify import Verdict

KINDS = ("html", "json", "png")


def verify(
    original: Annotated[Path, typer.Argument(help="The original ONNX file.", show_default=False)],
    fused: Annotated[Path, typer.Argument(help="The fused ONNX file.", show_default=False)],
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=VALUE[,VALUE...]",
            help="Value of a symbolic dimension, or several, one a case; repeatable. Default: four cases.",
        ),
    ] = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(help="A .npz file of inputs by name, instead of random ones; a case each, repeatable."),
    ] = None,
    bisect: Annotated[
        bool | None,
        typer.Option(
            "--bisect/--no-bisect",
            help="Compare behind each fused node too, and find the node at which the models part. "
            "Default: if they differ, or for a report.",
        ),
    ] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="ONNX Runtime's execution provider, e.g. CPU; repeatable.")
    ] = None,
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            metavar="html|json|png|FILE",
            help="Also write a report: a page, data or the figure. Repeatable.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run both models on the same inputs and judge the difference by the original's own rounding error.

    Exits with 1 if they differ.
    """
    import flashonnx

    files = report_files(report, KINDS, Path(f"{fused.stem}.verify"))
    if "png" in files:
        from flashonnx.cli._figures import require

        require()
    cases, sizes = given_inputs(inputs), swept(dims(dim))
    if files and bisect is None:
        bisect = True
    with working(f"verifying {fused.name}"):
        verdict = flashonnx.verify(original, fused, cases, dims=sizes, providers=providers(provider), bisect=bisect)
        content = _content(verdict)
        _write(verdict, content, files, original, fused)
    if json:
        emit(content | {"reports": list(files.values())})
    else:
        _tell(verdict)
        for path in files.values():
            say(f"report: {path}", "dim")
    if not verdict.ok:
        raise typer.Exit(1)


def swept(found: dict[str, list[int]]) -> dict[str, int | Sequence[int]] | None:
    """As `flashonnx.verify` takes them: one value for every case, or one for each."""
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()} or None


def providers(names: Sequence[str] | None) -> list[str] | None:
    """ONNX Runtime's names, from those or from what stands before "ExecutionProvider"."""
    import onnxruntime

    suffix = "ExecutionProvider"
    found = [name if name.endswith(suffix) else f"{name}{suffix}" for name in names or ()]
    there = onnxruntime.get_available_providers()
    if missing := [name for name in found if name not in there]:
        raise ValueError(f"--provider: this ONNX Runtime has no {', '.join(missing)}, but {', '.join(there)}")
    return found or None


def _write(verdict: Verdict, content: dict[str, Any], files: dict[str, Path], *models: Path) -> None:
    import json as json_module

    if "json" in files:
        write(files["json"], json_module.dumps(content, indent=2, allow_nan=False))
    if "png" in files:
        from flashonnx.cli._figures import errors

        write(files["png"], errors(verdict))
    if "html" in files:
        from flashonnx.cli._verify_page import page

        write(files["html"], page(verdict, *(str(model) for model in models)))


def _content(verdict: Verdict) -> dict[str, Any]:
    return {
        "ok": verdict.ok,
        "reference": verdict.reference,
        "cases": verdict.cases,
        "outputs": [_error(output) for output in verdict.outputs],
        "nodes": [_node(node) for node in verdict.nodes],
        "parted": _node(verdict.parted) if verdict.parted is not None else None,
        "notes": verdict.notes,
    }


def _error(error: OutputError) -> dict[str, Any]:
    case, index = error.worst
    return {
        "name": error.name,
        "rows": error.rows,
        "ok": error.ok,
        "error": number(error.error),
        "allowed": number(error.allowed),
        "original_error": number(error.original_error),
        "difference": number(error.difference),
        "scale": number(error.scale),
        "worst": {"case": case, "index": list(index)},
        "special": error.special,
        "compared": error.compared,
    }


def _node(node: NodeError) -> dict[str, Any]:
    from flashonnx._bisect import QUANTILES

    return {
        "node": node.node,
        "original_node": node.original_node,
        "value": node.value,
        **{key: value for key, value in _error(node.error).items() if key != "name"},
        "quantiles": list(QUANTILES),
        "distribution": [number(q) for q in node.distribution],
        "original_distribution": [number(q) for q in node.original_distribution],
    }


def _tell(verdict: Verdict) -> None:
    count = f"{len(verdict.cases)} case{'' if len(verdict.cases) == 1 else 's'}"
    say(f"The models {'agree' if verdict.ok else 'DIFFER'}", "bold green" if verdict.ok else "bold red")
    say(f"{count}, measured against {verdict.reference}\n")
    rows = [[*_error_cells(output), output.name, output.remark] for output in verdict.outputs]
    heads = ["", "error", "allowed", "original's", "fused - original"]
    table([*heads, "output", ""], rows, right=(1, 2, 3, 4))
    if verdict.nodes:
        say("")
        rows = [[*_error_cells(node.error), node.value, node.node] for node in verdict.nodes]
        table([*heads, "value", "made by"], rows, right=(1, 2, 3, 4))
    if verdict.parted is not None:
        say(f"\nThey part at {verdict.parted.node}, value '{verdict.parted.value}'", "bold red")
        if verdict.parted.original_node != verdict.parted.node:
            say(f"in the original it is made by {verdict.parted.original_node}")
    say("")
    for i, case in enumerate(verdict.cases):
        say(f"case {i}: {case}", "dim")
    for note in verdict.notes:
        say(f"note: {note}", "italic")


def _error_cells(error: OutputError) -> list[Any]:
    from flashonnx._compare import ALL

    state = mark(error.ok, no="differs") if error.rows == ALL else Text("does not count", "dim")
    numbers = (error.error, error.allowed, error.original_error, error.difference)
    return [state, *(f"{x:.3g}" for x in numbers)]
