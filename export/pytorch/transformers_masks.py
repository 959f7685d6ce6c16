"""What masks of transformers mean: a mask function read as bounds by position, positions read from a trace."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

MODULE = "transformers.masking_utils"
_PROBE = 1 << 20  # a query position far from both ends


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Which keys j a query i sees, by position: i - left <= j <= i + right; None: no bound."""

    left: int | None = None
    right: int | None = None

    def __and__(self, other: Bounds) -> Bounds:
        lefts = [side for side in (self.left, other.left) if side is not None]
        rights = [side for side in (self.right, other.right) if side is not None]
        return Bounds(min(lefts, default=None), min(rights, default=None))

    def attributes(self) -> dict[str, Any]:
        """As the operator has them."""
        if self.right == 0:
            return {"is_causal": True, "left_window_size": -1 if self.left is None else self.left}
        sides = {"left_window_size": self.left, "right_window_size": self.right}
        return {name: side for name, side in sides.items() if side is not None}


def bounds_of(function: Any, *, packed: bool = False) -> Bounds | None:
    """The bounds that a mask function of transformers stands for; None if it may be more than bounds.

    Recognised by name, and then asked: a function that does not answer as its name promises is not trusted. With
    `packed` what it says of several sequences in one is left out.
    """
    if getattr(function, "__module__", None) != MODULE:
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    if function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = [bounds_of(part, packed=packed) for part in held["mask_functions"]]
        known = [part for part in parts if part is not None]
        return functools.reduce(Bounds.__and__, known, Bounds()) if len(known) == len(parts) else None
    if packed and function.__qualname__ == "packed_sequence_mask_function.<locals>.inner_mask":
        return Bounds()
    if packed and function.__qualname__ == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return bounds_of(held.get("mask_function"), packed=True)  # as far from each other within their sequence
    window = held.get("sliding_window")
    if window is not None and not (isinstance(window, int) and 0 < window < _PROBE // 2):
        return None
    bounds = {
        "causal_mask_function": Bounds(right=0),
        "bidirectional_mask_function": Bounds(),
        "sliding_window_overlay.<locals>.inner_mask": Bounds(left=(window or 0) - 1),
        "sliding_window_bidirectional_overlay.<locals>.inner_mask": Bounds(window, window),
    }.get(function.__qualname__)
    return bounds if bounds is not None and _answers_as(function, bounds) else None


def _answers_as(function: Callable[..., Any], bounds: Bounds) -> bool:
    """Whether a function of positions lets pass what lies within `bounds`, asked on both sides of each edge."""
    left, right = bounds.left, bounds.right
    edges = {0, _PROBE // 2, -_PROBE // 2}
    edges |= {-left, -left - 1} if left is not None else set()
    edges |= {right, right + 1} if right is not None else set()
    try:
        return all(
            bool(function(0, 0, _PROBE, _PROBE + edge))
            == ((left is None or edge >= -left) and (right is None or edge <= right))
            for edge in edges
        )
    except Exception:  # it wants more than positions
        return False


def describe(function: Any) -> str:
    """Its name, for people."""
    return getattr(function, "__qualname__", repr(function)).replace(".<locals>", "")


def is_consecutive(positions: Any) -> bool:
    """Whether a trace shows that every row of `positions` is n, n + 1, n + 2, ...: an arange, shifted and spread."""
    try:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

        mode = get_proxy_mode()
        slot = get_proxy_slot(positions, mode.tracer, None) if mode is not None else None
        node = slot.proxy.node if slot is not None else None
    except (ImportError, AttributeError, KeyError):  # of another PyTorch
        return False
    while node is not None and node.op == "call_function":
        if str(node.target) in ("aten.arange.default", "aten.arange.start"):
            return True
        if not _keeps_steps(str(node.target), node.args[1:]):
            return False
        node = node.args[0]
    return False


def _keeps_steps(operator: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an operator leaves the steps between neighbours in the last dimension as they are."""
    if not arguments:
        return False
    match operator:
        case "aten.add.Tensor":  # a number, not a tensor
            return isinstance(arguments[0], int) or str(getattr(arguments[0], "target", "")).startswith("aten.sym_size")
        case "aten.unsqueeze.default":
            return arguments[0] == 0
        case "aten.expand.default":
            return arguments[0][-1] == -1
        case "aten.repeat.default":
            return arguments[0][-1] == 1
    return False
