"""`flashonnx fuse`."""

from __future__ import annotations

import json as json_module
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashonnx.cli._files import Input, check_dims, check_writable, report_files, write, write_model
from flashonnx.cli._output import Dim, Json, emit, lengths, say, working

if TYPE_CHECKING:
    from flashonnx.export import Report

KINDS = ("html", "json")


class Target(StrEnum):
    """What the file is for, other than ONNX Runtime and whoever reads standard operators."""

    TENSORRT = "tensorrt"
    ONNXRUNTIME_TENSORRT = "onnxruntime-tensorrt"


class Caches(StrEnum):
    """How the keys of a decoder lie."""

    STATIC = "static"
    PAGED = "paged"


Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="ONNX file to write.", show_default=False)
]
ReportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--report", metavar="html|json|FILE", help="Also write a report; FILE ends in .html or .json. Repeatable."
    ),
]
TargetOption = Annotated[
    Target | None, typer.Option("--for", help="Prepare the file for TensorRT, or for ONNX Runtime's TensorRT provider.")
]
Portable = Annotated[
    bool, typer.Option("--portable/--no-portable", help="Add function bodies for runtimes without the library.")
]
Joined = Annotated[
    bool,
    typer.Option(
        "--join-projections/--no-join-projections", help="One product makes Q, K and V where weights are constant."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 unless every attention is fused.")]


def fuse(
    model: Input,
    output: Output = None,
    report: ReportOption = None,
    target: TargetOption = None,
    portable: Portable = True,
    shared_cache: Annotated[
        bool,
        typer.Option("--shared-cache", help="Past and present keys of GroupQueryAttention are one buffer, not copied."),
    ] = False,
    kv_cache: Annotated[
        Caches | None,
        typer.Option(
            "--kv-cache", help="Past keys that are joined with new ones become caches: other inputs and outputs."
        ),
    ] = None,
    join_projections: Joined = True,
    explain: Annotated[
        list[str] | None,
        typer.Option("--explain", metavar="NODE", help="Say all about the attention that this node is part of."),
    ] = None,
    dim: Dim = None,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Replace the attention of a model by FlashAttention, and say what was done, site by site."""
    import flashonnx

    if output is None and not explain and not report:
        raise ValueError("fuse: --output is missing: the file to write (or ask for --explain or --report alone)")
    if output is not None:
        check_writable(output)
    if target is not None and output is None:
        raise ValueError("fuse: --for says what --output is for, which is missing")
    files = report_files(report, KINDS, (output or model).with_suffix(".report"))
    if output is not None and any(path.absolute() == output.absolute() for path in files.values()):
        raise ValueError(f"fuse: '{output}' cannot be both the model and a report")
    sizes = lengths(dim)
    check_dims(sizes, model)
    explained = {}
    with working(f"fusing {model.name}"):
        if explain:  # before anything is written, perhaps over the model
            from flashonnx.export import explain as ask

            found = flashonnx.fuse(model, shared_cache=shared_cache)[1].at(sizes)
            explained = {node: ask(model, found, node) for node in explain}
        options = {"portable": portable, "shared_cache": shared_cache, "kv_cache": kv_cache.value if kv_cache else None}
        options["join_projections"] = join_projections
        done = _fused(model, output, target, options).at(sizes)
    tell(done, files, output, json, {"explained": explained} if explained else {})
    if strict and done.fused < done.total:
        raise typer.Exit(1)


def tell(report: Report, files: dict[str, Path], output: Path | None, json: bool, more: dict[str, Any]) -> None:
    """Writes the report's files, and the report itself to stdout."""
    texts = {"html": report.to_html, "json": report.to_json}
    for kind, path in files.items():
        write(path, texts[kind]())
    if json:
        emit(json_module.loads(report.to_json()) | {"output": output, "reports": list(files.values()), **more})
        return
    explained = more.get("explained", {})
    for text in explained.values():
        say(text)
    if not explained:
        say(report)
    for path in files.values():
        say(f"report: {path}", "dim")


def _fused(model: Path, output: Path | None, target: Target | None, options: dict[str, Any]) -> Report:
    import flashonnx

    if target is None or output is None:
        return flashonnx.fuse(model, output, **options)[1]
    from flashonnx.tensorrt import prepare_for_tensorrt

    with tempfile.TemporaryDirectory(dir=output.absolute().parent, prefix=f".{output.name}.") as folder:
        fused = Path(folder) / "fused.onnx"
        _, report = flashonnx.fuse(model, fused, **options)
        prepared = prepare_for_tensorrt(fused, onnxruntime=target is Target.ONNXRUNTIME_TENSORRT)
    write_model(output, prepared)
    return report
