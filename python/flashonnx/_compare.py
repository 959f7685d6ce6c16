"""What two runs of an output differ by, judged by the error of the original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashonnx._inputs import Array, Feeds

# Four units in the last place of an output's largest value; two of the coarse types.
_FLOOR = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-9}
_SPECIAL = (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf))
ALL, BEFORE = "all", "before the first token"
_UNREAD = "padding before the first token, which sees no key and nobody reads"


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
    rows: str = ALL
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

    @property
    def remark(self) -> str:
        """Why it does not count, if it does not, and what is wrong with it."""
        found = [] if self.rows == ALL else [_UNREAD]
        if self.special:
            found.append(self.special)
        elif not self.ok:
            found.append(f"worst in case {self.worst[0]} at {list(self.worst[1])}")
        return "; ".join(found)

    def __str__(self) -> str:
        rows = "" if self.rows == ALL else f" ({self.rows})"
        wrong = "DIFFERS" if self.rows == ALL else "differs, which does not count"
        text = (
            f"{self.name}{rows}: {'ok' if self.ok else wrong}, error {self.error:.3g}, allowed {self.allowed:.3g} "
            f"(the original's own error is {self.original_error:.3g}); fused - original {self.difference:.3g}"
        )
        return f"{text}; {self.remark}" if self.remark else text


def rows_of(feeds: Feeds, shape: tuple[int, ...], axes: Sequence[int] = (1,)) -> list[tuple[str, Array]]:
    """Which elements of an output are judged, by a (batch, sequence) padding mask among the inputs if there is one.

    `axes` are those of the output that may be the sequence.
    """
    pasts = {x.shape[2] for name, x in feeds.items() if "past" in name and x.ndim == 4}
    axes = (*axes, 2) if pasts and len(shape) == 4 else axes  # of present keys
    for name, mask in feeds.items():
        if "mask" in name.lower() and mask.ndim == 2 and len(shape) > 1 and mask.shape[0] == shape[0]:
            keys = mask.shape[1]  # the last ones are of the new tokens
            found = [axis for axis in axes if axis < len(shape) and keys - shape[axis] in {0, *pasts}]
            if not found:
                continue
            first = np.cumsum(mask != 0, axis=1) == 0
            before = np.zeros(shape, bool)
            for axis in found:
                sizes = (shape[axis] if i == axis else 1 for i in range(1, len(shape)))
                before |= first[:, keys - shape[axis] :].reshape(len(first), *sizes)
            return [(ALL, ~before)] + ([(BEFORE, before)] if before.any() else [])
    return [(ALL, np.ones(shape, bool))]


def measure(
    entry: OutputError, case: int, where: Array, fused: Array, truth: Array, original: Array, again: Array
) -> None:
    """Adds one case to an output's errors, over the elements `where`.

    Raises:
        ValueError: the two models give it different types.
    """
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
