"""The command `flashonnx`: fuse, unfuse, verify, info.

Exit codes: 0 done, 1 the models differ, 2 it could not be done.
"""

from __future__ import annotations

import functools
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Input = Annotated[Path, typer.Argument(help="ONNX file.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.")]
Dim = Annotated[
    list[str] | None, typer.Option("--dim", help="Value of a symbolic dimension, NAME=VALUE; may be repeated.")
]


@app.command()
def fuse(
    model: Input,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="ONNX file to write.")] = None,
    portable: Annotated[bool, typer.Option(help="Add function bodies for runtimes without the library.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="NODE", help="Say all about the attention that this node is part of.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option("--dim", help="Length that bytes are told for, NAME=VALUE; may be repeated.")
    ] = None,
) -> None:
    """Replace the attention of an ONNX model by flashonnx::FlashAttention and say what was done, site by site."""
    import flashonnx

    if output is None and explain is None and json is None and html is None:
        raise ValueError("fuse: --output is missing: the file to write (or ask for --explain, --json or --html alone)")
    _check_reports(output, json, html)
    lengths = _dims(dim) or {}
    if explain is not None:  # before anything is written, perhaps over the model
        from flashonnx.export import explain as explained

        _say(explained(model, flashonnx.fuse(model)[1].at(lengths), explain))
        if output is None and json is None and html is None:
            return
    _, report = flashonnx.fuse(model, output, portable=portable)
    report = report.at(lengths)
    if explain is None:
        _say(report)
    if json is not None:
        json.write_text(report.to_json())
    if html is not None:
        html.write_text(report.to_html())


@app.command()
def unfuse(model: Input, output: Output) -> None:
    """Go back from flashonnx::FlashAttention to standard operators."""
    import flashonnx

    _, report = flashonnx.unfuse(model, output)
    _say(f"{report.total - report.fused} of {report.total} FlashAttention nodes are standard operators again")
    for site in report.sites:
        if site.fused:
            _say(f"  left  {site.node}: {site.reason}")


@app.command()
def verify(
    original: Annotated[Path, typer.Argument(help="The original ONNX file.")],
    fused: Annotated[Path, typer.Argument(help="The fused ONNX file.")],
    dim: Dim = None,
    inputs: Annotated[
        Path | None, typer.Option(help="A .npz file of inputs by name, instead of generated ones.")
    ] = None,
) -> None:
    """Run both models on the same inputs and judge the difference by the original's own rounding error."""
    import flashonnx

    feeds = None if inputs is None else _inputs(inputs)
    verdict = flashonnx.verify(original, fused, feeds, dims=_dims(dim))
    _say(str(verdict))
    if not verdict.ok:
        raise typer.Exit(1)


@app.command()
def info() -> None:
    """What is installed, and which kernels this machine can use."""
    import flashonnx

    _say(f"{'flashonnx':<14}{flashonnx.__version__}")
    for name, ask in (
        ("library", flashonnx.library_path),
        ("ONNX Runtime", _onnxruntime),
        ("CPU kernel", _kernels_cpu),
        ("CUDA kernels", _kernels_cuda),
    ):
        _say(f"{name:<14}{_answer(ask)}")


def main() -> None:
    """The entry point: every error is one line, never a traceback."""
    try:
        app(standalone_mode=True)
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        known = isinstance(error, (OSError, ValueError, TypeError, ImportError, RuntimeError, NotImplementedError))
        Console(stderr=True, soft_wrap=True).print(
            f"flashonnx: {text if known else f'{type(error).__name__}: {text}'}", markup=False, highlight=False
        )
        sys.exit(2)


def _say(text: Any) -> None:
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def _check_reports(output: Path | None, *reports: Path | None) -> None:
    """Reports can be written: said before the model is, so that nothing is half done."""
    from flashonnx.export.model.files import check_output

    for path in reports:
        if path is not None:
            check_output(path)
            if output is not None and path.absolute() == output.absolute():
                raise ValueError(f"fuse: '{path}' cannot be both the model and a report")


def _inputs(path: Path) -> dict[str, Any]:
    import numpy as np

    expected = f"--inputs is expected to be an .npz file, as numpy.savez(path, **inputs) writes it; '{path}'"
    try:
        arrays = np.load(path)
        if isinstance(arrays, np.lib.npyio.NpzFile):
            with arrays:
                return dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{expected} is none: {error}") from error
    raise ValueError(f"{expected} holds one array without a name")


def _dims(pairs: list[str] | None) -> dict[str, int] | None:
    if not pairs:
        return None
    dims = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not value.isdecimal():
            raise ValueError(f"--dim is expected as NAME=VALUE with a number, got '{pair}'")
        dims[name] = int(value)
    return dims


def _answer(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (RuntimeError, NotImplementedError, ValueError, OSError) as error:
        return f"no: {error}"


def _onnxruntime() -> str:
    from flashonnx._runtime import checked_onnxruntime as load

    runtime: Any = load()
    return f"{runtime.__version__} ({', '.join(runtime.get_available_providers())})"


def _kernels_cpu() -> str:
    from flashonnx._capi import CPU

    return _kernels(CPU)


def _kernels_cuda() -> str:
    from flashonnx._capi import CUDA

    return _kernels(CUDA)


def _kernels(kind: int) -> str:
    """The kernel that a plain problem would run on the device, by dtype."""
    import numpy as np

    from flashonnx import library_path
    from flashonnx._capi import DTYPES, Library, attention_params

    library = Library(library_path())
    device = library.device(kind, 0)
    where = f"compute capability {device.arch / 10:.1f}, {device.sm_count} multiprocessors" if kind else ""
    x = np.zeros((1, 1, 16, 64), np.float32)
    found: dict[str, list[str]] = {}
    for dtype in ("float32", "float16", "bfloat16"):
        params = attention_params(library, device, x, x, x, x)
        for name in ("q", "k", "v", "o"):
            getattr(params, name).dtype = DTYPES[dtype]
        found.setdefault(_answer(functools.partial(library.supported, params)), []).append(dtype)
    return "; ".join(
        [*(f"{kernel} ({', '.join(dtypes)})" for kernel, dtypes in found.items()), *([where] if where else [])]
    )


if __name__ == "__main__":
    main()
