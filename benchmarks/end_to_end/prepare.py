"""Makes a subject's graphs, after the same graphs of a small model were compared on the CPU."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end import decoder, graphs, optimizer, weights
from benchmarks.end_to_end.graphs import UnfusableError
from benchmarks.end_to_end.models import Subject

if TYPE_CHECKING:
    import numpy as np
    import onnx

TOLERANCE = 2e-4  # of the root mean square, in float32
_CHECKED: dict[str, dict[str, float]] = {}  # by the file of weights: subjects that share one differ in size alone
BASE = "plain"  # what all others must agree with


@dataclasses.dataclass
class Variant:
    """One graph of a subject.

    Attributes:
        name: "plain", "ours", "ours-no-attention"; "ort" and what is made of it.
        model: None if it could not be made.
        note: how it was made, or why not.
        same: whether it computes what "plain" does.
        error: of the small model on the CPU: root mean square of the difference to "plain" over that of "plain".
    """

    name: str
    model: onnx.ModelProto | None
    note: str = ""
    same: bool = True
    error: float | None = None


def prepare(subject: Subject, folder: Path, say: Callable[[str], None] = print) -> list[Variant]:
    """Writes the graphs, `<subject>.<variant>.onnx`, and `<subject>.json`, which `run` reads. No weights.

    Raises:
        ArithmeticError: graphs of the small model disagree.
    """
    small = subject.small()
    if small.weights not in _CHECKED:
        _CHECKED[small.weights] = check(small)
    errors = _CHECKED[small.weights]
    say(f"{subject.name}: two layers in float32 agree to " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    module = subject.module(values=False)
    made = variants(subject, module, weights.layout(module))
    folder.mkdir(parents=True, exist_ok=True)
    for variant in made:
        variant.error = errors.get(variant.name)
        if variant.model is not None:
            path = folder / f"{subject.name}.{variant.name}.onnx"
            path.write_bytes(variant.model.SerializeToString())
            say(f"{subject.name}: {path.name}, {path.stat().st_size >> 10} KiB: {variant.note}")
        else:
            say(f"{subject.name}: no {variant.name}: {variant.note}")
    described = [
        {"name": v.name, "made": v.model is not None, "note": v.note, "same": v.same, "error": v.error} for v in made
    ]
    description = {"subject": dataclasses.asdict(subject), "variants": described}
    (folder / f"{subject.name}.json").write_text(json.dumps(description, indent=1))
    return made


def variants(subject: Subject, module: Any, places: dict[str, weights.Matrix]) -> list[Variant]:
    """All graphs of a subject, "plain" first. What cannot be made says why."""
    layers = subject.config["num_hidden_layers"]
    made = [Variant("plain", graphs.plain(subject, module, places), "torch.onnx.export(dynamo=True)")]
    best = _best(subject, module, places)
    for base, name in ((made[0], "ours"), (best[0], "ours-on-ort")):
        assert base.model is not None
        fused = _try(name, f"flashonnx.fuse of '{base.name}'", partial(graphs.ours, base.model, layers))
        made.append(fused)
        if fused.model is not None:
            width = subject.heads[0] * subject.head_size
            cut = partial(graphs.without_attention, fused.model, width)
            less = _try(f"{name}-no-attention", "queries for answers", cut)
            made.append(dataclasses.replace(less, same=False))
        if base.name == "ort-attention" and fused.model is not None and subject.family == "vit":
            note = f"MultiHeadAttention where '{name}' has our operator, Q, K and V as they were"
            best.append(_try("ort-mha", note, partial(_multi_head, base.model, layers)))
    return made + best


def _multi_head(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    return graphs.multi_head(graphs.ours(model, layers, join=False))


def _best(subject: Subject, module: Any, places: dict[str, weights.Matrix]) -> list[Variant]:
    if subject.family == "llama":
        model = decoder.build(subject, module, places)
        return [Variant("ort-gqa", model, "as onnxruntime-genai's builder writes it")]
    made = []
    forms = (False, True) if subject.family == "bert" else (False,)
    for multi_head, (model, found) in zip(forms, optimizer.optimize(subject, places, forms), strict=True):
        note = "onnxruntime.transformers.optimizer: " + ", ".join(f"{n} {name}" for name, n in found.items())
        made.append(Variant("ort-mha" if multi_head else "ort-attention", graphs.typed(model), note))
    return made


def _try(name: str, note: str, make: Callable[[], onnx.ModelProto]) -> Variant:
    try:
        return Variant(name, make(), note)
    except UnfusableError as error:
        return Variant(name, None, str(error))


def check(subject: Subject) -> dict[str, float]:
    """Runs every graph of a small subject on the CPU, with weights.

    Returns:
        By variant, the root mean square of its difference to "plain" over that of "plain".

    Raises:
        ArithmeticError: one is wrong, with its name.
    """
    module = subject.module()
    places = weights.layout(module)
    outputs: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory(prefix="flashonnx-") as folder:
        weights.write(module, places, Path(folder, subject.weights))
        for variant in variants(subject, module, places):
            if variant.model is None or not variant.same:
                continue
            path = Path(folder, f"{variant.name}.onnx")
            path.write_bytes(variant.model.SerializeToString())
            outputs[variant.name] = _on_cpu(path, subject)
    base = outputs.pop(BASE)
    errors = {name: distance(out, base) for name, out in outputs.items()}
    for name, error in errors.items():
        if not error < TOLERANCE:
            raise ArithmeticError(f"{subject.name}: {name} differs from {BASE} by {error:.3g} of its size")
    return errors


def distance(out: np.ndarray, base: np.ndarray) -> float:
    """Root mean square of the difference over that of `base`; infinite where either is not finite."""
    import numpy as np

    a, b = out.astype(np.float64), base.astype(np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2)))


def _on_cpu(path: Path, subject: Subject) -> np.ndarray:
    import flashonnx
    import numpy as np

    session = flashonnx.session(path, ["CPUExecutionProvider"])
    kinds = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
    given = {name: x.numpy() for name, x in subject.inputs().items()}
    feeds = {i.name: given[i.name].astype(kinds.get(i.type, given[i.name].dtype)) for i in session.get_inputs()}
    result: np.ndarray = session.run(None, feeds)[0]
    return result
