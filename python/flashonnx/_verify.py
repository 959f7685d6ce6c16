"""verify: does the fused model compute what the original computes?

Two correct programs differ by rounding, so a bare difference says little. The original is therefore also computed in
float64 (`_float64.py`), and the fused model may be off that truth by at most twice what the original itself is, plus a
floor of a few units in the last place:

    max|fused - truth| <= 2 max|original - truth| + floor        and NaN and infinities stand in the same places

The largest elements decide, over all cases of an output. The original runs twice, with and without ONNX Runtime's graph
optimisation, and its larger error counts: one run of a small output may be right by luck. A model that nothing here
computes in float64 is measured against the original itself, the difference of those two runs in place of its error;
the verdict says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flashonnx._float64 import without_bfloat16_doors
from flashonnx._inputs import Array, Feeds, generate, input_specs
from flashonnx._library import LibraryError

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    Model: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto | onnxruntime.InferenceSession

# Four units in the last place of an output's largest value; two of the coarse types.
_FLOOR = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-9}
_SPECIAL = (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf))


@dataclass
class OutputError:
    """What was found for one output, over all cases.

    Attributes:
        name: of the output.
        rows: "all", or "before the first token": positions that the padding mask puts before any token of their entry.
            A causal model lets them see no key, their value is a convention, nobody reads them; they do not count for
            `ok`.
        error: max|fused - truth|.
        original_error: max|original - truth|.
        difference: max|fused - original|.
        scale: max|truth|.
        floor: what an output of scale 1 may be off in any case.
        allowed: the bound on `error`.
        worst: (case, index) of the largest error.
        special: why special values or integers do not coincide; empty if they do.
        compared: how many numbers were: those that are finite in the fused model and in truth.
    """

    name: str
    rows: str = "all"
    error: float = 0.0
    original_error: float = 0.0
    difference: float = 0.0
    scale: float = 0.0
    floor: float = 0.0
    worst: tuple[int, tuple[int, ...]] = (0, ())
    special: str = ""
    compared: int = 0

    @property
    def allowed(self) -> float:
        return 2 * self.original_error + self.floor * self.scale

    @property
    def ok(self) -> bool:
        return not self.special and self.error <= self.allowed

    def __str__(self) -> str:
        rows = "" if self.rows == "all" else f" ({self.rows})"
        wrong = "DIFFERS" if self.rows == "all" else "differs, which does not count"
        text = (
            f"{self.name}{rows}: {'ok' if self.ok else wrong}, error {self.error:.3g}, allowed {self.allowed:.3g} "
            f"(the original's own error is {self.original_error:.3g}); fused - original {self.difference:.3g}"
        )
        if self.special:
            text += f"; {self.special}"
        elif not self.ok:
            text += f"; worst in case {self.worst[0]} at {list(self.worst[1])}"
        return text


@dataclass
class Verdict:
    """The answer of `verify`: true if the models agree; `str()` says how well."""

    ok: bool
    outputs: list[OutputError]
    cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: str = "the original in float64"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [
            f"The models {'agree' if self.ok else 'DIFFER'}: {len(self.cases)} "
            f"{'case' if len(self.cases) == 1 else 'cases'}, measured against {self.reference}"
        ]
        lines += [f"  {output}" for output in self.outputs]
        lines += [f"  case {i}: {case}" for i, case in enumerate(self.cases)]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def verify(
    a: Model,
    b: Model,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    providers: list[Any] | None = None,
) -> Verdict:
    """Runs the original model `a` and the fused model `b` on the same inputs and judges the difference.

    Args:
        a: the original: a path, bytes, `onnx.ModelProto`, or an ONNX Runtime session.
        b: the fused model, likewise.
        inputs: input name to array, or a list of such cases. Default: seeded random ones of several shapes, with
            padding in integer masks and token numbers within the embedding table.
        dims: values for symbolic dimensions of generated inputs, e.g. {"batch": 2, "sequence": [16, 128]}.
        providers: ONNX Runtime's, for both models; default as for `flashonnx.session`.

    Raises:
        ValueError: inputs, outputs or their shapes do not match, or the original cannot run on the inputs.
    """
    original, fused = _Candidate(a, providers), _Candidate(b, providers)
    _same_names("input", original.inputs, fused.inputs)
    _same_names("output", original.outputs, fused.outputs)
    verdict = Verdict(True, [])
    cases = _cases(original, inputs, dims, verdict)
    if not original.outputs:
        raise ValueError("verify: the models have no outputs, so nothing would be compared")
    if not any(np.asarray(x).size for _, _, outputs in cases for x in outputs):
        raise ValueError("verify: all outputs are empty in every case, so nothing would be compared: choose other dims")
    session = fused.open()
    results = [fused.run(session, feeds) for _, feeds, _ in cases]
    truths, again = _truths(original, cases, verdict)
    table: dict[tuple[str, str], OutputError] = {}
    for i, (label, feeds, expected) in enumerate(cases):
        verdict.cases.append(label)
        for j, name in enumerate(original.outputs):
            values = [_array(x[j]) for x in (results[i], truths[i], expected, again[i])]
            if values[0].shape != values[2].shape:
                raise ValueError(
                    f"verify: output '{name}' has shape {values[0].shape} in the fused model, "
                    f"{values[2].shape} in the original ({label})"
                )
            for rows, where in _rows(feeds, values[0].shape):
                entry = table.setdefault((name, rows), OutputError(name, rows))
                _measure(entry, i, where, *values)
    verdict.outputs = list(table.values())
    judged = [entry for entry in verdict.outputs if entry.rows == "all"]
    verdict.ok = all(entry.ok for entry in judged)
    if verdict.ok and not any(entry.compared for entry in judged):
        raise ValueError(
            "verify: no number was compared: every one is NaN, infinite or before the first token in every case, so "
            "pass other inputs"
        )
    verdict.notes += [f"nothing of output '{entry.name}' was compared" for entry in judged if not entry.compared]
    return verdict


class _Candidate:
    """A model that can be run: its graph, and a session of it."""

    def __init__(self, model: Model, providers: list[Any] | None) -> None:
        source: Any = model
        if hasattr(source, "get_providers"):  # a session
            providers = providers or source.get_providers()
            source = getattr(source, "_model_path", None) or getattr(source, "_model_bytes", None)
            if source is None:
                raise ValueError("verify: the graph of this session is not known: pass the model itself")
        proto = _load(source)
        self.specs = input_specs(proto)
        self.inputs = [spec.name for spec in self.specs]
        self.outputs = [output.name for output in proto.graph.output]
        self.proto = without_bfloat16_doors(proto)
        self._source = os.fspath(source) if self.proto is proto and isinstance(source, (str, os.PathLike)) else None
        self._providers = providers

    def open(self, optimised: bool = True) -> Any:
        """An ONNX Runtime session."""
        import onnxruntime

        from flashonnx._runtime import default_providers, session

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it cannot run is reported here
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        source = self._source or self.proto.SerializeToString()
        bodies = [function.node for function in self.proto.functions if function.domain != "flashonnx"]
        if any(_attends(nodes) for nodes in (self.proto.graph.node, *bodies)):
            return session(source, self._providers, options)
        return onnxruntime.InferenceSession(source, options, providers=self._providers or default_providers())

    def run(self, session: Any, feeds: Feeds) -> list[Any]:
        narrow = {name: x.astype(np.float32) if x.dtype.name == "bfloat16" else x for name, x in feeds.items()}
        return session.run(self.outputs, narrow)

    def runner(self, verdict: Verdict) -> Any:
        """Runs the original; onnx's evaluator does it where ONNX Runtime cannot (bfloat16 on the CPU, some masks)."""
        from flashonnx import _float64

        try:
            session = self.open()
        except LibraryError:
            raise
        except Exception as error:
            verdict.notes.append(f"ONNX Runtime cannot open the original ({_line(error)}); onnx's evaluator runs it")
            session = _float64.evaluate(self.proto)

        def run(feeds: Feeds) -> list[Any]:
            nonlocal session
            try:
                return self.run(session, feeds)
            except Exception as error:
                evaluator = _float64.evaluate(self.proto)
                try:
                    result = self.run(evaluator, feeds)
                except Exception:
                    raise error from None  # it is the inputs
                verdict.notes.append(f"ONNX Runtime cannot run the original ({_line(error)}); onnx's evaluator runs it")
                session = evaluator
                return result

        return run


