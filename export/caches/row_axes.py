"""Where a value has its sentences and its tokens: axes as factors, two of which are the batch and the new tokens.

A value is *apart* if it may be cut: what is computed from some of the sentences is what is at their places in the
whole, and what is computed from the first tokens is what is at the first places. Then nothing that stands behind a
sentence's tokens, nor beside them, is in what it gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir
from flashonnx.export.layout.factors import Axis, Factor, View, regroup
from flashonnx.export.values.dims import Dim, is_clipped, product
from flashonnx.export.values.facts import Dims, Facts

Axes = tuple[Axis, ...]

_READ = 1 << 16  # elements of a constant


class MixedError(Exception):
    """Why a value is not apart, to be put behind the name of the operator that makes it."""


@dataclasses.dataclass(frozen=True)
class Free:
    """Neither tokens nor their number have to do with it: weights, and what is made of them."""

    axes: Axes | None = None


@dataclasses.dataclass(frozen=True)
class Counted:
    """It depends on how many tokens or sentences there are: sizes, what is made of these, caches."""


@dataclasses.dataclass(frozen=True)
class Apart:
    """It may be cut along the batch and the tokens, wherever they are among its axes."""

    axes: Axes


@dataclasses.dataclass(frozen=True)
class Mixed:
    """It may not, and why; `node` is where that began."""

    node: ir.Node | None
    reason: str


State = Free | Counted | Apart | Mixed


class Rows:
    """The states of a model's values.

    Args:
        facts: of the model.
        tokens: an input whose first axes are the batch and the new tokens.
    """

    def __init__(self, facts: Facts, tokens: ir.Value) -> None:
        self.facts, self.source = facts, tokens
        dims = facts.dims(tokens)
        assert dims is not None
        self.batch, self.tokens = (Factor(size) for size in dims[:2])
        self.states: dict[ir.Value, State] = {}
        self.counts = {name for size in dims[:2] for name in size.atoms}
        self.sizes: set[str] = set()  # names of sizes that have nothing to do with these

    def state(self, value: ir.Value | None) -> State:
        """That of what is in no graph, such as a weight or an input that is left out, is free."""
        return self.states.get(value, Free()) if value is not None else Free()

    def add_inputs(self, inputs: Iterable[ir.Value]) -> None:
        """Those of the model. Sizes that are equal by name are those of the batch or of the tokens."""
        inputs = list(inputs)
        self.sizes = {name for value in inputs for size in self.facts.dims(value) or () for name in size.atoms}
        self.sizes -= self.counts
        for value in inputs:
            dims = self.facts.dims(value)
            if dims is None:
                self.states[value] = Mixed(None, f"the rank of '{value.name}' is not known")
                continue
            axes = [self.named(size) for size in dims]
            if dims and dims[0] == self.batch.size:  # of a fixed batch, too
                axes[0] = self._label(self.batch)
                if len(dims) in (2, 3) and dims[1] == self.tokens.size:
                    axes[1] = self._label(self.tokens)
            known = all(axis is not None for axis in axes)
            self.states[value] = (
                self.apart([axis or () for axis in axes])
                if known
                else Mixed(None, f"'{value.name}' has a size made of the numbers of tokens or sentences: {dims}")
            )

    def apart(self, axes: Sequence[Axis]) -> State:
        """Of such axes; free without batch and tokens."""
        return (Apart if any(map(self.is_labelled, axes)) else Free)(tuple(axes))

    def _label(self, factor: Factor) -> Axis:
        return () if factor.size == 1 else (factor,)

    def named(self, size: Dim, repeats: bool = False) -> Axis | None:
        """An axis of that size, by its name; None where it has to do with the batch or the tokens in another way."""
        if size.value is not None or size.atoms <= self.sizes:
            return self._plain(size, repeats)
        for factor in (self.batch, self.tokens):
            if size == factor.size or is_clipped(size, factor.size):
                return (factor,)
        return None

    def is_count(self, numbers: Dims) -> bool:
        """Whether numbers have, or may have, to do with how many tokens or sentences there are."""
        return any(not number.atoms <= self.sizes for number in numbers)

    def is_labelled(self, axis: Axis) -> bool:
        return any(factor is self.batch or factor is self.tokens for factor in axis)

    def of_output(self, node: ir.Node, axis: int, output: int = 0) -> Axis:
        """An axis as long as that of an output, which is none of tokens."""
        dims = self.facts.dims(node.outputs[output])
        return self._plain(dims[axis] if dims is not None else self.facts.unknown())

    def _plain(self, size: Dim, repeats: bool = False) -> Axis:
        """An axis that has nothing to do with sentences and tokens.

        Raises:
            MixedError: its size has.
        """
        if size.atoms & self.counts:
            raise MixedError(f"nothing shows where an axis of {size} comes from")
        return () if size == 1 else (Factor(size, repeats=repeats),)

    def dims(self, value: ir.Value | None) -> Dims:
        """The shape, which is known.

        Raises:
            MixedError: it is not.
        """
        dims = self.facts.dims(value)
        if value is None or dims is None:
            raise MixedError(f"the rank of '{value.name if value is not None else ''}' is not known")
        return dims

    def axes(self, value: ir.Value | None) -> Axes:
        """The axes of an operand.

        Raises:
            MixedError: it depends on how many tokens there are.
        """
        state = self.state(value)
        if isinstance(state, (Apart, Free)):
            return state.axes if state.axes is not None else self._constant(value)
        assert isinstance(state, Counted) and value is not None
        raise MixedError(f"'{value.name}' depends on how many tokens or sentences there are")

    def _constant(self, value: ir.Value | None) -> Axes:
        """The axes of a weight; it repeats along one as large as the batch if it does not vary along it."""
        dims = self.dims(value)
        array = self.facts.constant(value, limit=_READ) if self.batch.size in dims else None

        def is_alike(axis: int) -> bool:
            return array is not None and bool((array == array[(slice(None),) * axis + (slice(1),)]).all())

        return tuple(self._plain(size, is_alike(axis)) for axis, size in enumerate(dims))

    def free(self, *values: ir.Value | None) -> None:
        """Requires values that are the same for all tokens.

        Raises:
            MixedError: one of `values` has to do with tokens or their number.
        """
        for value in values:
            if value is not None and not isinstance(self.state(value), Free):
                raise MixedError(f"'{value.name}' is expected to be the same for all tokens")

    def whole(self, axes: Axes, *places: int) -> None:
        """Requires that what an operator does along `places` is not along sentences or tokens.

        Raises:
            MixedError: it is.
        """
        for place in places:
            if any(factor is self.tokens for factor in axes[place]):
                raise MixedError(f"it works along the new tokens ('{self.tokens.size}')")
            if any(factor is self.batch for factor in axes[place]):
                raise MixedError(f"it works along the batch ('{self.batch.size}')")

    def broadcast(self, *values: ir.Value | None) -> Axes:
        """The axes of what is computed element by element.

        Raises:
            MixedError: the batch or the tokens of one meet something else of another.
        """
        return self.met([self.axes(value) for value in values if value is not None])

    def met(self, given: Sequence[Axes]) -> Axes:
        """The same of axes."""
        rank = max(map(len, given))
        return tuple(
            self._meet([axes[place] for axes in given if len(axes) >= -place and axes[place]])
            for place in range(-rank, 0)
        )

    def _meet(self, parts: list[Axis]) -> Axis:
        """Any axis may meet as many tokens, one that is the same for each so many sentences."""
        labelled = [axis for axis in parts if self.is_labelled(axis)]
        if not labelled:
            varied = [axis for axis in parts if not repeats(axis)]
            return varied[0] if varied else parts[0] if parts else ()
        expected = self._runs(labelled[0])
        for axis in parts:
            if self.is_labelled(axis):
                if self._runs(axis) != expected:
                    raise MixedError(f"axes {_text(axis)} and {_text(labelled[0])} meet")
            elif size_of(axis) != size_of(labelled[0]) or (self.batch in labelled[0] and not repeats(axis)):
                raise MixedError(f"an axis of {size_of(axis)} meets that of {self._names(labelled[0])}")
        return labelled[0]

    def _runs(self, axis: Axis) -> list[Factor | Dim]:
        """Sentences, tokens, and the sizes of what is between them."""
        runs: list[Factor | Dim] = []
        for factor in axis:
            if self.is_labelled((factor,)):
                runs.append(factor)
            elif runs and isinstance(runs[-1], Dim):
                runs[-1] = runs[-1] * factor.size
            else:
                runs.append(factor.size)
        return runs

    def _names(self, axis: Axis) -> str:
        names = [
            what for factor, what in ((self.batch, "the batch"), (self.tokens, "the new tokens")) if factor in axis
        ]
        return f"{' and '.join(names)} ({size_of(axis)})"

    def reshaped(self, value: ir.Value | None, dims: Dims) -> Axes:
        """The axes in another shape.

        Raises:
            MixedError: the batch or the tokens would be cut, or sizes are not known to fit.
        """
        axes = self.axes(value)
        labels = [factor for axis in axes for factor in axis if self.is_labelled((factor,))]
        made = regroup(View(self.source, (), axes), dims)
        if made is None:
            raise MixedError(f"nothing shows where its axes of sizes {_sizes(axes)} go in {_dims(dims)}")
        if [factor for axis in made.axes for factor in axis if self.is_labelled((factor,))] != labels:
            raise MixedError(f"it cuts the axis of the new tokens or the batch: {_sizes(axes)} to {_dims(dims)}")
        return made.axes


def repeats(axis: Axis) -> bool:
    """Whether it is the same all along."""
    return all(factor.repeats for factor in axis)


def size_of(axis: Axis) -> Dim:
    """How many elements there are along it."""
    return product(factor.size for factor in axis)


def _text(axis: Axis) -> str:
    return " * ".join(str(factor.size) for factor in axis)


def _sizes(axes: Axes) -> str:
    return _dims([size_of(axis) for axis in axes])


def _dims(dims: Iterable[Dim]) -> str:
    return f"({', '.join(map(str, dims))})"
