"""The Python of `.venv-clients`, where the `openai` package lives: it pins an older websockets than ours."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent.parent / ".venv-clients" / "bin" / "python"
SECONDS = 90


@pytest.fixture(scope="session")
def client_script() -> Callable[..., Any]:
    """Runs a script of this folder there: arguments and standard input in, the JSON it prints out."""
    if not PYTHON.exists():
        pytest.skip("no .venv-clients here: `make clients` makes it")

    def run(script: str, *arguments: str, given: str = "") -> Any:
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [PYTHON, HERE / script, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
