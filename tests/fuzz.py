"""Random attention problems against the float64 reference, many a second, in any number of processes.

    python tests/fuzz.py --device cuda --seed 0 --count 100000 --jobs 16

Problem i of seed S depends on (S, i) alone, whatever the device, the count and the number of processes; a failure says
how to run just it. Through the seam every byte of a problem's memory is judged (`arranged.py`); through ONNX Runtime
it is one node in a session of its own. "cache" and "cache-ort" are the same of caches and ragged batches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import cache_nodes
import draw as drawing
import draw_cache
import seam
from arranged import Arranged
from cache_cases import CacheCase
from cache_seam import CacheProblem, check_cache_outputs
from flashonnx._capi import Library
from flashonnx._library import library_path
from nodes import one_node, open_session, run
from seam import check_outputs
from varlen_cases import VarlenCase

STALLED = 120.0  # seconds after which a problem counts as one that never ends


@dataclass(frozen=True)
class Fuzzer:
    """Which problems, and how they are run."""

    device: str = "cpu"
    seed: int = 0
    through: str = "seam"
    arch: int | None = None

    def command(self, index: int) -> str:
        """Repeats one problem."""
        through = "" if self.through == "seam" else f" --through {self.through}"
        arch = f" --arch {self.arch}" if self.arch else ""
        return f"python tests/fuzz.py --device {self.device} --seed {self.seed} --only {index}{through}{arch}"

    def describe(self, index: int) -> str:
        """The problem in words."""
        return "\n".join(f"  {part}" for part in self.draw(index))

    def check(self, index: int, library: Library | None = None) -> str:
        """Runs and judges one problem; the name of what solved it, or "refused".

        Raises:
            Exception: whatever is wrong.
        """
        parts = self.draw(index)
        if self.through.startswith("cache"):
            return check_cache(parts[0], self.device, None if self.through == "cache-ort" else library or _library())
        if self.through == "seam":
            seam.arch = self.arch or seam.arch
            return Arranged(library or _library(), *parts, device=self.device).check()
        case = parts[0]
        inputs = case.inputs()
        session = open_session(one_node(case, inputs), self.device)
        try:
            first, second = (run(session, case, inputs) for _ in range(2))
        except Exception as error:
            if "NOT_IMPLEMENTED" in str(error) and case.too_wide:
                return "refused"
            raise
        assert not case.too_wide, "head dimensions beyond 512 are accepted"
        check_outputs(case, inputs, first)
        for name, out in first.items():
            assert out.tobytes() == second[name].tobytes(), f"{name}: the second run gives other bits"
        return "onnxruntime"

    def draw(self, index: int) -> tuple[Any, ...]:
        """The case and, for the seam, its arrangement."""
        numbers = drawing.Seeded(self.seed, index)
        if self.through.startswith("cache"):
            return (draw_cache.problem(numbers, f"{self.seed}:{index}"),)
        node = self.through == "ort"
        case = drawing.problem(numbers, f"{self.seed}:{index}", node=node)
        return (case,) if node else (case, drawing.arrange(numbers, case))

    def outcome(self, index: int) -> Outcome:
        """As `check`, with what is wrong as text."""
        try:
            return Outcome(index, self.check(index))
        except Exception as error:
            # Of a device that is lost in this process, every later problem would only say so again.
            lost = "cuda" in self.device and not isinstance(error, AssertionError)
            text = "".join(traceback.format_exception_only(error)).strip()
            if not isinstance(error, AssertionError):
                text = traceback.format_exc().strip()
            return Outcome(index, "failed", text, lost)


@dataclass(frozen=True)
class Outcome:
    """Of one problem."""

    index: int
    kernel: str
    failure: str = ""
    device_lost: bool = False


def check_cache(case: CacheCase | VarlenCase, device: str, library: Library | None) -> str:
    """Runs and judges one problem with a cache or of a ragged batch, through the seam if there is a library."""
    inputs = case.inputs()
    if isinstance(case, VarlenCase):
        if library:
            case.check(inputs, case.run_seam(library, device, inputs))
        else:
            case.check(inputs, case.run_node(open_session(case.node(inputs), device), inputs))
    elif library:
        CacheProblem(library, case, device).check()
    else:
        session = open_session(cache_nodes.one_node(case, inputs), device)
        check_cache_outputs(case, inputs, cache_nodes.run(session, case, inputs))
    return type(case).__name__


@cache
def _library() -> Library:
    return Library(library_path())


def _work(connection: Connection, fuzzer: Fuzzer, indices: range, deadline: float) -> None:
    """Sends the outcome of each problem until the deadline; ends early where the device is lost."""
    for index in indices:
        if time.time() > deadline:
            break
        outcome = fuzzer.outcome(index)
        connection.send(outcome)
        if outcome.device_lost:
            break
    connection.send(None)


@dataclass
class Worker:
    """A process, and what it has yet to do."""

    fuzzer: Fuzzer
    indices: range
    deadline: float
    last_sign: float = field(default_factory=time.time)

    def start(self) -> None:
        """A fresh process for the rest."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=False)
        arguments = (theirs, self.fuzzer, self.indices, self.deadline)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.last_sign = time.time()

    def receive(self) -> Outcome | None:
        """The next outcome; None at the end. A process that died failed the problem that it had."""
        self.last_sign = time.time()
        try:
            outcome = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            outcome = self.die(f"the process ended with exit code {self.process.exitcode}")
        if outcome is None:
            self.process.join()
            return None
        self.indices = self.indices[1:]
        if outcome.device_lost:
            self.process.kill()
            self.start()
        return outcome

    def die(self, reason: str) -> Outcome:
        """The outcome of the problem at hand when its process is no more."""
        self.process.kill()
        return Outcome(self.indices[0], "failed", reason, device_lost=True)

    @property
    def stalled(self) -> bool:
        """Whether there was no sign of life for too long."""
        return time.time() - self.last_sign > STALLED


