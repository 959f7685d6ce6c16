"""Any problem of the seam in one block of memory whose every byte is looked at: gaps, guards, what is read and written.

All tensors of a problem lie in one block that is otherwise all ones (NaN in every float type). A kernel that uses what
it should not, or writes where it should not, is seen whatever the strides. NumPy judges on the host for every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from cases import Case, numpy_dtype
from compare import EPSILON
from flashonnx._capi import DTYPES, Library, Params, Tensor
from flashonnx.reference import Array, split
from seam import Buffer, address, check_outputs, current_stream, describe

_PAST = {"past_key": "K", "past_value": "V"}
SPACING = 256  # bytes, at least, between tensors, and what they are aligned to


@dataclass(frozen=True)
class Place:
    """How one tensor lies in memory."""

    order: tuple[int, ...]  # its axes, the one with the largest strides first
    gaps: tuple[int, ...]  # elements left free after each index of the axis at that place in `order`
    step: int = 1  # stride of the innermost axis
    shift: int = 0  # elements from an aligned address to its begin
    repeated: int | None = None  # an axis along which it has one entry, seen many times through stride 0

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """In elements."""
        strides, next_stride = [0] * len(shape), self.step
        for axis, gap in zip(reversed(self.order), reversed(self.gaps), strict=True):
            if axis == self.repeated:
                continue
            last = axis == self.order[-1]
            strides[axis] = next_stride
            next_stride = next_stride * max(shape[axis], 1) + (gap if not last else gap * self.step)
        return tuple(strides)


@dataclass(frozen=True)
class Region:
    """Where a tensor lies in the block."""

    begin: int  # in bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: np.dtype[Any]

    def view(self, block: Array, dtype: Any = None) -> Array:
        """The tensor in a block of bytes."""
        strides = tuple(stride * self.dtype.itemsize for stride in self.strides)
        if 0 in self.shape:  # NumPy takes its strides for steps all the same, which may leave the block
            return np.lib.stride_tricks.as_strided(np.empty(0, dtype or self.dtype), self.shape, strides)
        return np.ndarray(self.shape, dtype or self.dtype, block, self.begin, strides)  # type: ignore[arg-type]

    def rows(self, first: int, count: int) -> Region:
        """So many indices of the third axis, from one on."""
        begin = self.begin + first * self.strides[2] * self.dtype.itemsize
        return replace(self, begin=begin, shape=(*self.shape[:2], count, *self.shape[3:]))

    def erase(self, block: Array) -> None:
        """Sets every bit of the tensor in a block of bytes."""
        self.view(block, f"u{self.dtype.itemsize}")[...] = 2 ** (8 * self.dtype.itemsize) - 1


@dataclass(frozen=True)
class Arrangement:
    """How a case's tensors lie in memory, and what the seam can say besides what a node can."""

    places: dict[str, Place]
    out_dtype: str
    int32_lengths: bool = False
    fixed_split: bool = False
    joined: bool = False  # past and new keys are one tensor, and only the causal offset tells
    in_place: bool = False  # past is the beginning of present's memory
    threads: tuple[int, int] = (2, 1)  # of the two runs, on the CPU
    broken: str = ""  # of BROKEN
    growth: tuple[int, ...] = (0,) * 6  # of the sizes, for a bound of the workspace


_SOMETHING = Tensor(1 << 12, (1, 1, 1, 1), DTYPES["int32"])
# What makes a problem contradict itself, or asks for what no kernel does.
BROKEN: dict[str, Callable[[Params], dict[str, Any]]] = {
    "struct size": lambda p: {"struct_size": p.struct_size - 8},
    "negative batch": lambda p: {"batch": -1},
    "too many queries": lambda p: {"q_length": 1 << 41},
    "head counts": lambda p: {"kv_heads": p.q_heads + 1},
    "past without keys": lambda p: {"past_length": p.past_length + 1, "past_k": Tensor(), "past_v": Tensor()},
    "K of another dtype": lambda p: {"k": Tensor(p.k.data, p.k.stride, p.k.dtype % 3 + 1)},
    "Q with a step": lambda p: {"q": Tensor(p.q.data, (*p.q.stride[:3], 2), p.q.dtype)},
    "long mask": lambda p: {"mask": _SOMETHING, "mask_keys": p.past_length + p.kv_length + 1},
    "window": lambda p: {"window_left": -2},
    "offset": lambda p: {"causal_offset": 1 << 50},
    "NaN as scale": lambda p: {"scale": math.nan},
    "negative scale": lambda p: {"scale": -1.0},
    "reserved": lambda p: {"reserved": 1},
    "negative softcap": lambda p: {"softcap": -1.0},
    "empty row": lambda p: {"empty_row": 2},
    "dropout": lambda p: {"dropout": 0.25},
    "ragged": lambda p: {"cu_seqlens_k": _SOMETHING},
    "descale": lambda p: {"q_descale": _SOMETHING},
    "rotary": lambda p: {"rotary_dim": 2},
    "pages": lambda p: {"block_table": _SOMETHING, "page_size": 16},
    "wide heads": lambda p: {"head_dim": 513},
    "wide values": lambda p: {"value_dim": 1000},
}


