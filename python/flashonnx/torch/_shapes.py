"""Sizes of an attention problem from its tensors, checked; for real and for fake tensors alike."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PACKED = ("3hd", "h3d", "gqa", "time_major")


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one call, Q, K and V as (B, heads, S, D) views; `check` has been through them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    past_key: Tensor | None
    past_value: Tensor | None
    lengths: Tensor | None
    sinks: Tensor | None
    biases: tuple[Tensor, Tensor, Tensor] | None  # of Q (Hq, D), of K (Hkv, D), of V (Hkv, Dv)
    four: bool  # Y has four dimensions
    time_major: bool

    @property
    def keys(self) -> Any:
        """Sk, the past included."""
        return self.k.shape[2] + (0 if self.past_key is None else self.past_key.shape[2])

    def empty_y(self) -> tuple[Tensor, Tensor]:
        """Y, not yet filled, and its (B, Hq, Sq, Dv) view.

        A Y of four dimensions lies in memory as (B, Sq, Hq, Dv), so that what follows attention in most models, the
        heads side by side, is a view.
        """
        (batch, heads, length), dim = self.q.shape[:3], self.v.shape[3]
        if self.time_major:
            y = self.q.new_empty(length, batch, heads * dim)
            return y, y.view(length, batch, heads, dim).permute(1, 2, 0, 3)
        y = self.q.new_empty(batch, length, heads, dim)
        view = y.transpose(1, 2)
        return (view if self.four else y.view(batch, length, heads * dim)), view

    def empty_present(self, asked: bool) -> tuple[Tensor, Tensor]:
        """present_key and present_value; empty if not asked for."""
        if not asked:
            return self.q.new_empty(0), self.q.new_empty(0)
        batch, heads = self.k.shape[:2]
        return tuple(self.q.new_empty(batch, heads, self.keys, x.shape[3]) for x in (self.k, self.v))  # type: ignore[return-value]

    def empty_lse(self, asked: bool) -> Tensor:
        """Lse; empty if not asked for."""
        return self.q.new_empty(self.q.shape[:3] if asked else (0,), dtype=torch.float32)


def describe(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    attn_mask: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    nonpad_kv_seqlen: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    *,
    q_num_heads: int | None,
    kv_num_heads: int | None,
    scale: float | None,
    qkv_layout: str,
) -> Problem:
    """Views and sizes of one call of `flashonnx.torch.attention`, which explains the arguments.

    Raises:
        ValueError: they contradict each other or the operator.
    """
    packed = qkv_layout != "separate"
    if packed and qkv_layout not in _PACKED:
        raise ValueError(
            f"FlashAttention: attribute 'qkv_layout' is expected to be one of separate, {', '.join(_PACKED)}, "
            f'got "{qkv_layout}"'
        )
    if scale is not None and not 0 < _float32(scale) < float("inf"):
        raise ValueError(f"FlashAttention: attribute 'scale' is expected to be positive and finite, got {scale:g}")
    inputs = {"Q": query, "K": key, "V": value, "attn_mask": attn_mask, "past_key": past_key}
    inputs |= {"past_value": past_value, "nonpad_kv_seqlen": nonpad_kv_seqlen, "sinks": sinks, "bias": bias}
    _check_types({name: tensor for name, tensor in inputs.items() if tensor is not None})
    for name in "KV":
        if packed == (inputs[name] is not None):
            wish = "absent ('Q' holds all three)" if packed else "there"
            _refuse(name, f'to be {wish} with qkv_layout "{qkv_layout}"', "one" if packed else "none")
    if packed:
        q, k, v = _unpack(query, q_num_heads, kv_num_heads, qkv_layout)
    else:
        assert key is not None and value is not None
        q, k, v = _separate(query, key, value, q_num_heads, kv_num_heads)
    problem = Problem(
        q, k, v, attn_mask, past_key, past_value, nonpad_kv_seqlen, sinks, None,
        four=not packed and query.ndim == 4, time_major=qkv_layout == "time_major",
    )  # fmt: skip
    _check_heads(problem)
    _check_past(problem)
    if attn_mask is not None:
        _check_mask(problem, attn_mask)
    _check_vector("nonpad_kv_seqlen", nonpad_kv_seqlen, q.shape[0], "the batch size")
    _check_vector("sinks", sinks, q.shape[1], "the query heads")
    if bias is None:
        return problem
    width = sum(x.shape[1] * x.shape[3] for x in (q, k, v))
    _check_vector("bias", bias, width, "the features of the projections")
    return dataclasses.replace(problem, biases=_biases(problem, bias, qkv_layout))


def check_numbers(softcap: float, left: int, right: int, empty_row: str, sinks: bool) -> None:
    """Refuses what the operator refuses of its attributes' values.

    Raises:
        ValueError: naming the attribute.
    """
    refused = None
    if not 0 <= softcap < float("inf") or (softcap > 0 and _float32(softcap) == 0):
        refused = "softcap", "0 (none) or positive and finite", f"{softcap:g}"
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            refused = name, "-1 or more", str(size)
    if empty_row not in ("zero", "mean"):
        refused = "empty_row", '"zero" or "mean"', f'"{empty_row}"'
    if empty_row == "mean" and sinks:
        raise ValueError("FlashAttention: attribute 'empty_row' \"mean\" cannot be combined with 'sinks'")
    if refused:
        name, expected, got = refused
        raise ValueError(f"FlashAttention: attribute '{name}' is expected to be {expected}, got {got}")


def _float32(x: float) -> float:
    """As the operator takes a number: what rounds to 0 would mean that it is not given."""
    return ctypes.c_float(x).value


def _refuse(name: str, expected: str, got: Any) -> None:
    raise ValueError(f"FlashAttention: input '{name}' is expected {expected}, got {got}")


def _expect(name: str, what: str, got: Any, expected: Any) -> None:
    """That a size is as expected; of symbolic sizes this becomes a fact of the trace."""
    same = got == expected
    if same is not True:
        message = f"FlashAttention: input '{name}' is expected to have {what} {expected}, got {got}"
        torch._check_value(same, lambda: message)


def _rank(name: str, tensor: Tensor, *ranks: int) -> None:
    if tensor.ndim not in ranks:
        wish = " or ".join(map(str, ranks))
        _refuse(name, f"to have {wish} dimension{'s' if ranks[-1] > 1 else ''}", tensor.ndim)


def _check_types(given: dict[str, Tensor]) -> None:
    kind, device = given["Q"].dtype, given["Q"].device
    if device.type not in ("cpu", "cuda", "meta"):
        _refuse("Q", "to be on a CPU or CUDA device", device)
    same = dict.fromkeys(("K", "V", "past_key", "past_value", "bias"), (kind,))
    masks, vectors = (torch.bool, kind, torch.float32), {"nonpad_kv_seqlen": (torch.int64, torch.int32)}
    allowed = {"Q": FLOATS, "attn_mask": masks, "sinks": (torch.float32, kind)} | same | vectors
    for name, tensor in given.items():
        if tensor.dtype not in allowed[name]:
            wish = " or ".join(dict.fromkeys(_name(dtype) for dtype in allowed[name]))
            _refuse(name, f"to have dtype {wish}", _name(tensor.dtype))
        if tensor.device != device:
            _refuse(name, f"to be on {device} like 'Q'", tensor.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _separate(
    query: Tensor, key: Tensor, value: Tensor, q_heads: int | None, kv_heads: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    _rank("Q", query, 3, 4)
    for name, tensor in (("K", key), ("V", value)):
        _rank(name, tensor, query.ndim)
    if query.ndim == 3:
        if not q_heads or not kv_heads:
            missing = "kv_num_heads" if q_heads else "q_num_heads"
            raise ValueError(f"FlashAttention: attribute '{missing}' is expected with 3-dimensional inputs, got none")
        return _split("Q", query, q_heads), _split("K", key, kv_heads), _split("V", value, kv_heads)
    for attribute, heads, tensor in (("q_num_heads", q_heads, query), ("kv_num_heads", kv_heads, key)):
        if heads is not None and heads != tensor.shape[1]:
            raise ValueError(
                f"FlashAttention: attribute '{attribute}' is expected to be {tensor.shape[1]} as in the shapes, "
                f"got {heads}"
            )
    return query, key, value


def _split(name: str, tensor: Tensor, heads: int) -> Tensor:
    """(B, S, heads * D) as a (B, heads, S, D) view."""
    if heads < 1 or tensor.shape[2] % heads or tensor.shape[2] == 0:
        _refuse(name, f"to have a last dimension that is a positive multiple of {heads} (its heads)", tensor.shape[2])
    return tensor.unflatten(2, (heads, tensor.shape[2] // heads)).transpose(1, 2)


def _unpack(packed: Tensor, q_heads: int | None, kv_heads: int | None, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K, V as (B, heads, S, D) views of the projections that one tensor holds."""
    if layout in ("3hd", "h3d"):
        _rank("Q", packed, 3, 5)
        three = 2 if layout == "3hd" else 3
        if packed.ndim == 3:
            if not q_heads:
                raise ValueError("FlashAttention: attribute 'q_num_heads' is expected with a packed 3-dimensional 'Q'")
            heads = _split("Q", packed, 3 * q_heads).transpose(1, 2)  # (B, S, 3 * H, D)
            packed = heads.unflatten(2, (3, q_heads) if three == 2 else (q_heads, 3))
        _expect("Q", "third dimension" if three == 2 else "fourth dimension", packed.shape[three], 3)
        counts = dict(zip(("q_num_heads", "kv_num_heads"), (q_heads, kv_heads), strict=True))
        for attribute, given in counts.items():
            if given is not None and given != packed.shape[5 - three]:
                raise ValueError(
                    f"FlashAttention: attribute '{attribute}' is expected to be {packed.shape[5 - three]} as in the "
                    f"shapes, got {given}"
                )
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(three))
        return q, k, v
    _rank("Q", packed, 3)
    kv_heads = kv_heads or (q_heads if layout == "time_major" else None)
    if not q_heads or not kv_heads:
        missing = "kv_num_heads" if q_heads else "q_num_heads"
        raise ValueError(f"FlashAttention: attribute '{missing}' is expected with qkv_layout \"{layout}\", got none")
    if layout == "time_major":
        packed = packed.transpose(0, 1)
    heads = _split("Q", packed, q_heads + 2 * kv_heads)
    q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def _biases(p: Problem, bias: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the bias of each projection, packed as Q is."""
    q_heads, kv_heads = p.q.shape[1], p.k.shape[1]
    if layout == "separate":
        sizes = [x.shape[1] * x.shape[3] for x in (p.q, p.k, p.v)]
        parts = bias.split(sizes)
        heads = (q_heads, kv_heads, kv_heads)
        q, k, v = (part.view(n, -1) for part, n in zip(parts, heads, strict=True))
        return q, k, v
    q, k, v = _unpack(bias[None, None], q_heads, kv_heads, layout)
    return q[0, :, 0], k[0, :, 0], v[0, :, 0]


def _check_heads(p: Problem) -> None:
    (batch, q_heads), (kv_heads, kv_length) = p.q.shape[:2], p.k.shape[1:3]
    _expect("K", "batch size", p.k.shape[0], batch)
    _expect("K", "head size", p.k.shape[3], p.q.shape[3])
    _expect("V", "batch size", p.v.shape[0], batch)
    _expect("V", "heads", p.v.shape[1], kv_heads)
    _expect("V", "sequence length", p.v.shape[2], kv_length)
    if kv_heads == 0 or q_heads % kv_heads:
        _refuse("Q", f"to have a multiple of {kv_heads} heads ('K')", q_heads)


def _check_past(p: Problem) -> None:
    if (p.past_key is None) != (p.past_value is None):
        got = "past_value" if p.past_key is None else "past_key"
        raise ValueError(f"FlashAttention: inputs 'past_key' and 'past_value' are expected together, got only '{got}'")
    if p.past_key is None or p.past_value is None:
        return
    if p.lengths is not None:
        raise ValueError("FlashAttention: 'nonpad_kv_seqlen' cannot be combined with 'past_key' and 'past_value'")
    for name, past, new in (("past_key", p.past_key, p.k), ("past_value", p.past_value, p.v)):
        _rank(name, past, 4)
        _expect(name, "batch size", past.shape[0], new.shape[0])
        _expect(name, "heads", past.shape[1], new.shape[1])
        _expect(name, "sequence length", past.shape[2], p.past_key.shape[2])
        _expect(name, "head size", past.shape[3], new.shape[3])


def _check_mask(p: Problem, mask: Tensor) -> None:
    """NumPy's broadcasting to (B, Hq, Sq, .), and no more keys than there are."""
    _rank("attn_mask", mask, 1, 2, 3, 4)
    names = ("batch size (or 1)", "heads (or 1)", "query length (or 1)")
    first = 4 - mask.ndim
    for name, got, expected in zip(names[first:], mask.shape[:-1], p.q.shape[first:3], strict=True):
        if got != 1:
            _expect("attn_mask", name, got, expected)
    torch._check_value(
        mask.shape[-1] <= p.keys,
        lambda: (
            "FlashAttention: input 'attn_mask' is expected to have a last dimension of at most "
            f"{p.keys} (the keys), got {mask.shape[-1]}"
        ),
    )


def _check_vector(name: str, vector: Tensor | None, length: Any, what: str) -> None:
    if vector is not None:
        _rank(name, vector, 1)
        _expect(name, f"as many elements as {what},", vector.shape[0], length)