def run_all(fuzzer: Fuzzer, count: int, jobs: int, seconds: float, most_failures: int) -> list[Outcome]:
    """The outcomes of problems 0 to count, in any order; failures are printed as they come."""
    deadline = time.time() + seconds
    workers = [Worker(fuzzer, range(i, count, jobs), deadline) for i in range(min(jobs, count))]
    for worker in workers:
        worker.start()
    outcomes: list[Outcome] = []
    failures = 0
    said = time.time()
    while workers and failures < most_failures:
        ready = wait([worker.connection for worker in workers], timeout=1)
        for worker in list(workers):
            if worker.connection in ready:
                outcome = worker.receive()
            elif worker.stalled:
                worker.last_sign = time.time()
                outcome = worker.die(f"no end after {STALLED:.0f} s")
                worker.indices = worker.indices[1:]
                worker.start()
            else:
                continue
            if outcome is None:
                workers.remove(worker)
                continue
            outcomes.append(outcome)
            if outcome.failure:
                failures += 1
                report(fuzzer, outcome)
        if time.time() - said > 20:
            said = time.time()
            print(f"{len(outcomes)} of {count}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.process.kill()
    return outcomes


def report(fuzzer: Fuzzer, outcome: Outcome) -> None:
    """Prints a failure and how to see it again."""
    print(f"FAILED problem {outcome.index}: {outcome.failure}\n{fuzzer.describe(outcome.index)}")
    print(f"  repeat with: {fuzzer.command(outcome.index)}", flush=True)


def main() -> int:
    """The command; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", type=int, help="one problem, which is described whatever becomes of it")
    parser.add_argument("--through", choices=("seam", "ort", "cache", "cache-ort"), default="seam")
    parser.add_argument("--arch", type=int, help="kernels of an older compute capability than the device's: 80")
    parser.add_argument("--minutes", type=float, default=60.0, help="the end, if the count is not reached before")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--most-failures", type=int, default=20, help="stop after so many")
    options = parser.parse_args()
    for name, number, least in (("count", options.count, 1), ("jobs", options.jobs, 1), ("only", options.only or 0, 0)):
        if number < least:
            parser.error(f"--{name} is expected to be {least} or more, got {number}")
    if options.device.partition(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device is expected to be cpu, cuda or cuda:1, got {options.device}")
    if options.arch and options.device == "cpu":
        parser.error("--arch is for cuda")
    fuzzer = Fuzzer(options.device, options.seed, options.through, options.arch)
    if options.only is not None:
        print(fuzzer.describe(options.only))
        print(fuzzer.check(options.only))
        return 0
    # One thread a process: their number is what --jobs says.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    begin = time.time()
    outcomes = run_all(fuzzer, options.count, options.jobs, 60 * options.minutes, options.most_failures)
    kernels = Counter(outcome.kernel for outcome in outcomes)
    print(
        f"{len(outcomes)} of {options.count} problems of seed {options.seed} on {options.device} through "
        f"{options.through} in {time.time() - begin:.0f} s: {kernels['failed']} failed"
    )
    for name, number in kernels.most_common():
        print(f"  {name:12} {number}")
    return 1 if kernels["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
