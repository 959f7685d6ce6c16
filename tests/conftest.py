"""Markers, devices, the library under test, and what a failure or a skipped tier says."""

from __future__ import annotations

import shlex
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flashonnx._capi import Library
from flashonnx._library import library_path as find_library


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arch", type=int, help="kernels of an older compute capability: 80")
    parser.addoption("--tight", action="store_true", help="arrays without guards around them, for sanitizers")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tight"):
        import seam

        seam.guarded = False
    if config.getoption("--arch"):
        import seam

        seam.arch = config.getoption("--arch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without_gpu = any(item.get_closest_marker("gpu") for item in items) and not _has_cuda()
    for item in items:
        if without_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="tier gpu: no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.failed:
        report.sections.append(("repeat with", f"python -m pytest {shlex.quote(item.nodeid)}"))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} not run: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def library_path() -> str:
    """The file that FLASHONNX_LIBRARY names, or the installed one."""
    return find_library()


@pytest.fixture(scope="session")
def library(library_path: str) -> Library:
    return Library(library_path)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def random(request: pytest.FixtureRequest) -> np.random.Generator:
    """Numbers that depend on nothing but the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
