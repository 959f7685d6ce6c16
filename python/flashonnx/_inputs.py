"""Inputs for trying an ONNX model out: seeded, of several shapes, sensible for the names that exporters give."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

Array = np.ndarray[Any, np.dtype[Any]]
Feeds = dict[str, Array]

# What symbolic dimensions become: (batch, first other dimension, step to the next other one). Together they cross tile
# sizes, are odd, differ from each other, and have a batch of one; steps of 0 come first because some models need equal
# lengths.
_SHAPES = ((2, 16, 0), (1, 33, 0), (3, 130, 0), (2, 19, 5))
_SEED = 20
_MASKS = ("attention_mask", "decoder_attention_mask")
_TOKENS = ("input_ids", "inputs_embeds")
_DEFAULT_IDS = 10


@dataclass(frozen=True)
class InputSpec:
    """A graph input.

    `ids` bounds its integers if they index a table of that size; `tokens` is what they rise to if they say where the
    sequences of a ragged batch end.
    """

    name: str
    dtype: Any
    shape: tuple[int | str | None, ...]
    ids: int | None = None
    tokens: int | str | None = None


def input_specs(model: onnx.ModelProto) -> list[InputSpec]:
    """The inputs of a model that are not initializers."""
    import onnx

    graph = model.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    specs = []
    ends = _ends(graph)
    for value in graph.input:
        if value.name in initializers:
            continue
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            raise ValueError(f"verify: input '{value.name}' is not a tensor: pass inputs")
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.shape.dim)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        ids = _table_size(value.name, graph, initializers)
        specs.append(InputSpec(value.name, dtype, shape, ids, ends.get(value.name)))
    return specs


def _ends(graph: onnx.GraphProto) -> dict[str, int | str]:
    """For inputs that say where sequences end, the number of their tokens."""
    values = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.value_info)}
    origin = {value.name: value.name for value in graph.input}
    found: dict[str, int | str] = {}
    for node in graph.node:
        if node.op_type in ("Cast", "Identity") and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        if node.op_type != "FlashAttentionVarlen":
            continue
        for tokens, ends in ((0, 3), (1, 4)):  # of Q and of K
            name = origin.get(node.input[ends]) if ends < len(node.input) else None
            dims = values.get(node.input[tokens])
            if name is not None and dims:
                found[name] = dims[0].dim_value if dims[0].HasField("dim_value") else dims[0].dim_param
    return found


def _table_size(name: str, graph: onnx.GraphProto, initializers: Mapping[str, onnx.TensorProto]) -> int | None:
    """The size of the smallest initializer that Gather looks up with this input, through casts and reshapes."""
    names, sizes = {name}, []
    for node in graph.node:  # in topological order
        if node.op_type == "Gather" and node.input[1] in names and node.input[0] in initializers:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            sizes.append(initializers[node.input[0]].dims[axis])
        elif (
            node.op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten")
            and node.input[0] in names
        ):
            names.update(node.output)
    return min(sizes, default=None)


def generate(
    specs: Sequence[InputSpec], dims: Mapping[str, int | Sequence[int]] | None
) -> Iterator[tuple[dict[str, int], Feeds]]:
    """Feeds of several shapes, each with the dimensions that it stands for.

    Args:
        specs: the model's inputs.
        dims: values for symbolic dimensions by name: one, or one for each case.

    Yields:
        The same feeds for the same arguments. Boolean and 0/1 masks leave every query a key; entries of a batch are
        padded to uneven lengths, on the right, and in the last case on the left.
    """
    symbols = symbols_of(specs)
    known = dict(dims or {})
    unknown = sorted(set(known) - set(symbols))
    if unknown:
        raise ValueError(
            f"verify: no input has a dimension '{unknown[0]}'; there are {', '.join(symbols) or 'no symbolic ones'}"
        )
    counts = {len(v) for v in known.values() if not isinstance(v, int)}
    if len(counts) > 1:
        raise ValueError(
            f"verify: dims is expected to list equally many values for each dimension, got {sorted(counts)}"
        )
    implied = {name: size for name, size in sums(specs).items() if name not in known}
    free = [s for s in symbols if s not in known and s not in implied]
    number = counts.pop() if counts else len(_SHAPES) if free else 1
    for case in range(number):
        batch, length, step = _SHAPES[case % len(_SHAPES)]
        sizes = {n: v if isinstance(v, int) else v[case] for n, v in known.items()}
        others = itertools.count(length, step)
        for symbol in free:
            if is_ends(symbol, specs):
                sizes[symbol] = batch + 1
            else:
                sizes[symbol] = batch if is_batch(symbol, specs) else next(others)
        sizes |= {name: evaluate(size, sizes, name) for name, size in implied.items()}
        rng = np.random.default_rng(_SEED + case)
        left = case == number - 1 and number > 1
        pasts = {evaluate(str(spec.shape[2]), sizes, spec.name) for spec in _pasts(specs)}
        past = pasts.pop() if len(pasts) == 1 else 0
        feeds = {}
        for spec in specs:
            shape = _shape(spec, sizes, batch, length)
            total = evaluate(spec.tokens, sizes, spec.name) if isinstance(spec.tokens, str) else spec.tokens
            if total is None:
                values = _values(spec, shape, rng, (left, past))
            else:
                values = _rising(shape[0], total, rng).astype(spec.dtype)
            feeds[spec.name] = np.asarray(values)  # of no dimensions, NumPy makes numbers, which runtimes do not take
        yield sizes, feeds


def symbols_of(specs: Sequence[InputSpec]) -> list[str]:
    """The names of dimensions, also such as "batch size", which are no sums and products of others."""
    texts = dict.fromkeys(d for spec in specs for d in spec.shape if isinstance(d, str))
    plain = {text for text in texts if text.isidentifier()}
    return [text for text in texts if text in plain or not plain.intersection(names_in(text))]


def is_ends(symbol: str, specs: Sequence[InputSpec]) -> bool:
    """A dimension that counts where sequences of packed tokens end: one more than these."""
    return any(spec.tokens is not None and spec.shape[0] == symbol for spec in specs)


def is_batch(symbol: str, specs: Sequence[InputSpec]) -> bool:
    """A dimension that is only ever the first one, and none of packed tokens or their ends."""
    tokens = {name for spec in specs if isinstance(spec.tokens, str) for name in names_in(spec.tokens)}
    later = any(symbol in spec.shape[1:] for spec in specs)
    return not later and symbol not in tokens and not is_ends(symbol, specs)


def sums(specs: Sequence[InputSpec]) -> dict[str, str]:
    """What dimensions of masks are that have a name of their own: past and new keys, of a decoder that has both."""
    pasts = [spec.shape[2] for spec in _pasts(specs)]
    new = [spec.shape[1] for spec in specs if len(spec.shape) in (2, 3) and spec.name.endswith(_TOKENS)]
    masks = [spec for spec in specs if spec.name in _MASKS and len(spec.shape) == 2]
    others = {size for spec in specs if spec not in masks for size in spec.shape}
    if len(set(pasts)) != 1 or len(set(new)) != 1 or new[0] is None:
        return {}
    keys = {spec.shape[1] for spec in masks} - others
    return {size: f"{pasts[0]} + {new[0]}" for size in keys if isinstance(size, str) and size.isidentifier()}


def _pasts(specs: Sequence[InputSpec]) -> list[InputSpec]:
    """Past keys and values, (batch, heads, past, size), if no lengths say how many of them there are."""
    if any("len" in spec.name for spec in specs):
        return []
    pasts = (spec for spec in specs if len(spec.shape) == 4 and "past" in spec.name and ".encoder." not in spec.name)
    return [spec for spec in pasts if spec.shape[2] is not None]


def _shape(spec: InputSpec, sizes: Mapping[str, int], batch: int, length: int) -> tuple[int, ...]:
    shape = []
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, str):
            shape.append(evaluate(dim, sizes, spec.name))
        else:
            shape.append(dim if dim is not None else length if axis else batch)
    return tuple(shape)


def evaluate(expression: str, sizes: Mapping[str, int], name: str) -> int:
    """A dimension such as `past + sequence` or `Max(1, 2*batch)`, as torch's exporter writes them."""
    if expression in sizes:  # a name that only looks like an expression
        return sizes[expression]
    operators = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.FloorDiv: int.__floordiv__}

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=symbol) if symbol in sizes:
                return sizes[symbol]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=function), args=args) if function.lower() in ("max", "min"):
                return (max if function.lower() == "max" else min)(value(a) for a in args)
        raise ValueError

    try:
        return value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError):
        raise ValueError(
            f"verify: input '{name}' has a dimension '{expression}' that cannot be guessed: pass inputs"
        ) from None


