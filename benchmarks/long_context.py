"""Memory that a long context takes at batch 1: a prompt in chunks, and a step, with a cache in place and without one.

    python -m benchmarks.long_context --output benchmarks/results/h200-long-context.csv
    python -m benchmarks.long_context --plot benchmarks/results/h200-long-context.csv    # no measurement: the figure

`ours` appends to a cache in place, in one piece or in pages. `concat` is what a plain export does: past and new keys
are concatenated, scores are a matrix of queries by keys. Peaks are of `memory.peak`: whatever is taken beyond the cache
and the inputs, the output included; on a GPU that others use meanwhile, theirs as well. Answers are compared with
float64 for the last queries.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import environment, memory
from benchmarks.backends.step import paged, shuffled
from benchmarks.results import MEASURED

if TYPE_CHECKING:
    from torch import Tensor

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
TRUTH = 4  # queries of which answers are compared
ALLOWED = 0.01  # ||answer - truth|| / ||truth||


@dataclass(frozen=True)
class Row:
    """One way through one context; None is an empty field."""

    date: str
    commit: str
    device: str
    driver: str
    versions: str
    phase: str  # "prefill": the whole prompt; "decode": one more token
    variant: str
    context: int  # keys at the end
    chunk: int  # queries of a call
    cache_mib: float  # of keys and values, 8 heads of 128, 16 bits
    scores_mib: float  # of one matrix of queries by keys, which no fused kernel has
    status: str
    peak_mib: float | None = None  # beyond the cache and the inputs
    workspace_mib: float | None = None  # of that, what the library asked for
    seconds: float | None = None  # of all calls, the first ones included: no benchmark of speed
    error: float | None = None


class Ours:
    """Calls of FlashAttentionKVCache's kernels with one cache."""

    def __init__(self, context: int, page_size: int, like: Tensor) -> None:
        import torch
        from flashonnx._capi import CPU, CUDA, Library
        from flashonnx._library import library_path

        self._library, self._stream = Library(library_path()), 0
        self._device = self._library.device(CUDA if like.is_cuda else CPU)
        if like.is_cuda:
            self._stream = torch.cuda.current_stream().cuda_stream
        shape, self._order, self._table = (1, KV_HEADS, context, DIM), None, None
        if page_size:
            self._order, self._table = shuffled(1, context, page_size, like.device.type)
            shape = (len(self._order), page_size, KV_HEADS, DIM)
        self.caches = [like.new_zeros(shape) for _ in range(2)]
        self.workspace = 0

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Puts keys into the cache."""
        for cache, x in zip(self.caches, (k, v), strict=True):
            if self._order is None:
                cache.copy_(x.transpose(1, 2))
            else:
                cache.copy_(paged(x, cache.shape[1], self._order))

    def __call__(self, before: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The answers to a chunk, whose keys are appended behind the first `before`."""
        import torch
        from flashonnx._capi_cache import kv_cache_params

        out = torch.empty_like(q)
        lengths = torch.full((1,), before, dtype=torch.int32, device=q.device)
        views = (x.transpose(1, 2) for x in (q, k, v, out))
        params = kv_cache_params(
            self._library, self._device, *views, *self.caches, lengths, block_table=self._table, is_causal=True
        )
        size = self._library.workspace(params)
        self.workspace = max(self.workspace, size)
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device=q.device)
        self._library.run(params, workspace.data_ptr(), self._stream)
        return out


class Concat:
    """The same as a plain graph: concatenation, two products and a softmax."""

    workspace = 0

    def __init__(self, like: Tensor) -> None:
        self.caches = [like.new_empty((1, KV_HEADS, 0, DIM)) for _ in range(2)]

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Puts keys into the cache."""
        self.caches = [x.transpose(1, 2).contiguous() for x in (k, v)]

    def __call__(self, before: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The answers to a chunk; the caches are new ones afterwards."""
        import torch

        self.caches = [
            torch.cat((past[:, :, :before], new.transpose(1, 2)), 2)
            for past, new in zip(self.caches, (k, v), strict=True)
        ]
        keys, values = (x.repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in self.caches)
        scores = (q.transpose(1, 2) @ keys.transpose(-1, -2)) / math.sqrt(DIM)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(before + 1)
        return (torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ values).transpose(1, 2)


def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last queries' answers in float64, one key head after the other."""
    import torch

    queries, keys = q[0, -TRUTH:].double(), k.shape[1]
    count = len(queries)
    hidden = torch.ones((count, keys), dtype=torch.bool, device=q.device).triu(keys - count + 1)
    group = Q_HEADS // KV_HEADS
    out = torch.empty_like(queries)
    for head in range(KV_HEADS):
        heads = slice(head * group, (head + 1) * group)
        scores = queries[:, heads].transpose(0, 1) @ k[0, :, head].double().T / math.sqrt(DIM)
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        out[:, heads] = (weights @ v[0, :, head].double()).transpose(0, 1)
    return out


