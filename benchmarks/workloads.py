"""What is measured: attention problems named after the models they come from, as data, with what they cost at least."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "bool": 1}


@dataclass(frozen=True)
class Workload:
    """One attention problem, (B, S, H, D) in memory, with all heads of a token side by side."""

    name: str
    group: str
    dtype: str
    batch: int
    heads: tuple[int, int]  # of queries and of keys
    lengths: tuple[int, int]  # of queries and of keys
    head_dim: int
    causal: bool = False  # query i sees keys 0 to i; only with as many queries as keys
    window: int = 0  # keys that a query sees at most, its own included; 0: no such bound. Only if causal
    mask: str = ""  # its dimensions among b h q k and 1, e.g. "b11k"; "" is none
    mask_dtype: str = "bool"  # "bool" masks the last few keys; "T" is a bias of Q's dtype
    # Whether ONNX Runtime sessions take part unless others are asked for: each takes about a second to make.
    sessions: bool = True
    cache: bool = False  # K and V are (B, H, S, D) in memory, as key/value caches are
    launches: int = 1  # in one CUDA graph, of which a time is divided by it: for calls of a few microseconds
    copies: int = 1  # of Q, K and V, which those launches take in turn: with many, none finds its own in the L2 cache

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The mask as it stands in memory, broadcast dimensions being 1."""
        sizes = {"b": self.batch, "h": self.heads[0], "q": self.lengths[0], "k": self.lengths[1], "1": 1}
        return tuple(sizes[letter] for letter in self.mask)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products: 4 B H Sq Sk D, half of it if causal.

        That is what papers on attention count: 2 operations for each multiply-add, two products, nothing for the
        softmax, and for causal problems half of the square, not the S more of its diagonal. A window leaves a band of
        it: half of the square without half of the one that is beyond.
        """
        queries, keys = self.lengths
        pairs = queries * keys // (2 if self.causal else 1)
        if self.window:
            pairs -= max(0, keys - self.window) ** 2 // 2
        return 4 * self.batch * self.heads[0] * pairs * self.head_dim

    @property
    def bytes(self) -> int:
        """Bytes that must move at least: Q, K, V and the mask read once, the output written once."""
        size = ELEMENT_SIZES[self.dtype]
        (q_heads, kv_heads), (q_length, kv_length) = self.heads, self.lengths
        rows = 2 * q_heads * q_length + 2 * kv_heads * kv_length
        mask = 0
        if self.mask:
            mask = ELEMENT_SIZES.get(self.mask_dtype, size)
            for extent in self.mask_shape:
                mask *= extent
        return self.batch * rows * self.head_dim * size + mask

    @property
    def score_bytes(self) -> int:
        """Bytes of the matrix of queries by keys that an unfused graph writes out."""
        return self.batch * self.heads[0] * self.lengths[0] * self.lengths[1] * ELEMENT_SIZES[self.dtype]

    @property
    def shape(self) -> str:
        """For people: `B8 H12 S512 D64 causal float16`."""
        (q_heads, kv_heads), (q_length, kv_length) = self.heads, self.lengths
        heads = f"H{q_heads}" if q_heads == kv_heads else f"H{q_heads}/{kv_heads}"
        length = f"S{q_length}" if q_length == kv_length else f"S{q_length}x{kv_length}"
        extra = (" causal" if self.causal else "") + (f" window {self.window}" if self.window else "")
        extra += f" mask {self.mask} {self.mask_dtype}" if self.mask else ""
        return f"B{self.batch} {heads} {length} D{self.head_dim}{extra} {self.dtype}"


def for_device(device: str) -> list[Workload]:
    """The workloads of "cuda" or "cpu", in the order in which they are measured."""
    if device == "cpu":
        return [*_cpu()]
    return [*_cells(), *_masks(), *_float32(), *_models(), *_decode(), *_runtimes(), *_growth()]


def select(workloads: list[Workload], patterns: str) -> list[Workload]:
    """Those whose name or group is, or fits, one of the patterns.

    Args:
        workloads: to choose from.
        patterns: separated by commas, with `*` and `?`, e.g. `cells,bert-*`; empty: all.

    Raises:
        ValueError: a pattern fits nothing.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    if not wanted:
        return workloads
    for pattern in wanted:
        if not any(_fits(w, pattern) for w in workloads):
            groups = ", ".join(dict.fromkeys(w.group for w in workloads))
            raise ValueError(f"--only: no workload or group is called '{pattern}' (groups: {groups}; see --list)")
    return [w for w in workloads if any(_fits(w, pattern) for pattern in wanted)]


def _fits(workload: Workload, pattern: str) -> bool:
    return fnmatchcase(workload.name, pattern) or fnmatchcase(workload.group, pattern)


