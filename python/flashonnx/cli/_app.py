"""The commands together, and how errors are told."""

from __future__ import annotations

import sys
import warnings
from inspect import cleandoc
from typing import Annotated

import typer

from flashonnx.cli._errors import StdoutError, open_standard_files, told
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


def main() -> None:
    """The entry point: every error is one line, never a traceback."""
    open_standard_files()
    warnings.showwarning = lambda message, *_, **__: fail(f"warning: {message}")
    try:
        code = _run("--json" in sys.argv)
    except StdoutError as error:
        code = error.exit_code()
        if not error.is_closed_pipe:
            fail(f"flashonnx: {error}")
    sys.exit(code)


def _run(json: bool) -> int:
    try:
        # typer tells errors of usage itself, in a box on stderr, unless they are to be JSON.
        return int(app(prog_name="flashonnx", standalone_mode=not json) or 0)
    except StdoutError:
        raise
    except Exception as error:
        text = told(error)
        fail(f"flashonnx: {text}")
        if json:
            emit({"error": text})
        return 2
