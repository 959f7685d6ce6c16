"""`flashonnx inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from flashonnx.cli._attention import GPUS, SHOWN, Attention, attentions, kernel
from flashonnx.cli._files import Input, check_dims
from flashonnx.cli._output import Dim, Json, emit, lengths, say, units, working

if TYPE_CHECKING:
    from flashonnx._capi import Library
    from flashonnx.export import Site


@dataclass
class Row:
    """A site: what it is, how large, and which kernel it would get."""

    site: Site
    attention: Attention | None
    bytes: int | None = None
    kernels: dict[int, tuple[str, str]] = field(default_factory=dict)  # by compute capability, 0 is the CPU

    def alike(self) -> tuple[Any, ...]:
        """Equal for sites that are shown in one line."""
        a = self.attention
        problem = (a.dtype, *a.sizes.values(), *a.features) if a is not None else None
        return self.site.kind, self.site.fused, self.site.reason, self.bytes, problem, tuple(self.kernels.values())


def inspect(
    model: Input,
    dim: Dim = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="CC|cpu", help="Compute capability to ask for, such as 8.9; repeatable. Default: all."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A line for every attention, also for those alike.")] = False,
    json: Json = False,
) -> None:
    """The attention in a model, its size, and which kernel it would get on which device.

    A model that is not fused is fused in memory for the answer; nothing is written. Exits with 1 if a device that was
    named by --gpu has no kernel for a fused attention.
    """
    devices, given = _devices(gpu), lengths(dim)
    check_dims(given, model)
    with working(f"inspecting {model.name}"):
        rows, sizes, missing = _inspected(model, given, devices)
    if json:
        emit(_content(rows, sizes, devices, missing))
    else:
        _tell(rows, sizes, devices, missing, every)
    if gpu and any(not row.kernels[arch][0] for row in rows if row.attention is not None for arch in devices):
        raise typer.Exit(1)


def _devices(wanted: Sequence[str] | None) -> list[int]:
    if not wanted:
        return [*SHOWN, 0]
    known = {f"{arch / 10:.1f}": arch for arch in GPUS} | {str(arch): arch for arch in GPUS} | {"cpu": 0}
    for name in wanted:
        if name.lower() not in known:
            names = ", ".join(f"{arch / 10:.1f}" for arch in GPUS)
            raise ValueError(f"--gpu is expected to be a compute capability ({names}) or cpu, got '{name}'")
    return list(dict.fromkeys(known[name.lower()] for name in wanted))


def _inspected(model: Any, given: Mapping[str, int], devices: list[int]) -> tuple[list[Row], dict[str, int], str]:
    """The rows, the lengths that they are for, and why no kernel is known."""
    import onnx

    import flashonnx
    from flashonnx._capi import Library

    fused, report = flashonnx.fuse(model)
    assert isinstance(fused, onnx.ModelProto)
    nodes = attentions(fused)
    sizes = dict(given)
    for attention in nodes:
        for name in attention.names():
            sizes.setdefault(name, attention.example(name))
    sizes = report.at(sizes).lengths
    library: Library | None = None
    missing = ""
    try:
        library = Library(flashonnx.library_path())
    except (RuntimeError, OSError) as error:
        missing = str(error)
    rows = []
    for site in report.sites:
        node = _node_of(site, nodes) if site.fused else None
        row = Row(site, node, site.bytes(sizes))
        if node is not None:
            _complete(node, site)
            row.bytes = row.bytes or _score_bytes(node, sizes)
            if library is not None:
                row.kernels = {arch: kernel(library, node, sizes, arch) for arch in devices}
            else:
                row.kernels = dict.fromkeys(devices, ("", missing))
        rows.append(row)
    return rows, sizes, missing


def _node_of(site: Site, nodes: list[Attention]) -> Attention | None:
    """The fused node of a site, taken from the list: by its name, which begins with the site's, else the next one."""
    name, op = site.node.rpartition(" / ")[2], site.became.partition("(")[0]
    fitting = [node for node in nodes if not op.startswith("FlashAttention") or node.op == op]
    found = next((node for node in fitting if node.node == name or node.node.startswith(f"{name}_")), None)
    if found is None and fitting:
        found = fitting[0]
    if found is not None:
        nodes.remove(found)
    return found


def _complete(attention: Attention, site: Site) -> None:
    """Sizes that shape inference does not see, but fusion did."""
    names = site.matrix.names if site.matrix is not None else ()
    if len(names) == 4:
        for key, size in zip(("batch", "q_heads", "queries", "keys"), names, strict=True):
            if attention.sizes[key] is None and size != "?":
                attention.sizes[key] = size