def _cells() -> list[Workload]:
    """The 24 cells in which the peers are known: 16384 tokens, 2048 features, bfloat16."""
    return [
        Workload(
            f"d{dim}-s{length}-{'causal' if causal else 'full'}", "cells", "bfloat16", 16384 // length,
            (2048 // dim, 2048 // dim), (length, length), dim, causal, sessions=False,
        )
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in (512, 2048, 8192, 16384)
    ]  # fmt: skip


def _masks() -> list[Workload]:
    """Padding as models have it, bool and additive, and a bias that all heads and batches share."""
    kinds = (("b11k", "bool"), ("b11k", "T"), ("11qk", "T"))
    return [
        Workload(
            f"mask-{mask}-{'bool' if kind == 'bool' else 'bias'}-d{dim}-s{length}", "masks", "bfloat16",
            16384 // length, (2048 // dim, 2048 // dim), (length, length), dim, mask=mask, mask_dtype=kind,
            sessions=False,
        )
        for dim in (64, 128, 256)
        for length in (512, 4096)
        for mask, kind in kinds
    ]  # fmt: skip


def _float32() -> list[Workload]:
    return [
        Workload(
            f"fp32-d{dim}-s{length}-{'causal' if causal else 'full'}", "float32", "float32", 4096 // length,
            (2048 // dim, 2048 // dim), (length, length), dim, causal, sessions=False,
        )
        for dim in (64, 128)
        for causal in (False, True)
        for length in (512, 2048, 4096)
    ]  # fmt: skip


def _square(name: str, batch: int, heads: int, length: int, head_dim: int, causal: bool = False) -> Workload:
    return Workload(name, "models", "float16", batch, (heads, heads), (length, length), head_dim, causal)


def _models() -> list[Workload]:
    def llama(size: str, heads: int, length: int) -> Workload:
        return Workload(f"llama-{size}-s{length}", "models", "float16", 1, (heads, 8), (length, length), 128, True)

    def sdxl(name: str, heads: int, length: int) -> Workload:
        return Workload(f"sdxl-{name}", "models", "float16", 2, (heads, heads), (length, 77), 64)

    bert = Workload("bert-base-b8-s512-padded", "models", "float16", 8, (12, 12), (512, 512), 64, mask="b11k")
    gemma = Workload(
        "gemma3-12b-s8192-window", "models", "bfloat16", 1, (16, 8), (8192, 8192), 256, causal=True, window=1024
    )
    return [
        _square("bert-base-b32-s128", 32, 12, 128, 64),
        _square("bert-base-b8-s512", 8, 12, 512, 64),
        bert,
        _square("bert-large-b8-s512", 8, 16, 512, 64),
        _square("vit-l-b16", 16, 16, 577, 64),
        _square("gpt2-b8-s1024", 8, 12, 1024, 64, causal=True),
        *(llama(size, heads, n) for size, heads in (("8b", 32), ("70b", 64)) for n in (2048, 8192, 32768)),
        gemma,
        _square("whisper-large-encoder-b8", 8, 20, 1500, 64),
        sdxl("cross-64", 10, 4096),
        sdxl("cross-32", 20, 1024),
        _square("sdxl-self-64", 2, 10, 4096, 64),
    ]


def _decode() -> list[Workload]:
    """One new token against a cache that is full: 32 query and 8 key heads, 20 launches.

    Each finds the cache in L2 where the one before left it; where it fits there, once more with other caches, 256 MiB
    of them, read in between.
    """
    workloads, launches = [], 20
    for batch, keys in ((1, 1024), (1, 4096), (1, 32768), (8, 4096), (16, 4096), (8, 32768)):
        one = Workload(
            f"decode-b{batch}-s{keys}",
            "decode",
            "float16",
            batch,
            (32, 8),
            (1, keys),
            128,
            cache=True,
            launches=launches,
        )
        workloads.append(one)
        if one.bytes < 256 << 20:
            copies = min(launches, 1 + -(-(256 << 20) // one.bytes))
            workloads.append(replace(one, name=f"{one.name}-cold", copies=copies))
    return workloads


def _runtimes() -> list[Workload]:
    """The three shapes in which ONNX Runtime's own operators were measured before."""
    return [
        Workload(
            f"ort-b{b}-s{s}-h{h}-d{d}-{'causal' if causal else 'full'}", "runtimes", "float16",
            b, (h, h), (s, s), d, causal,
        )
        for b, s, h, d in ((4, 2048, 16, 128), (1, 16384, 16, 128), (32, 512, 12, 64))
        for causal in (False, True)
    ]  # fmt: skip


def _growth() -> list[Workload]:
    """One sequence that grows: where an unfused graph's time and memory are quadratic."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    return [Workload(f"growth-s{s}", "growth", "float16", 1, (16, 16), (s, s), 64) for s in lengths]


def _cpu() -> list[Workload]:
    def square(name: str, batch: int, heads: int, length: int, dim: int, **more: bool | str) -> Workload:
        group = "growth" if name.startswith("growth") else "models"
        return Workload(name, group, "float32", batch, (heads, heads), (length, length), dim, **more)  # type: ignore[arg-type]

    return [
        square("minilm-b4-s512", 4, 12, 512, 32),
        square("minilm-b4-s512-padded", 4, 12, 512, 32, mask="b11k"),
        square("bert-base-b1-s128", 1, 12, 128, 64),
        square("bert-base-b1-s512", 1, 12, 512, 64),
        square("gpt2-b1-s512", 1, 12, 512, 64, causal=True),
        square("vit-b-b1", 1, 12, 197, 64),
        Workload("decode-b1-s2048", "decode", "float32", 1, (32, 8), (1, 2048), 128),
        *(square(f"growth-s{s}", 1, 4, s, 64) for s in (256, 512, 1024, 2048, 4096)),
    ]