def measure(context: int, chunk: int, device: str, page_size: int) -> Iterator[dict[str, object]]:
    """What stands in the rows of one context, apart from where it was measured."""
    import torch

    generator = torch.Generator(device).manual_seed(context)

    def normal(heads: int) -> Tensor:
        shape = (1, context, heads, DIM)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(torch.float16)

    q, k, v = normal(Q_HEADS), normal(KV_HEADS), normal(KV_HEADS)
    expected, size = truth(q, k, v), q.element_size()
    variants: dict[str, Callable[[], Ours | Concat]] = {
        "ours": lambda: Ours(context, 0, q),
        f"ours, pages of {page_size}": lambda: Ours(context, page_size, q),
        "concat": lambda: Concat(q),
    }

    def calls(attend: Ours | Concat, first: int, step: int) -> Tensor:
        out = q.new_empty(0)
        for at in range(first, context, step):
            part = slice(at, at + step)
            out = attend(at, q[:, part], k[:, part], v[:, part])
        return out

    for name, make in variants.items():
        for phase in ("prefill", "decode"):
            # A plain graph of a prompt knows no chunks.
            step = 1 if phase == "decode" else context if name == "concat" else chunk
            scores = Q_HEADS * step * context * size
            row: dict[str, object] = {
                "phase": phase, "variant": name, "context": context, "chunk": step, "scores_mib": scores / 2**20,
                "cache_mib": (k.nbytes + v.nbytes) / 2**20, "status": MEASURED,
            }  # fmt: skip
            attend = make()
            free = torch.cuda.mem_get_info()[0] if device == "cuda" else 4 << 30
            if name == "concat" and 3 * scores > free:  # scores, masked scores, weights
                yield row | {
                    "status": f"{scores / 2**30:.0f} GiB for each of three matrices, {free / 2**30:.0f} are free"
                }
                continue
            if phase == "decode":  # all before it is there already
                attend.fill(k, v)
            begin = time.perf_counter()
            first = context - 1 if phase == "decode" else 0
            out, peak = memory.peak(partial(calls, attend, first, step), device)
            seconds = time.perf_counter() - begin
            answers = out[0, -TRUTH:].double()
            error = float((answers - expected[-len(answers) :]).norm() / expected[-len(answers) :].norm())
            if error > ALLOWED:
                row["status"] = f"wrong: an error of {error:.2g}"
            yield row | {
                "peak_mib": None if peak is None else peak / 2**20, "seconds": seconds, "error": error,
                "workspace_mib": attend.workspace / 2**20,
            }  # fmt: skip
            del attend, out


def draw(path: Path) -> Path:
    """The figure of a CSV file, beside it: what each variant takes beyond the cache, and what the cache takes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, phase in zip(figure.subplots(1, 2, sharey=True), ("prefill", "decode"), strict=True):
        mine = [row for row in rows if row["phase"] == phase]
        cache = {int(row["context"]): float(row["cache_mib"]) for row in mine}
        axis.plot(list(cache), list(cache.values()), color="black", linestyle=":", label="the cache itself")
        for variant in dict.fromkeys(row["variant"] for row in mine):
            points = {int(row["context"]): row["peak_mib"] for row in mine if row["variant"] == variant}
            xs = [context for context, peak in points.items() if peak and float(peak) > 0]
            style = {"ours": ("tab:red", "o"), "concat": ("black", "x")}.get(variant, ("lightcoral", "P"))
            axis.plot(xs, [float(points[x]) for x in xs], color=style[0], marker=style[1], label=variant)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(list(cache), [str(context) for context in cache])
        axis.minorticks_off()
        axis.set_xlabel("keys")
        axis.grid(alpha=0.3)
        axis.set_title("a prompt" if phase == "prefill" else "one more token")
    figure.axes[0].set_ylabel("MiB beyond cache and inputs")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"Memory at batch 1, {Q_HEADS} query and {KV_HEADS} key heads of {DIM}: {rows[0]['device']}")
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=150)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes the CSV file, or draws one."""
    from benchmarks.cli import library_version

    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_context", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contexts", default="8192,32768,131072", help="default: %(default)s")
    add("--chunk", type=int, default=2048, help="queries of a call; default: %(default)s")
    add("--page-size", type=int, default=64, help="default: %(default)s")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--commit", help="what to note as the commit; default: what git says")
    add("--output", type=Path, default=Path("build/long-context.csv"), metavar="FILE", help="default: %(default)s")
    add("--plot", type=Path, metavar="FILE", help="measure nothing: draw this CSV file")
    options = parser.parse_args(arguments)
    if options.plot:
        print(draw(options.plot))
        return 0
    where = asdict(environment.describe(options.device, library_version(), options.commit))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    wrong = False
    with options.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        if options.device == "cuda":  # kernels are loaded when they are first needed, which takes memory, too
            list(measure(2 * options.chunk, options.chunk, "cuda", options.page_size))
        for context in map(int, options.contexts.split(",")):
            for found in measure(context, options.chunk, options.device, options.page_size):
                row = Row(**where, **found)  # type: ignore[arg-type]
                writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})
                wrong |= row.status.startswith("wrong")
                print(_brief(row))
    return int(wrong)


def _brief(row: Row) -> str:
    name = f"{row.context:7} {row.phase:8} {row.variant:18} cache {row.cache_mib:8.1f} MiB"
    if row.status != MEASURED or row.peak_mib is None:
        return f"{name}: {row.status}"
    return f"{name}, beyond it {row.peak_mib:9.1f}, of which workspace {row.workspace_mib:6.2f}, error {row.error:.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
