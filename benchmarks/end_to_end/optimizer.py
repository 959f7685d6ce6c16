"""ONNX Runtime's best graph of an encoder: its own transformers optimizer, as its documentation says to use it.

That is: an export in float32 with attention written out, `onnxruntime.transformers.optimizer`, then its conversion to
float16. It does not know the newer exporter's graphs, so the export is TorchScript's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end import weights
from benchmarks.end_to_end.graphs import UnfusableError
from benchmarks.end_to_end.models import LIMIT, Subject

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import torch

OPSET = 17
_INLINE_LIMIT = 1 << 20  # bytes of an initializer that is no parameter
_SKETCH = 4096  # bytes that tell parameters apart


_DONE: dict[str, list[tuple[onnx.ModelProto, dict[str, int]]]] = {}  # by the file of weights: sizes come last


def optimize(
    subject: Subject, places: Mapping[str, weights.Matrix], forms: Sequence[bool]
) -> list[tuple[onnx.ModelProto, dict[str, int]]]:
    """The optimized graphs in the subject's dtype with its input sizes, large weights outside, and what was fused.

    Args:
        subject: of family "bert" or "vit".
        places: where the weights lie, of a module with the same parameters.
        forms: for each graph, whether it has MultiHeadAttention with three projections, or Attention with one.
    """
    import onnx

    if subject.weights not in _DONE:
        _DONE[subject.weights] = _optimize(subject, places, forms)
    made = []
    for model, found in _DONE[subject.weights]:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        _fix_sizes(copy, subject)
        made.append((copy, found))
    return made


def _optimize(
    subject: Subject, places: Mapping[str, weights.Matrix], forms: Sequence[bool]
) -> list[tuple[onnx.ModelProto, dict[str, int]]]:
    import onnx

    wide, made = dataclasses.replace(subject, dtype="float32"), []
    module = wide.module("eager")
    with tempfile.TemporaryDirectory(prefix="flashonnx-") as folder, _quiet():
        path = Path(folder, "model.onnx")
        _export(wide, module, path)
        for multi_head in forms:
            optimized = _optimizer(subject, path, multi_head)
            found = {name: count for name, count in optimized.get_fused_operator_statistics().items() if count}
            sources = _recognise(optimized.model, module, places)
            if subject.dtype == "float16":
                optimized.convert_float_to_float16(keep_io_types=False)
            model = onnx.ModelProto()
            model.CopyFrom(optimized.model)
            _refer(model, sources, places, subject.weights)
            made.append((model, found))
    return made


def _export(subject: Subject, module: torch.nn.Module, path: Path) -> None:
    import torch

    inputs = subject.inputs()
    axes = {name: {0: "batch", 1: "sequence"} if x.ndim == 2 else {0: "batch"} for name, x in inputs.items()}
    short = tuple(x[:1, :8] if x.ndim == 2 else x[:1] for x in inputs.values())
    torch.onnx.export(
        module, short, str(path), input_names=list(inputs), output_names=["y"], dynamic_axes=axes, opset_version=OPSET,
        dynamo=False,
    )  # fmt: skip


def _optimizer(subject: Subject, path: Path, multi_head: bool) -> Any:
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions(subject.family)
    options.use_multi_head_attention = multi_head
    optimized = optimizer.optimize_model(
        str(path), subject.family, subject.heads[0], subject.config["hidden_size"], optimization_options=options
    )
    if subject.family == "bert":
        optimized.change_graph_inputs_to_int32()
    return optimized


def _recognise(
    model: onnx.ModelProto, module: torch.nn.Module, places: Mapping[str, weights.Matrix]
) -> dict[str, list[tuple[str, bool]]]:
    """For each large initializer the parameters it is made of, side by side, and whether they are turned."""
    from onnx import numpy_helper

    known = {}
    for name, parameter in module.named_parameters():
        if name in places:
            value = parameter.numpy()
            known[_sketch(value)] = (name, places[name].turned)
            if value.ndim == 2:
                known[_sketch(value.T)] = (name, not places[name].turned)
    sources = {}
    for proto in model.graph.initializer:
        value = numpy_helper.to_array(proto)
        if value.size < LIMIT:
            continue
        parts = [value]
        if _sketch(value) not in known and value.ndim == 2 and value.shape[1] % 3 == 0:
            third = value.shape[1] // 3
            parts = [value[:, i * third : (i + 1) * third] for i in range(3)]
        if all(_sketch(part) in known for part in parts):
            sources[proto.name] = [known[_sketch(part)] for part in parts]
        elif value.nbytes > _INLINE_LIMIT:
            raise UnfusableError(f"the optimizer made '{proto.name}' {list(value.shape)}, which is no parameter")
    return sources


def _sketch(value: np.ndarray) -> str:
    """Enough of a random array to know it again."""
    flat = value[:8].ravel() if value.ndim > 1 else value
    return hashlib.sha256(str(value.shape).encode() + flat.tobytes()[:_SKETCH]).hexdigest()


def _refer(
    model: onnx.ModelProto,
    sources: Mapping[str, list[tuple[str, bool]]],
    places: Mapping[str, weights.Matrix],
    file: str,
) -> None:
    """Puts the shared parameters for the recognised initializers; ONNX Runtime joins them when it loads the model."""
    from onnx import helper

    kinds = {proto.name: proto.data_type for proto in model.graph.initializer}
    kept = [proto for proto in model.graph.initializer if proto.name not in sources]
    used, nodes = {}, []
    for target, parts in sources.items():
        names = []
        for name, turned in parts:
            used[name] = weights.tensor(name, places[name], file, kinds[target])
            if turned:
                nodes.append(helper.make_node("Transpose", [name], [f"{name}.turned"], perm=[1, 0]))
            names.append(f"{name}.turned" if turned else name)
        if len(names) > 1:
            nodes.append(helper.make_node("Concat", names, [target], axis=1))
        elif names[0] != target:
            nodes.append(helper.make_node("Identity", names, [target]))
    nodes += model.graph.node
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.initializer.extend([*kept, *used.values()])
    model.graph.node.extend(nodes)


def _fix_sizes(model: onnx.ModelProto, subject: Subject) -> None:
    shapes = {name: x.shape for name, x in subject.inputs().items()}
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
            dim.dim_value = size
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's and the optimizer's remarks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
