"""One export of the zoo: made, fused, and its answers compared with the original's and PyTorch's."""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashonnx
import numpy as np
import onnx
import torch
from flashonnx._float64 import evaluate
from flashonnx.export import Report, fuse

from model_zoo.entry import Entry, Sizes

OURS = "export_onnx"
ROUTES = ("torch 18", "torch 23", "TorchScript", OURS)  # torch.onnx.export with dynamo and an opset, or without
_TORCHSCRIPT_OPSET = 17  # the newest that it is complete for
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of the largest value: sums in another order; in 16 bits PyTorch rounds at other places than the exported graph.
_TOLERANCE = {"float32": 3e-5, "float16": 2e-2, "bfloat16": 1.5e-1}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to export one model.

    Attributes:
        entry: the model.
        attention: its implementation, "sdpa" or "eager".
        route: one of ROUTES.
        dtype: of weights and inputs.
        fixed: without dynamic axes.
    """

    entry: Entry
    attention: str
    route: str
    dtype: str = "float32"
    fixed: bool = False

    @property
    def id(self) -> str:
        """Its name."""
        more = [self.dtype] * (self.dtype != "float32") + ["fixed"] * self.fixed
        return "-".join([self.entry.id, self.attention, self.route, *more]).replace(" ", "_")

    @property
    def file(self) -> str:
        """The name of its file, without the ending."""
        return self.id.replace("/", "_")

    def inputs(self, sizes: Sizes) -> dict[str, Any]:
        """PyTorch's inputs, the same each time."""
        torch.manual_seed(sizes.batch * 100 + sizes.sequence)
        inputs = self.entry.inputs(sizes)
        kind = _DTYPES[self.dtype]
        return {name: x.to(kind) if x.is_floating_point() else x for name, x in inputs.items()}

    def make(self) -> Any:
        """The module, in the case's type."""
        return self.entry.make(self.attention).to(_DTYPES[self.dtype]).eval()

    @property
    def compared(self) -> tuple[Sizes, ...]:
        """The sizes that answers are compared at."""
        if not self.fixed:
            return (self.entry.example, *self.entry.others)
        paddings = {sizes.padding for sizes in self.entry.others}
        return tuple(dataclasses.replace(self.entry.example, padding=padding) for padding in sorted(paddings))


def export(case: Case, path: Path) -> Report | None:
    """Writes the model; the report if it is already fused."""
    model, inputs = case.make(), case.inputs(case.entry.example)
    names, args = list(inputs), tuple(inputs.values())
    axes = {name: {} if case.fixed else case.entry.axes.get(name, {}) for name in names}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # operators without an ONNX form
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if case.route == "TorchScript":
                file = io.BytesIO()
                torch.onnx.export(
                    model, args, file, dynamo=False, opset_version=_TORCHSCRIPT_OPSET, input_names=names,
                    dynamic_axes={name: dict(given) for name, given in axes.items()},
                )  # fmt: skip
                path.write_bytes(file.getvalue())
                return None
            shapes = None if case.fixed else _by_parameter(model, [axes[name] for name in names])
            if case.route == OURS:
                return flashonnx.export_onnx(model, args, path, dynamic_shapes=shapes, input_names=names)
            opset = int(case.route.split()[1])
            program = torch.onnx.export(
                model, args, dynamo=True, opset_version=opset, dynamic_shapes=shapes, input_names=names, verbose=False
            )
            program.save(path)
            return None
    finally:
        logging.disable(logging.NOTSET)
        torch.backends.mha.set_fastpath_enabled(fast)


def _by_parameter(model: Any, axes: list[dict[int, str]]) -> tuple[Any, ...]:
    """Axes in the order of forward's parameters, of which the last may stand for several inputs."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if parameters[-1].kind != inspect.Parameter.VAR_POSITIONAL:
        return tuple(axes)
    single = len(parameters) - 1
    return (*axes[:single], tuple(axes[single:]))


def feeds(inputs: dict[str, Any], model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """NumPy's inputs, of those that the model reads."""
    return {value.name: _array(inputs[value.name]) for value in model.graph.input}


