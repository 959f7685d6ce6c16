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

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flashonnx._candidate import Candidate, first_line, is_fused
from flashonnx._compare import ALL, OutputError, measure, rows_of
from flashonnx._inputs import Array, Feeds, InputSpec, generate
from flashonnx._progress import step

if TYPE_CHECKING:
    from flashonnx._bisect import NodeError
    from flashonnx._candidate import Model

Case = tuple[str, Feeds, list[Any]]  # label, inputs, outputs of the original


@dataclass
class Verdict:
    """The answer of `verify`: true if the models agree; `str()` says how well.

    Attributes:
        ok: whether they agree.
        outputs: what was found, output by output.
        cases: what each case was.
        notes: what there is to say besides.
        reference: what the models were measured against.
        nodes: with `bisect`, the error behind each fused node, and where the models part.
        parted: with `bisect`, where the models part; None if they agree, or if it was not found.
    """

    ok: bool
    outputs: list[OutputError]
    cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: str = "the original in float64"
    nodes: list[NodeError] = field(default_factory=list)
    parted: NodeError | None = None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [
            f"The models {'agree' if self.ok else 'DIFFER'}: {len(self.cases)} "
            f"{'case' if len(self.cases) == 1 else 'cases'}, measured against {self.reference}"
        ]
        lines += [f"  {output}" for output in self.outputs]
        lines += [f"  they part at {self.parted}"] if self.parted is not None else []
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
    bisect: bool | None = False,
) -> Verdict:
    """Runs the original model `a` and the fused model `b` on the same inputs and judges the difference.

    Args:
        a: the original: a path, bytes, `onnx.ModelProto`, or an ONNX Runtime session.
        b: the fused model, likewise.
        inputs: input name to array, or a list of such cases. Default: seeded random ones of several shapes, with
            padding in integer masks and token numbers within the embedding table.
        dims: values for symbolic dimensions of generated inputs, e.g. {"batch": 2, "sequence": [16, 128]}.
        providers: ONNX Runtime's, for both models; default as for `flashonnx.session`.
        bisect: also compare the values behind the fused nodes and, if the models differ, find the node at which they
            part, by running both with values in between as outputs. None: only if they differ. Values are compared
            that have the same name in both, as fusion leaves them.

    Raises:
        ValueError: inputs, outputs or their shapes do not match, or the original cannot run on the inputs.
    """
    step("reading the models")
    original, fused = Candidate(a, providers), Candidate(b, providers)
    _same_names("input", original.inputs, fused.inputs)
    _same_names("output", original.outputs, fused.outputs)
    verdict = Verdict(True, [])
    if is_fused(original.proto) and not is_fused(fused.proto):
        verdict.notes.append(
            "only the first model has nodes of flashonnx: it was taken for the original, by whose rounding the second "
            "is judged; pass the original first"
        )
    step("running the original")
    cases = _cases(original, inputs, dims, verdict)
    if not original.outputs:
        raise ValueError("verify: the models have no outputs, so nothing would be compared")
    if not any(np.asarray(x).size for _, _, outputs in cases for x in outputs):
        raise ValueError("verify: all outputs are empty in every case, so nothing would be compared: choose other dims")
    step("running the fused model")
    with _noting("that is the fused model"):
        session = fused.open()
    fused.outputs = original.outputs  # in this order
    results = []
    for label, feeds, _ in cases:
        with _noting(f"that is the fused model, at {label}, which the original runs"):
            results.append(fused.run(session, feeds))
    del session  # which may hold gigabytes
    step("running the original in float64")
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
            for rows, where in rows_of(feeds, values[0].shape):
                entry = table.setdefault((name, rows), OutputError(name, rows))
                measure(entry, i, where, *values)
    verdict.outputs = list(table.values())
    judged = [entry for entry in verdict.outputs if entry.rows == ALL]
    verdict.ok = all(entry.ok for entry in judged)
    if verdict.ok and not any(entry.compared for entry in judged):
        raise ValueError(
            "verify: no number was compared: every one is NaN, infinite or before the first token in every case, so "
            "pass other inputs"
        )
    verdict.notes += [f"nothing of output '{entry.name}' was compared" for entry in judged if not entry.compared]
    if bisect or (bisect is None and not verdict.ok):
        from flashonnx._bisect import bisect as search

        wrong = [entry.name for entry in judged if not entry.ok]
        found = search(original, fused, [feeds for _, feeds, _ in cases], wrong)
        verdict.nodes, verdict.parted = found.nodes, found.parted
        verdict.notes += [found.note] if found.note else []
    return verdict


@contextlib.contextmanager
def _noting(what: str) -> Iterator[None]:
    """Errors of runtimes, which do not say which model it was, get a note that does."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def _same_names(kind: str, original: list[str], fused: list[str]) -> None:
    if set(original) != set(fused):
        caches = "cache_lengths" in set(original) ^ set(fused)
        hint = ": one has caches; compare the tokens that both write (docs/generation.md)" if caches else ""
        raise ValueError(
            f"verify: {kind}s differ: the original has {sorted(original)}, the fused model {sorted(fused)}{hint}"
        )


def _cases(original: Candidate, inputs: Any, dims: Any, verdict: Verdict) -> list[Case]:
    """Label, feeds and the original's outputs of each case. Generated ones that the original refuses are skipped."""
    run = original.runner(verdict.notes)
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
        for feeds in arrays:
            for spec in original.specs:
                _check_input(spec, feeds[spec.name])
        return [("the given inputs", feeds, run(feeds)) for feeds in arrays]
    cases = []
    for sizes, feeds in generate(original.specs, dims):
        label = ", ".join(f"{k}={v}" for k, v in sizes.items()) or "the model's fixed shapes"
        try:
            cases.append((label, feeds, run(feeds)))
        except Exception as error:
            verdict.notes.append(f"skipped {label}: the original refuses it ({first_line(error)})")
    if not cases:
        raise ValueError(
            "verify: the original runs on no generated input: pass inputs or dims\n  " + "\n  ".join(verdict.notes)
        )
    return cases


def _check_input(spec: InputSpec, array: Array) -> None:
    if array.dtype != spec.dtype:
        raise ValueError(f"verify: input '{spec.name}' is expected to be {spec.dtype}, got {array.dtype}")
    fits = array.ndim == len(spec.shape) and all(
        size in (n, None) or isinstance(size, str) for size, n in zip(spec.shape, array.shape, strict=True)
    )
    if spec.shape and not fits:  # without one the model does not say, or it is a single number
        expected = ", ".join("?" if size is None else str(size) for size in spec.shape)
        raise ValueError(f"verify: input '{spec.name}' is expected to have shape ({expected}), got {array.shape}")


def _truths(original: Candidate, cases: list[Case], verdict: Verdict) -> tuple[list[Any], list[Any]]:
    """The original in float64 (or what it gave, if it has no float64), and the original without graph optimisation."""
    from flashonnx import _float64

    truths = again = [expected for _, _, expected in cases]
    try:
        session = original.open(optimised=False)
        again = [original.run(session, feeds) for _, feeds, _ in cases]
        del session
    except Exception:  # onnx's evaluator ran it: there is nothing else
        pass
    try:
        truths = _float64.run(_float64.widen(original.proto), [feeds for _, feeds, _ in cases])
    except Exception as error:
        verdict.reference = f"the original itself (in float64 it does not run: {first_line(error)})"
    return truths, again


def _array(value: Any) -> Array:
    if not isinstance(value, np.ndarray):
        raise ValueError(f"verify: an output is a {type(value).__name__}, only tensors can be compared")
    return value
