"""On a CPU, a stored format that gains no speed and a wider dtype are said, once each."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import LLM
from espalier.models.quantisers import quantise
from tests.builders import make_target
from tests.checkpoints import edit_config

SIZE: dict[str, Any] = {"device": "cpu", "max_batch": 1, "max_context": 64, "num_pages": 9}


@pytest.mark.parametrize("to", ["fp8", "int4", None])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", None])
def test_what_costs_more_is_said_once(
    to: Any, stored: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_target(tmp_path / "target", hidden=64, intermediate_size=128, head_dim=32)
    if to is not None:
        quantise(path, tmp_path / "out", to, torch.device("cpu"), lambda: None)
        path = tmp_path / "out"
    edit_config(path, dtype=stored)
    for dtype in ("auto", "float32"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "espalier"):
            LLM(path, dtype=dtype, **SIZE).close()
        said = [record.getMessage() for record in caplog.records]
        assert sum("gains no speed on a CPU" in each for each in said) == (to is not None)
        assert sum("stored in bfloat16 and runs in float32" in each for each in said) == (
            stored == "bfloat16" and dtype == "auto"
        )


def test_nothing_is_said_of_the_bundled_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "espalier"):
        LLM("bundled", **SIZE).close()
    assert not caplog.records
