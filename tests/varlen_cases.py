"""Problems of FlashAttentionVarlen as data, and their runs through the seam and as nodes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from cache_cases import typed
from cases import numpy_dtype
from compare import assert_close, naive_attention
from flashonnx._capi import Library, Params
from flashonnx._capi_cache import varlen_params
from flashonnx.reference import Array
from flashonnx.reference_cache import attention_varlen, ordered
from nodes import DOMAIN, trimmed, widen
from onnx import helper
from seam import Buffer, address, current_stream, query_device

INPUTS = ("Q", "K", "V", "cu_seqlens_q", "cu_seqlens_k", "sinks")


@dataclass(frozen=True)
class VarlenCase:
    """One problem; `inputs` and `attributes` are what a node gets."""

    id: str
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)
    q_ends: tuple[int, ...] = (0, 3, 8)  # cu_seqlens_q
    k_ends: tuple[int, ...] | None = None  # cu_seqlens_k; None: cu_seqlens_q
    q_tokens: int | None = None  # rows of Q; None: the last of cu_seqlens_q
    k_tokens: int | None = None
    head_dim: int = 32
    value_dim: int | None = None
    ranked: bool = False  # (T, H, D)
    is_causal: int = 0
    left: int = -1
    right: int = -1
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = True
    max_q_length: int = 0
    max_kv_length: int = 0
    poison: bool = False  # NaN in keys of no sequence

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, by name; None where it is left out."""
        return {
            "q_num_heads": None if self.ranked else self.heads[0],
            "kv_num_heads": None if self.ranked else self.heads[1],
            "scale": self.scale,
            "softcap": self.softcap,
            "is_causal": self.is_causal,
            "left_window_size": self.left,
            "right_window_size": self.right,
            "max_q_length": self.max_q_length,
            "max_kv_length": self.max_kv_length,
        }

    @property
    def rows(self) -> tuple[int, int]:
        """Of Q, and of K and V."""
        q_rows = self.q_ends[-1] if self.q_tokens is None else self.q_tokens
        if self.k_tokens is not None:
            return q_rows, self.k_tokens
        return q_rows, q_rows if self.k_ends is None else self.k_ends[-1]

    @property
    def width(self) -> int:
        """Dv."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def inputs(self) -> dict[str, Array]:
        """Of the node, by name, in order, without the absent ones; the same at every call."""
        random = np.random.default_rng(zlib.crc32(self.id.encode()))
        (q_rows, k_rows), (q_heads, kv_heads) = self.rows, self.heads
        shapes = {"Q": (q_rows, q_heads, self.head_dim), "K": (k_rows, kv_heads, self.head_dim)}
        shapes["V"] = (k_rows, kv_heads, self.width)
        found: dict[str, Array] = {}
        for name, shape in shapes.items():
            x = random.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(self.dtype))
            if self.poison and name != "Q":
                ends = ordered(np.array(self.k_ends or self.q_ends), k_rows)
                x[: ends[0]] = x[ends[-1] :] = np.nan
            found[name] = x if self.ranked else x.reshape(shape[0], shape[1] * shape[2])
        found["cu_seqlens_q"] = np.array(self.q_ends, np.int32)
        if self.k_ends is not None:
            found["cu_seqlens_k"] = np.array(self.k_ends, np.int32)
        if self.sinks:
            found["sinks"] = random.standard_normal(q_heads, dtype=np.float32)
        return found

    def heads_view(self, x: Any, heads: int) -> Any:
        """(T, H, D): a view."""
        return x if self.ranked else x.reshape(x.shape[0], heads, x.shape[1] // heads)

    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of both outputs, by name."""
        rows, heads = self.rows[0], self.heads[0]
        y = (rows, heads, self.width) if self.ranked else (rows, heads * self.width)
        return {"Y": y, "lse": (heads, rows)}

    def naive(self, inputs: dict[str, Array]) -> tuple[Array, Array, float]:
        """Plain attention of each sequence in the case's dtype: Y (Tq, Hq, Dv), lse (Hq, Tq), a score's last bit."""
        q, k, v = (self.heads_view(inputs[n], self.heads[n != "Q"]) for n in "QKV")
        q_ends = ordered(inputs["cu_seqlens_q"], len(q))
        k_ends = ordered(inputs.get("cu_seqlens_k", inputs["cu_seqlens_q"]), len(k))
        y, lse, rounding = np.zeros((*q.shape[:2], self.width), np.float32), np.full(q.shape[1::-1], -np.inf), 0.0
        more = {"q_num_heads": None, "kv_num_heads": None, "qkv_layout": "separate", "empty_row": "zero"}
        for b in range(len(q_ends) - 1):
            rows, keys = slice(q_ends[b], q_ends[b + 1]), k_ends[b + 1] - k_ends[b]
            keys = min(keys, self.max_kv_length or keys)
            columns = slice(k_ends[b], k_ends[b] + keys)
            one = {n: x.swapaxes(0, 1)[None] for n, x in (("Q", q[rows]), ("K", k[columns]), ("V", v[columns]))}
            one["nonpad_kv_seqlen"] = np.array([keys])
            if self.sinks:
                one["sinks"] = inputs["sinks"]
            out, log, rounds = naive_attention(one, self.attributes | more)
            shown = min(len(q[rows]), self.max_q_length or len(q))
            y[rows][:shown], lse[:, rows][:, :shown] = out[0].swapaxes(0, 1)[:shown], log[0, :, :shown]
            rounding = max(rounding, rounds)
        return y, lse, rounding

    def check(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Compares outputs, by name, with the reference."""
        y, lse = attention_varlen(*(inputs.get(n) for n in INPUTS), **self.attributes)  # type: ignore[arg-type]
        naive_y, naive_lse, rounding = self.naive(inputs)
        for name, out in outputs.items():
            assert out.shape == self.output_shapes()[name]
        views = (self.heads_view(x, self.heads[0])[None] for x in (outputs["Y"], y))
        assert_close("Y", *views, naive_y[None], rounding)
        if "lse" in outputs:
            assert_close("lse", outputs["lse"], lse, naive_lse, rounding)

    def node(self, inputs: dict[str, Array]) -> onnx.ModelProto:
        """A model of the node alone; bfloat16 widened, see `nodes.widen`."""
        attributes = {n: v for n, v in self.attributes.items() if v is not None}
        outputs = ["Y", "lse"] if self.lse else ["Y"]
        given = trimmed([n if n in inputs else "" for n in INPUTS])
        node = helper.make_node("FlashAttentionVarlen", given, outputs, domain=DOMAIN, **attributes)
        kinds = {"Y": numpy_dtype(self.dtype), "lse": np.dtype(np.float32)}
        to_kind = helper.np_dtype_to_tensor_dtype
        graph = helper.make_graph(
            [node], "one_node",
            [helper.make_tensor_value_info(n, to_kind(x.dtype), x.shape) for n, x in inputs.items()],
            [helper.make_tensor_value_info(n, to_kind(kinds[n]), self.output_shapes()[n]) for n in outputs],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
        return widen(helper.make_model(graph, opset_imports=opsets, ir_version=10))

    def run_node(self, session: Any, inputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs by name, in the case's dtype."""
        feeds = {}
        for name, x in inputs.items():
            narrow = x.dtype.name == "bfloat16"
            feeds[f"{name}_wide" if narrow else name] = x.astype(np.float32) if narrow else x
        outputs = dict(zip(["Y", "lse"], session.run(None, feeds), strict=False))
        return outputs | {"Y": outputs["Y"].astype(numpy_dtype(self.dtype))}

    def run_seam(self, library: Library, device: str, inputs: dict[str, Array]) -> dict[str, Array]:
        """The outputs by name; nothing else is written."""
        buffers = {n: Buffer(x.shape, x.dtype, device, array=x) for n, x in inputs.items()}
        shapes = self.output_shapes()
        outputs = {"Y": Buffer(shapes["Y"], numpy_dtype(self.dtype), device)}
        if self.lse:
            outputs["lse"] = Buffer(shapes["lse"], np.float32, device)
        params = self.params(library, device, {n: b.view for n, b in (buffers | outputs).items()})
        assert library.supported(params)
        workspace = Buffer((library.workspace(params),), np.int8, device)
        library.run(params, address(workspace.view), current_stream(device))
        workspace.check_guards()
        for name, buffer in buffers.items():
            assert buffer.numpy().tobytes() == inputs[name].tobytes(), f"{name} changed"
        return {name: buffer.numpy() for name, buffer in outputs.items()}

    def params(self, library: Library, device: str, views: dict[str, Any]) -> Params:
        """The seam's description of arrays by name."""
        q, k, v, y = (self.heads_view(views[n], self.heads[n in "KV"]) for n in "QKVY")
        return varlen_params(
            library, query_device(library, device), q, k, v, y, views["cu_seqlens_q"],
            views.get("cu_seqlens_k", views["cu_seqlens_q"]), max_q_length=self.max_q_length,
            max_kv_length=self.max_kv_length, lse=views.get("lse"), sinks=views.get("sinks"),
            is_causal=bool(self.is_causal), scale=self.scale, softcap=self.softcap, window_left=self.left,
            window_right=self.right,
        )  # fmt: skip


ALL = [
    *typed(VarlenCase("plain"), VarlenCase("causal", is_causal=1), VarlenCase("gqa", heads=(8, 1), head_dim=64)),
    *typed(VarlenCase("cross", k_ends=(0, 9, 11)), VarlenCase("cross-causal", k_ends=(0, 9, 11), is_causal=1)),
    *typed(VarlenCase("long", q_ends=(0, 130, 131, 400), is_causal=1, head_dim=64, heads=(2, 2))),
    *(VarlenCase(f"window-{lt}-{r}-{c}", q_ends=(0, 20, 33), k_ends=(0, 40, 44), left=lt, right=r, is_causal=c)
      for lt, r, c in ((3, -1, 0), (-1, 2, 0), (2, 1, 0), (5, -1, 1), (0, 0, 0))),
    VarlenCase("ranked", ranked=True, k_ends=(0, 4, 10)),
    *(VarlenCase(f"d{d}-dv{dv}", head_dim=d, value_dim=dv) for d, dv in ((7, 5), (20, 28), (192, 128), (512, 512))),
    VarlenCase("softcap", softcap=2.0),
    VarlenCase("scale", scale=0.3),
    VarlenCase("sinks", sinks=True, k_ends=(0, 0, 6)),
    VarlenCase("no-lse", lse=False),
    # Sequences without tokens, and tokens without sequence (flash-attention#1159, #1537, #2562).
    VarlenCase("empty-middle", q_ends=(0, 1, 1, 2)),
    VarlenCase("empty-ends", q_ends=(0, 0, 5, 5)),
    VarlenCase("no-keys", k_ends=(0, 0, 7)),
    VarlenCase("no-keys-causal", k_ends=(0, 0, 7), is_causal=1),
    VarlenCase("no-tokens", q_ends=(0, 0, 0)),
    VarlenCase("no-key-tokens", k_ends=(0, 0, 0)),
    VarlenCase("no-sequences", q_ends=(0,), q_tokens=4),
    VarlenCase("slack", q_ends=(2, 5, 9), q_tokens=12, k_ends=(1, 6, 7), k_tokens=11, poison=True),
    # Numbers that cannot be are brought into order and range.
    VarlenCase("out-of-range", q_ends=(-4, 3, 99), q_tokens=8, k_ends=(-(2**31), 5, 2**31 - 1), k_tokens=9),
    VarlenCase("out-of-order", q_ends=(0, 6, 2, 8), k_ends=(5, 1, 9, 3), k_tokens=9, is_causal=1),
    VarlenCase("max-q-length", max_q_length=4, is_causal=1),
    VarlenCase("max-kv-length", max_kv_length=2, k_ends=(0, 9, 11), is_causal=1),
    VarlenCase("max-exact", max_q_length=5, max_kv_length=9, k_ends=(0, 9, 11), is_causal=1),
    VarlenCase("many", q_ends=tuple(range(0, 301, 3)), is_causal=1),
]  # fmt: skip