def _score_bytes(attention: Attention, sizes: Mapping[str, int]) -> int | None:
    try:
        n = attention.at(sizes)
    except ValueError:
        return None
    return n["batch"] * n["q_heads"] * n["queries"] * n["keys"] * (4 if attention.dtype == "float32" else 2)


def _content(rows: list[Row], sizes: dict[str, int], devices: list[int], missing: str) -> dict[str, Any]:
    sites = []
    for row in rows:
        a = row.attention
        sites.append(
            {
                "node": row.site.node,
                "kind": row.site.kind,
                "fused": row.site.fused,
                "reason": row.site.reason,
                "bytes": row.bytes,
                "dtype": a.dtype if a else None,
                "sizes": a.sizes if a else None,
                "features": a.features if a else None,
                "kernels": {_short(arch): row.kernels[arch][0] or None for arch in row.kernels},
                "refusals": {_short(arch): why for arch, (name, why) in row.kernels.items() if not name},
            }
        )
    content = {
        "lengths": sizes,
        "bytes": sum(row.bytes or 0 for row in rows),
        "devices": {_short(arch): GPUS[arch][0] if arch else "CPU" for arch in devices},
        "sites": sites,
    }
    return content | ({"error": missing} if missing else {})


def _tell(rows: list[Row], sizes: dict[str, int], devices: list[int], missing: str, every: bool) -> None:
    if not rows:
        say("no attention found")
        return
    fused, total = sum(row.site.fused for row in rows), sum(row.bytes or 0 for row in rows)
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    what = "1 attention" if len(rows) == 1 else f"{len(rows)} attentions"
    say(f"{what}, {fused} fused or to be fused; queries by keys {units(total)}{f' at {at}' if at else ''}", "bold")
    groups: dict[Any, list[Row]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((i if every else 0, row.alike()), []).append(row)
    lacks = {_lacks(group[0], missing) for group in groups.values() if group[0].attention is not None}
    same = lacks.pop() if len(lacks) == 1 and len(groups) > 1 else None  # of all: said once, at the end
    for group in groups.values():
        say("")
        _tell_group(group, missing if same is None else None)
    if same:
        say(Text.assemble((f"\nno kernel for any on {same[0]}: ", "bold red"), same[1]))


def _lacks(row: Row, missing: str) -> tuple[str, str] | None:
    """Devices without a kernel for a fused attention, and why."""
    on = [_short(arch) if arch else "the CPU" for arch, (name, _) in row.kernels.items() if not name]
    return (", ".join(on), missing or _why(row)) if on else None


def _tell_group(group: list[Row], missing: str | None) -> None:
    """Lines that fit any terminal; without what has no kernel, if `missing` is None."""
    row = group[0]
    more = f" and {len(group) - 1} more alike" if len(group) > 1 else ""
    say(Text.assemble((row.site.node, "bold"), more, (f"  {row.site.kind}", "dim")))
    size = (units(row.bytes) if row.bytes is not None else "of unknown size") + (" each" if more else "")
    a = row.attention
    if a is None:
        say(f"  {row.site.matrix or 'queries by keys'}: {size}")
        say(Text.assemble(("  left as it is: ", "bold red"), row.site.reason))
        return
    n = {key: "?" if value is None else str(value) for key, value in a.sizes.items()}
    heads = n["q_heads"] if n["q_heads"] == n["kv_heads"] else f"{n['q_heads']} / {n['kv_heads']}"
    width = n["head_dim"] if n["head_dim"] == n["value_dim"] else f"{n['head_dim']} (V {n['value_dim']})"
    square = " × ".join(f"({n[key]})" if " " in n[key] else n[key] for key in ("queries", "keys"))
    say(f"  {heads} heads of {width}, {a.dtype or 'type unknown'}, {square}: {size}")
    if a.features:
        say(f"  asks for {', '.join(a.features)}")
    found: dict[str, list[str]] = {}
    for arch, (name, _) in row.kernels.items():
        found.setdefault(name, []).append(_short(arch) if arch else "the CPU")
    parts = [f"{name} on {', '.join(on)}" for name, on in found.items() if name]
    if parts:
        say(Text.assemble("  kernel ", ("; ".join(parts), "green")))
    if missing is not None and (lack := _lacks(row, missing)) is not None:
        say(Text.assemble((f"  no kernel on {lack[0]}: ", "bold red"), lack[1]))


def _why(row: Row) -> str:
    """The reasons of those without a kernel, each once."""
    return "; ".join(dict.fromkeys(why for name, why in row.kernels.values() if not name))


def _short(arch: int) -> str:
    return f"{arch / 10:.1f}" if arch else "cpu"