def _load(model: Any) -> onnx.ModelProto:
    import onnx

    if isinstance(model, onnx.ModelProto):
        return model
    is_file = isinstance(model, (str, os.PathLike))
    if is_file or isinstance(model, (bytes, bytearray)):
        try:
            proto = onnx.load(os.fspath(model)) if is_file else onnx.load_model_from_string(bytes(model))
        except OSError:
            raise
        except Exception as error:  # protobuf's own exceptions differ between its versions
            raise ValueError(f"verify: {_name(model)} is not an ONNX model: {_line(error)}") from error
        if not proto.HasField("graph"):
            raise ValueError(f"verify: {_name(model)} is not an ONNX model: it has no graph")
        return proto
    raise TypeError(f"verify: expected a path, bytes, an onnx.ModelProto or a session, got {type(model).__name__}")


def _name(model: Any) -> str:
    return "the model" if isinstance(model, (bytes, bytearray)) else f"'{os.fspath(model)}'"


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]


def _attends(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether a node, also one in a subgraph, is flashonnx's."""
    return any(
        node.domain == "flashonnx" or any(_attends(g.node) for a in node.attribute for g in (a.g, *a.graphs))
        for node in nodes
    )


def _same_names(kind: str, original: list[str], fused: list[str]) -> None:
    if set(original) != set(fused):
        raise ValueError(
            f"verify: {kind}s differ: the original has {sorted(original)}, the fused model {sorted(fused)}"
        )


def _cases(original: _Candidate, inputs: Any, dims: Any, verdict: Verdict) -> list[tuple[str, Feeds, list[Any]]]:
    """Label, feeds and the original's outputs of each case. Generated ones that the original refuses are skipped."""
    run = original.runner(verdict)
    if inputs is not None:
        if dims is not None:
            raise ValueError("verify: dims describes generated inputs; it cannot be given together with inputs")
        given = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        if not given:
            raise ValueError("verify: inputs are expected for at least one case, got none")
        for feeds in given:
            if set(feeds) != set(original.inputs):
                raise ValueError(f"verify: inputs are expected for {original.inputs}, got {sorted(feeds)}")
        arrays = [{name: np.asarray(x) for name, x in feeds.items()} for feeds in given]
        return [("the given inputs", feeds, run(feeds)) for feeds in arrays]
    cases = []
    for sizes, feeds in generate(original.specs, dims):
        label = ", ".join(f"{k}={v}" for k, v in sizes.items()) or "the model's fixed shapes"
        try:
            cases.append((label, feeds, run(feeds)))
        except Exception as error:
            verdict.notes.append(f"skipped {label}: the original refuses it ({_line(error)})")
    if not cases:
        raise ValueError(
            "verify: the original runs on no generated input: pass inputs or dims\n  " + "\n  ".join(verdict.notes)
        )
    return cases


def _truths(
    original: _Candidate, cases: list[tuple[str, Feeds, list[Any]]], verdict: Verdict
) -> tuple[list[Any], list[Any]]:
    """The original in float64 (or what it gave, if it has no float64), and the original without graph optimisation."""
    from flashonnx import _float64

    truths = again = [expected for _, _, expected in cases]
    try:
        session = original.open(optimised=False)
        again = [original.run(session, feeds) for _, feeds, _ in cases]
    except Exception:  # onnx's evaluator ran it: there is nothing else
        pass
    try:
        truths = _float64.run(_float64.widen(original.proto), [feeds for _, feeds, _ in cases])
    except Exception as error:
        verdict.reference = f"the original itself (in float64 it does not run: {_line(error)})"
    return truths, again


def _array(value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise ValueError(f"verify: an output is a {type(value).__name__}, only tensors can be compared")
    return value


def _rows(feeds: Feeds, shape: tuple[int, ...]) -> list[tuple[str, Array]]:
    """Which elements of an output are judged, by a (batch, sequence) padding mask among the inputs if there is one."""
    for name, mask in feeds.items():
        if "mask" in name.lower() and mask.ndim == 2 and mask.shape == shape[:2] and len(shape) > 1:
            before = np.cumsum(mask != 0, axis=1) == 0
            before = np.broadcast_to(before.reshape(*mask.shape, *[1] * (len(shape) - 2)), shape)
            return [("all", ~before)] + ([("before the first token", before)] if before.any() else [])
    return [("all", np.ones(shape, bool))]


def _measure(
    entry: OutputError, case: int, where: Array, fused: Array, truth: Array, original: Array, again: Array
) -> None:
    """Adds one case to an output's errors, over the elements `where`."""
    if fused.dtype != original.dtype:
        raise ValueError(
            f"verify: output '{entry.name}' is {fused.dtype} in the fused model, {original.dtype} in the original"
        )
    if fused.dtype.name not in _FLOOR:
        entry.compared += int(where.sum())
        wrong = where & (fused != original)
        if wrong.any():
            entry.special = (
                entry.special
                or f"{wrong.sum()} of {wrong.size} values are not equal, first {_at(wrong, fused, original, case)}"
            )
        return
    entry.floor = _FLOOR[fused.dtype.name]
    fused, truth, original, again = (x.astype(np.float64) for x in (fused, truth, original, again))
    for kind, test in _SPECIAL:
        # Where the original overflows and the truth does not, either is right.
        wrong = where & (test(fused) != test(truth)) & (test(fused) != test(original))
        if wrong.any() and not entry.special:
            entry.special = f"{kind} out of place, {wrong.sum()} times, first {_at(wrong, fused, original, case)}"
    finite = where & np.isfinite(fused) & np.isfinite(truth)
    entry.compared += int(finite.sum())

    def distance(x: Array, y: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return np.where(finite & np.isfinite(x) & np.isfinite(y), np.abs(x - y), 0.0)

    error = distance(fused, truth)
    entry.scale = max(entry.scale, float(np.abs(np.where(finite, truth, 0.0)).max(initial=0)))
    entry.original_error = max(
        entry.original_error, *(float(distance(x, truth).max(initial=0)) for x in (original, again))
    )
    entry.difference = max(entry.difference, float(distance(fused, original).max(initial=0)))
    if error.size and error.max() > entry.error:
        entry.error = float(error.max())
        entry.worst = (case, tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape)))


def _at(wrong: Array, fused: Array, original: Array, case: int) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"in case {case} at {list(index)}: {fused[index]} in the fused model, {original[index]} in the original"
