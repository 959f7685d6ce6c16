"""Encoder-decoders of transformers: exported, fused, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from model_zoo.expect import check, parameters


@pytest.mark.parametrize("case", parameters("pairs"))
def test_export(case: Any, tmp_path: Path) -> None:
    check(case, tmp_path)
