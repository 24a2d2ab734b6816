"""The real models that tests use: SmolLM2, where it was fetched, and the GGUF files that a variable names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import smollm2

VARIABLE = "HOLDFAST_TEST_MODELS"
"""GGUF files, with a colon between them. They answer with a chat template of their own; where that shows tools,
the model is one that calls them."""


def real_models() -> list[object]:
    """The files, as parameters of a test: named after themselves, skipped where they are missing."""
    named = [Path(file) for file in os.environ.get(VARIABLE, "").split(os.pathsep) if file]
    absent = [pytest.param(Path(), id="others", marks=pytest.mark.skip(reason=f"{VARIABLE} names no file"))]
    return [
        pytest.param(smollm2.FILE, id="smollm2", marks=smollm2.needed),
        *([pytest.param(file, id=file.stem) for file in named] or absent),
    ]
