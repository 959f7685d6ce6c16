"""The fuzzer: a slice of its problems every day, and proof that it finds faults of every kind."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arranged import Arranged, Place
from flashonnx._capi import Library, Params
from fuzz import Fuzzer

SEED = 2026


@pytest.mark.parametrize(("device", "count"), [("cpu", 250), pytest.param("cuda", 2000, marks=pytest.mark.gpu)])
def test_slice(library: Library, device: str, count: int) -> None:
    fuzzer = Fuzzer(device, SEED)
    kernels: Counter[str] = Counter()
    for index in range(count):
        try:
            kernels[fuzzer.check(index, library)] += 1
        except Exception as error:
            error.add_note(f"{fuzzer.describe(index)}\n  repeat with: {fuzzer.command(index)}")
            raise
    # Refusals are problems made to be refused, and every kernel of the device had its share.
    assert kernels.pop("refused") < count / 5
    assert set(kernels) >= ({"cpu"} if device == "cpu" else {"simt", "sm80"})


def test_problems_are_functions_of_seed_and_index(library: Library) -> None:
    """Whatever came before, on whatever device; other seeds and indices give others."""
    descriptions = [Fuzzer(device, seed).describe(i) for i in (5, 3) for seed in (0, 1) for device in ("cuda", "cpu")]
    assert descriptions[0::2] == descriptions[1::2]
    assert len(set(descriptions)) == 4
    bits = [Arranged(library, *Fuzzer("cpu", 1).draw(9)).host.numpy().tobytes() for _ in range(2)]
    assert bits[0] == bits[1]


class Faulty(Library):
    """A library that changes a problem before its kernel sees it, or memory afterwards."""

    before: Callable[[Params], None] | None = None
    after: Callable[[Params], None] | None = None

    def run(self, params: Params, workspace: int = 0, stream: int = 0) -> None:
        """As the library's own, with the fault."""
        changed = Params.from_buffer_copy(params)
        if self.before:
            self.before(changed)
        super().run(changed, workspace, stream)
        if self.after:
            self.after(params)


def _add(name: str, difference: Any) -> Callable[[Params], None]:
    def change(params: Params) -> None:
        setattr(params, name, getattr(params, name) + difference)

    return change


def _write(name: str, offset: int, *, sometimes: bool = False) -> Callable[[Params], None]:
    """Turns the lowest bits of the byte so far from the begin of a tensor."""
    calls = [0]

    def change(params: Params) -> None:
        calls[0] += 1
        tensor = getattr(params, name)
        if tensor.dtype and not (sometimes and calls[0] % 2):
            ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_uint8))[offset] ^= 1

    return change


def _no_mask(params: Params) -> None:
    params.mask.dtype = 0


def _next_keys(params: Params) -> None:
    params.k.data += params.k.stride[2] * (4 if params.q.dtype == 1 else 2) if params.kv_length > 1 else 0
    params.kv_length -= params.kv_length > 1
    params.mask_keys = min(params.mask_keys, params.kv_length + params.past_length)


def _no_lse(params: Params) -> None:
    params.lse.dtype = 0


