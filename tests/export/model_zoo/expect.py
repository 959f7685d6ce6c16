"""The zoo's exports as parameters of tests, and what is required of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_zoo import table
from model_zoo.cases import EVERYDAY, cases
from model_zoo.check import Case, outcome

_RENEW = "cd tests/export && python -m model_zoo.table FOLDER renews the table"


def parameters(family: str) -> list[Any]:
    """Every export of a family; all but the quick ones are slow."""
    return [
        pytest.param(case, id=case.id, marks=[] if case.id in EVERYDAY else pytest.mark.slow) for case in cases(family)
    ]


def check(case: Case, folder: Path) -> None:
    """Every attention is found, as many are fused as docs/fusion.md says, the others say why, no answer is wrong."""
    for package in ("timm", "diffusers"):
        if case.entry.id.startswith(package):
            pytest.importorskip(package)
    result = outcome(case, folder)
    assert not result.wrong, "\n".join(result.wrong)
    assert result.found == case.entry.sites
    assert all(result.reasons)
    assert bool(result.reasons) == (result.fused < result.found)
    written = table.expected()
    assert case.id in written, f"docs/fusion.md does not have this export: {_RENEW}"
    assert (result.fused, result.found) == written[case.id], f"docs/fusion.md says otherwise: {_RENEW}"