def _array(tensor: Any) -> np.ndarray:
    import ml_dtypes

    tensor = tensor.detach()
    return tensor.float().numpy().astype(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def differences(case: Case, original: onnx.ModelProto | None, fused: onnx.ModelProto) -> list[str]:
    """What is wrong with the fused model's answers, at every size; `original` is None for what export_onnx wrote."""
    wrong = []
    cases = [case.inputs(sizes) for sizes in case.compared]
    if original is not None:
        cases = [inputs for inputs in cases if _runs(original, feeds(inputs, original))]
        if not cases:
            return _by_evaluator(case, original, fused)
        verdict = flashonnx.verify(original, fused, [feeds(inputs, fused) for inputs in cases])
        # verify leaves rows before the first token to the model's convention; here they must agree, too.
        wrong += [] if all(output.ok or _gave_nan(output) for output in verdict.outputs) else [str(verdict)]
    model, session = case.make(), flashonnx.session(fused, ["CPUExecutionProvider"])
    for inputs in cases:
        got = session.run(None, feeds(inputs, fused))
        wrong += [f"output {i} has NaN" for i, x in enumerate(got) if np.isnan(x.astype(np.float32)).any()]
        with torch.no_grad():
            expected = model(*inputs.values())
        expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
        wrong += list(_off(case, inputs, got, expected, everywhere=original is None and case.attention == "sdpa"))
    return wrong


def _gave_nan(output: Any) -> bool:
    """Whether rows differ only where the original has NaN, as a query without keys gives behind masks of -inf."""
    return (
        output.rows != "all"
        and output.special.startswith("NaN out of place")
        and output.special.endswith("nan in the original")
        and output.error <= output.allowed
    )


def _runs(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> bool:
    """Whether ONNX Runtime runs the exported model at all: some exporters freeze axes, some write what it has not."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        session.run(None, inputs)
    except Exception:  # of several kinds
        return False
    return True


def _by_evaluator(case: Case, original: onnx.ModelProto, fused: onnx.ModelProto) -> list[str]:
    """Both models by onnx's evaluator and the operator's definition, where ONNX Runtime cannot run the original."""
    for f in [f for f in fused.functions if f.domain == "flashonnx"]:
        fused.functions.remove(f)
    inputs = feeds(case.inputs(case.entry.example), fused)
    expected, got = evaluate(original).run(None, inputs), evaluate(fused).run(None, inputs)
    return [
        f"output {i} by the definition: off by {error:.3g}"
        for i, (x, y) in enumerate(zip(got, expected, strict=True))
        if not (error := difference(x, y)) <= tolerance(case)
    ]


def _off(case: Case, inputs: dict[str, Any], got: Any, expected: list[Any], *, everywhere: bool) -> Iterator[str]:
    """Where outputs are not PyTorch's.

    What is NaN there is not compared. Unless `everywhere`, positions that are padding do not count (of a cache: of all
    keys), nor entries that are nothing else, nor what has no positions where a query may see no key: what comes of a
    query without keys differs between eager and fused attention, and exporters write some of PyTorch's own cases
    otherwise (docs/fusion.md).
    """
    mask = next((x.bool() for name, x in inputs.items() if name == "attention_mask"), None)
    shapes = [tuple(x.shape) for x in expected]
    if [x.shape for x in got] != shapes:
        yield f"shapes {[x.shape for x in got]} where PyTorch has {shapes}"
        return
    for i, (x, want) in enumerate(zip(got, expected, strict=True)):
        y = _array(want)
        if not everywhere and mask is not None and not mask.all():
            if x.ndim == 4 and x.shape[2] == mask.shape[1]:  # keys or values of (batch, heads, keys, size)
                x, y = x.swapaxes(1, 2), y.swapaxes(1, 2)
            tokens = mask[:, -x.shape[1] :] if x.ndim > 2 else None
            if tokens is not None and x.shape[:2] == tokens.shape:
                rows = tokens.numpy()
            elif mask[:, 0].all():
                rows = np.ones(len(x), bool)
            else:
                continue
            x, y = x[rows], y[rows]
        known = ~np.isnan(y.astype(np.float32))
        if not (error := difference(x[known], y[known])) <= tolerance(case):
            padding = "no mask" if mask is None else f"mask {mask.long().tolist()}"
            yield f"output {i} {want.shape}, {padding}: off PyTorch's by {error:.3g}"


def tolerance(case: Case) -> float:
    """What `difference` may be."""
    return _TOLERANCE[case.dtype]


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference, as a part of the largest value if that is above 1; NaN in one of both counts as it."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    if (np.isnan(x) != np.isnan(y)).any():
        return np.nan
    x, y = np.nan_to_num(x), np.nan_to_num(y)
    return float(np.abs(x - y).max(initial=0) / max(1.0, np.abs(y).max(initial=0)))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case: sites found and fused, why the others are left, and wrong answers."""

    found: int
    fused: int
    reasons: tuple[str, ...]
    wrong: tuple[str, ...]


def outcome(case: Case, folder: Path) -> Outcome:
    """Exports (unless `folder` has the file of a plain export already), fuses and compares."""
    path = folder / f"{case.file}.onnx"
    original = None
    if case.route == OURS:
        report = export(case, path)
        assert report is not None
        fused = onnx.load(path)
    else:
        if not path.exists():
            export(case, path)
        original = onnx.load(path)
        fused, report = fuse(original)
    reasons = dict.fromkeys(site.reason for site in report.sites if not site.fused)
    return Outcome(report.total, report.fused, tuple(reasons), tuple(differences(case, original, fused)))
