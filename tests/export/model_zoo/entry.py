"""What a model of the zoo is: how it is made, what goes in, and which axes may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

PADDINGS = ("none", "right", "left", "interleaved", "whole")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shape of inputs.

    Attributes:
        batch: entries.
        sequence: tokens, or what stands for them.
        padding: which of PADDINGS the mask has; "whole" also hides all of the first entry.
    """

    batch: int = 2
    sequence: int = 7
    padding: str = "none"

    def mask(self, keys: int | None = None) -> Any:
        """(batch, keys) int64, 1 where a token counts."""
        keys = self.sequence if keys is None else keys
        mask = torch.ones(self.batch, keys, dtype=torch.int64)
        if self.padding in ("right", "left"):
            lengths = torch.arange(self.batch) * 3 % keys + 1
            mask = (torch.arange(keys) < lengths[:, None]).long()
            mask = mask.flip(1) if self.padding == "left" else mask
        elif self.padding in ("interleaved", "whole"):
            mask = (torch.rand(self.batch, keys) < 0.6).long()
            mask[:, keys // 2] = 1
            if self.padding == "whole":
                mask[0] = 0
        return mask


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        id: its name.
        make: the module in eval mode, which takes its inputs in order and gives tensors, from the name of an attention
            implementation ("eager" or "sdpa").
        inputs: makes them.
        axes: which of their axes are dynamic.
        sites: how many attentions there are.
        attentions: the implementations it has.
        example: the inputs of the export.
        others: the inputs that the answers are compared at besides.
        cannot: routes whose exporter does not take the model, and why.
    """

    id: str
    make: Callable[[str], Any]
    inputs: Callable[[Sizes], dict[str, Any]]
    axes: dict[str, dict[int, str]]
    sites: int = 2
    attentions: tuple[str, ...] = ("sdpa", "eager")
    example: Sizes = Sizes()
    others: tuple[Sizes, ...] = (Sizes(3, 11), *(Sizes(3, 9, padding) for padding in PADDINGS[1:]))
    cannot: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Call(torch.nn.Module):
    """A model that is called with inputs in order and fixed arguments besides, and gives its tensors alone."""

    def __init__(self, model: Any, names: Iterable[str], **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, tuple(names), fixed
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        given = dict(zip(self.names, inputs, strict=True))
        return tuple(tensors(self.model(**given, **self.fixed)))


def tensors(outputs: Any) -> list[Any]:
    """All tensors of a model's outputs, those of outputs within outputs too."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    parts = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [x for part in parts if part is not None for x in tensors(part)]