@dataclass
class Block:
    """The memory of one problem."""

    size: int = SPACING
    regions: dict[str, Region] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], place: Place) -> None:
        """Room for a tensor."""
        strides = place.strides(shape)
        begin = self.size + place.shift * dtype.itemsize
        self.regions[name] = Region(begin, shape, strides, dtype)
        last = sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
        end = begin + (last + 1) * dtype.itemsize
        self.size = -(-(end + SPACING) // SPACING) * SPACING


class Arranged:
    """A case in an arrangement: its block of memory on the host, and the parameters that describe it."""

    def __init__(self, library: Library, case: Case, arrangement: Arrangement, device: str = "cpu") -> None:
        self.library, self.arrangement, self.device = library, arrangement, device
        # Strides say what layouts say: the reference and the judge see (B, H, S, D) views.
        self.case = replace(case, layout="bhsd")
        self.block = Block()
        arrays = case.inputs()
        if case.lengths is not None and arrangement.int32_lengths:
            arrays["nonpad_kv_seqlen"] = arrays["nonpad_kv_seqlen"].astype(np.int32)
        packed = "K" not in arrays
        if not packed:
            arrays |= zip("QKV", split(arrays["Q"], arrays["K"], arrays["V"], *case.heads, "separate"), strict=True)
        self._add_outputs()
        self._add_inputs(arrays)
        self.host = Buffer((self.block.size,), np.uint8, "cpu")
        for name, array in arrays.items():
            self.block.regions[name].view(self.host.view)[...] = array
        self.views = {name: region.view(self.host.view) for name, region in self.block.regions.items()}
        if packed:
            layout = case.attributes["qkv_layout"]
            self.views |= zip("QKV", split(self.views["Q"], None, None, *case.heads, layout), strict=True)
        # Read back: along a repeated axis it is what was written last.
        self.given = {name: self.views[name].copy() for name in ("Q", "K", "V", *arrays)}
        self.params = self._describe()

    def _add_outputs(self) -> None:
        shapes, dtype = self.case.output_shapes(), numpy_dtype(self.case.dtype)
        dtypes = {"Y": numpy_dtype(self.arrangement.out_dtype), "lse": np.dtype(np.float32)}
        self.outputs = ["Y", *["present_key", "present_value"] * self.case.present, *["lse"] * self.case.lse]
        for name in self.outputs:
            self.block.add(name, shapes[name], dtypes.get(name, dtype), self.arrangement.places[name])

    def _add_inputs(self, arrays: dict[str, Array]) -> None:
        regions, past = self.block.regions, self.case.past or 0
        for name, array in arrays.items():
            if name in _PAST and self.arrangement.joined:
                whole = regions[_PAST[name]]
                regions[name], regions[_PAST[name]] = whole.rows(0, past), whole.rows(past, self.case.kv_length)
            elif name in _PAST and self.arrangement.in_place:
                regions[name] = regions[name.replace("past", "present")].rows(0, past)
            else:
                shape = list(array.shape)
                if name in ("K", "V") and self.arrangement.joined:
                    shape[2] += past
                self.block.add(name, tuple(shape), array.dtype, self.arrangement.places[name])

    def _describe(self) -> Params:
        case, views = self.case, dict(self.views)
        if self.arrangement.joined:
            for past, new in _PAST.items():
                whole = self.block.regions[past].rows(0, case.keys)
                views[new] = whole.view(self.host.view)
                del views[past]
        params = describe(self.library, self.device, case, views, *(views[name] for name in ("Q", "K", "V", "Y")))
        params.fixed_split = self.arrangement.fixed_split
        if self.arrangement.joined:
            params.causal_offset = case.past
        if self.arrangement.broken:
            for name, value in BROKEN[self.arrangement.broken](params).items():
                setattr(params, name, value)
        return params

    def check(self) -> str:
        """Runs twice and looks at everything; the kernel's name, or "refused" where that is right.

        Raises:
            AssertionError: something is not as it should be.
        """
        try:
            kernel = self.library.supported(self.params)
        except (ValueError, NotImplementedError) as error:
            assert self.arrangement.broken or self.case.too_wide, f"refused: {error}"
            self._check_refusal(error)
            return "refused"
        assert not self.arrangement.broken, f"{kernel} accepts a problem that is broken: {self.arrangement.broken}"
        assert not self.case.too_wide, f"{kernel} accepts head dimensions beyond 512"
        self._check_bounds()
        first = self.run(self.arrangement.threads[0], workspace=255)
        second = self.run(self.arrangement.threads[1], workspace=0)
        outputs, again = (
            {name: self.block.regions[name].view(block) for name in self.outputs} for block in (first, second)
        )
        self._judge(outputs)
        for name, out in outputs.items():
            assert out.tobytes() == again[name].tobytes(), f"{name}: the second run gives other bits"
        for block in (first, second):
            self._check_untouched(block)
        return kernel

    def _judge(self, outputs: dict[str, Array]) -> None:
        y, dtype = outputs["Y"], numpy_dtype(self.case.dtype)
        # Nothing more exact can be asked of the result than of the inputs.
        coarse = {"Y": y.astype(dtype)} if EPSILON[y.dtype.name] < EPSILON[dtype.name] else {}
        check_outputs(self.case, self.given, outputs | coarse)

    def run(self, threads: int, workspace: int) -> Array:
        """The block after a run, with every byte of the workspace set to a value before it."""
        block = Buffer((self.block.size,), np.uint8, self.device, array=self.host.view)
        params = Params.from_buffer_copy(self.params)
        move = address(block.view) - address(self.host.view)
        for name in _TENSORS:
            tensor = getattr(params, name)
            if tensor.data is not None:
                tensor.data += move
        if self.device == "cpu":
            params.device.sm_count = threads
        size = self.library.workspace(params)
        scratch = Buffer((size,), np.uint8, self.device)
        scratch.view[...] = workspace
        self.library.run(params, address(scratch.view), current_stream(self.device))
        scratch.check_guards()
        return block.numpy()

    def _check_refusal(self, error: Exception) -> None:
        """Every function says the same, and nothing is written."""
        block = Buffer((self.block.size,), np.uint8, self.device, array=self.host.view)
        params = Params.from_buffer_copy(self.params)
        for function in (self.library.workspace, self.library.workspace_bound, self.library.run):
            try:
                function(params)
            except (ValueError, NotImplementedError) as other:
                assert (type(other), str(other)) == (type(error), str(error)), f"{function.__name__} says: {other}"
            else:
                raise AssertionError(f"{function.__name__} accepts what `supported` refuses: {error}")
        assert (block.numpy() == self.host.view).all(), "a refused problem was written to"

    def _check_bounds(self) -> None:
        needed = self.library.workspace(self.params)
        maxima = Params.from_buffer_copy(self.params)
        assert 0 <= needed <= self.library.workspace_bound(maxima), "workspace is larger than its bound"
        for name, more in zip(_SIZES, self.arrangement.growth, strict=True):
            if name != "past_length" or self.params.past_k.dtype:
                most = 512 if name.endswith("_dim") else 1 << 30
                setattr(maxima, name, min(getattr(maxima, name) + more, most))
        assert needed <= self.library.workspace_bound(maxima), "workspace is larger than the bound of larger sizes"

    def _check_untouched(self, block: Array) -> None:
        """Nothing but the outputs was written: not a gap between their rows, not an input."""
        rest = block.copy()
        for name in self.outputs:
            region, past = self.block.regions[name], self.case.past or 0
            if self.arrangement.in_place and name.startswith("present"):
                region = region.rows(past, self.case.kv_length)
            region.erase(rest)
        wrong = np.flatnonzero(rest != self.host.view)
        if wrong.size:
            ends = {region.begin: name for name, region in self.block.regions.items() if region.begin <= wrong[0]}
            name = ends[max(ends)] if ends else "the first tensor"
            raise AssertionError(
                f"{wrong.size} bytes that are no outputs were written, the first at byte {wrong[0]}, "
                f"{wrong[0] - max(ends, default=0)} after the begin of {name}"
            )


_SIZES = ("batch", "q_length", "kv_length", "past_length", "head_dim", "value_dim")
_TENSORS = ("q", "k", "v", "o", "lse", "past_k", "past_v", "present_k", "present_v", "mask", "key_lengths", "sinks")