def names_in(expression: str) -> list[str]:
    """The dimensions that `evaluate` would ask for; none of what it does not understand."""
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except SyntaxError:
        return []
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return list(dict.fromkeys(n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in functions))


def _values(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator, where: tuple[bool, int]) -> Array:
    """`where`: whether padding is on the left, and how many past keys there are."""
    left, past = where
    name, kind = spec.name.lower(), np.dtype(spec.dtype).kind
    if "mask" in name and (kind in "iu" or len(shape) == 2) and shape:
        return np.broadcast_to(
            _padding(shape[0], shape[-1], left).reshape(-1, *[1] * (len(shape) - 2), shape[-1]), shape
        ).astype(spec.dtype)
    if kind == "b":
        mask = rng.random(shape) < 0.7
        if shape:
            mask[..., 0] = True
        return mask
    if kind in "iu":
        return _integers(spec, shape, rng, past).astype(spec.dtype)
    return rng.standard_normal(shape).astype(spec.dtype)


def _integers(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator, past: int) -> Array:
    name = spec.name.lower()
    if "position" in name and shape:
        first = past if spec.ids is None else min(past, max(0, spec.ids - shape[-1]))  # their table may end before
        return np.broadcast_to(first + np.arange(shape[-1]), shape)
    if "type" in name:
        return np.zeros(shape, np.int64)
    if "len" in name:
        return rng.integers(1, 8, shape)
    return rng.integers(0, spec.ids or _DEFAULT_IDS, shape)


def _rising(count: int, total: int, rng: np.random.Generator) -> Array:
    """Ends of count - 1 sequences of uneven lengths, that of 0 tokens among them if there are many."""
    if count < 2:
        return np.zeros(count, np.int64)
    return np.concatenate([[0], np.sort(rng.integers(1, total + 1, count - 2)), [total]])


def _padding(batch: int, length: int, left: bool) -> Array:
    """(batch, length) ones with padding: entry i keeps about length / (i + 1) tokens, at least one."""
    kept = np.maximum(length // (np.arange(batch) + 1), 1)[:, None]
    positions = np.arange(length)[::-1] if left else np.arange(length)
    return positions < kept
