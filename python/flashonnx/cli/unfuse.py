"""`flashonnx unfuse`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from flashonnx.cli._files import Input, check_writable
from flashonnx.cli._output import Json, emit, say, working


def unfuse(
    model: Input,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="ONNX file to write.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Go back from FlashAttention to standard operators. Exits with 1 if a node could not be replaced."""
    import flashonnx

    check_writable(output)
    with working(f"unfusing {model.name}"):
        _, report = flashonnx.unfuse(model, output)
    if json:
        emit(json_module.loads(report.to_json()) | {"output": output})
    else:
        say(report.summary)
        left: dict[str, list[str]] = {}  # by the reason
        for site in report.sites:
            if site.fused:
                left.setdefault(site.reason, []).append(site.node)
        for reason, nodes in left.items():
            say(f"  left  {nodes[0]}{f' and {len(nodes) - 1} more' if nodes[1:] else ''}: {reason}")
        for note in report.notes:
            say(f"note: {note}", "italic")
    if report.fused:
        raise typer.Exit(1)
