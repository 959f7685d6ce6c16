"""The commands together, and how errors are told."""

from __future__ import annotations

import re
import sys
import warnings
from inspect import cleandoc
from typing import Annotated

import typer

from flashonnx.cli._output import emit, fail
from flashonnx.cli.bench import bench
from flashonnx.cli.doctor import doctor
from flashonnx.cli.export import export
from flashonnx.cli.fuse import fuse
from flashonnx.cli.inspect import inspect
from flashonnx.cli.unfuse import unfuse
from flashonnx.cli.verify import verify

app = typer.Typer(
    name="flashonnx",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Exact fused attention for ONNX Runtime and TensorRT.",
    epilog="Exit codes: 0 done, or yes; 1 the answer is no; 2 it could not be done. Every command has --json.",
)
for command in (fuse, export, unfuse, inspect, verify, bench, doctor):
    # Paragraphs without the line breaks of the source.
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(part.split()) for part in paragraphs))(command)


def _version(wanted: bool) -> None:
    if wanted:
        import flashonnx

        typer.echo(f"flashonnx {flashonnx.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version, and nothing else.")
    ] = False,
) -> None:
    """Exact fused attention for ONNX Runtime and TensorRT."""


def _text(error: Exception) -> str:
    """What an error says, with its notes; of torch's exporter, which says much, what was done and why it failed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    before, found, after = text.partition("## Exception summary")
    lines = [part.strip().splitlines()[0] for part in (before, after) if part.strip()] if found else [text]
    return ": ".join([" ".join(lines), *getattr(error, "__notes__", ())])


def main() -> None:
    """The entry point: every error is one line, never a traceback."""
    warnings.showwarning = lambda message, *_, **__: fail(f"warning: {message}")
    try:
        app(prog_name="flashonnx")
    except Exception as error:
        text = _text(error)
        known = isinstance(error, (OSError, ValueError, TypeError, ImportError, RuntimeError, NotImplementedError))
        text = text if known else f"{type(error).__name__}: {text}"
        fail(f"flashonnx: {text}")
        if "--json" in sys.argv:
            emit({"error": text})
        sys.exit(2)