def _one_group(params: Params) -> None:
    if params.q_heads == 2 * params.kv_heads and params.kv_heads > 1:
        params.k.stride[1] = 0


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "offset": ({"before": _add("causal_offset", 1)}, r"error|zero|inf out of place|second run|NaN out of place"),
    "left window": ({"before": lambda p: _add("window_left", p.window_left >= 0)(p)}, "error|zero|out of place"),
    "scale": ({"before": lambda p: setattr(p, "scale", (p.scale or p.head_dim**-0.5) * 1.1)}, "error"),
    "softcap": ({"before": _add("softcap", 20.0)}, "error"),
    "mask": ({"before": _no_mask}, "error|zero|out of place"),
    "first key": ({"before": _next_keys}, "error|zero|out of place|no outputs|not past and new"),
    "heads": ({"before": _one_group}, "error|zero|out of place|not past and new"),
    "lse is not written": ({"before": _no_lse}, "lse: NaN out of place"),
    "a bit of an input": (
        {"after": _write("k", 0)},
        r"no outputs were written, .* \d+ after the begin of (K|Q|past_key)",
    ),
    "before the output": ({"after": _write("o", -1)}, "no outputs were written"),
    "run to run": ({"after": _write("o", 0, sometimes=True)}, "Y: .*(other bits|error)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(library_path: str, fault: str) -> None:
    """Within the first problems, with words that say what is wrong."""
    library = Faulty(library_path)
    changes, message = FAULTS[fault]
    library.before, library.after = changes.get("before"), changes.get("after")
    with pytest.raises(AssertionError, match=message):
        for index in range(300):
            Fuzzer("cpu", SEED).check(index, library)


def test_faults_of_answers_are_found(library_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `supported`, `workspace` and its bound say is held against what happens."""

    def found(name: str, answer: Callable[..., Any], message: str) -> None:
        library = Library(library_path)
        monkeypatch.setattr(library, name, answer)
        with pytest.raises(AssertionError, match=message):
            for index in range(300):
                Fuzzer("cpu", SEED).check(index, library)

    found("supported", lambda params: "cpu", "accepts")
    found("run", lambda *arguments: None, "NaN out of place|accepts what")
    found("workspace_bound", lambda params: 0, "larger than its bound")

    def refuse(params: Params) -> str:
        raise NotImplementedError("never")

    found("supported", refuse, "refused: never")


def test_workspace_overrun_is_found(library_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(library_path)
    right = library.workspace
    monkeypatch.setattr(library, "workspace", lambda params: right(params) // 64)
    monkeypatch.setattr("seam.GUARD", 1 << 24)  # so that the overrun stays in the guard
    with pytest.raises(AssertionError, match="memory after the array was written"):
        for index in range(20):
            Fuzzer("cpu", SEED).check(index, library)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).parent / "fuzz.py"
    return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, check=False)


def test_command() -> None:
    """Counts by kernel, however many processes; one problem alone."""
    done = _run("--seed", "3", "--count", "30", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("30 of 30 problems of seed 3 on cpu through seam")
    assert "  cpu  " in done.stdout
    alone = _run("--seed", "3", "--only", "7", "--through", "ort")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert "Case(id='3:7'" in alone.stdout


def test_command_survives_crashes(tmp_path: Path) -> None:
    """A process that dies fails its problem, says how to repeat it, and the rest is run."""
    (tmp_path / "crash.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import fuzz\n"
        "check = fuzz.Fuzzer.check\n"
        "fuzz.Fuzzer.check = lambda self, index: os.abort() if index == 4 else check(self, index)\n"
        "if __name__ == '__main__':\n    sys.exit(fuzz.main())\n"
    )
    program = [sys.executable, str(tmp_path / "crash.py"), "--count", "10", "--jobs", "2"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED problem 4: the process ended with exit code -6" in done.stdout
    assert "repeat with: python tests/fuzz.py --device cpu --seed 0 --only 4" in done.stdout
    assert "10 of 10 problems" in done.stdout


def test_arrangements_are_what_they_say() -> None:
    """Strides, gaps and repeated axes of a place, by hand."""
    assert Place(order=(2, 0, 1, 3), gaps=(5, 0, 3, 1)).strides((2, 3, 4, 7)) == (27, 8, 54, 1)
    assert Place((0, 1), (0, 0), step=2).strides((3, 4)) == (8, 2)
    assert Place((0, 1, 2, 3), (0,) * 4, repeated=1).strides((2, 3, 4, 5)) == (20, 0, 5, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--jobs", "0"), "--jobs is expected to be 1 or more, got 0"),
        (("--count", "-5"), "--count is expected to be 1 or more, got -5"),
        (("--device", "tpu"), "--device is expected to be cpu, cuda or cuda:1, got tpu"),
        (("--arch", "80"), "--arch is for cuda"),
    ],
)
def test_nothing_is_not_a_success(arguments: tuple[str, ...], message: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
