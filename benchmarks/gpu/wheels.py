"""Which of the packages that ``pyproject.toml`` names are not installed on this machine."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def missing(*extras: str) -> list[str]:
    """Names of the program's own dependencies and of these extras', all of which import by their names."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    named = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in named]
    return sorted({name for name in names if find_spec(name.replace("-", "_")) is None})
