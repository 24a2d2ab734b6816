"""The rows of ``planted.toml`` fit the code as it is; `test_planted_bugs` plants them, which takes minutes."""

from __future__ import annotations

import re
from pathlib import Path

from .test_planted_bugs import BUGS, Bug

ROOT = Path(__file__).resolve().parents[2]


def wrong_in(bug: Bug) -> str:
    """What does not fit; empty if all does."""
    texts = (ROOT / bug.file).read_text().count(bug.old)
    if texts != 1:
        return f"{texts} such texts in {bug.file}"
    file, *names = re.sub(r"\[.*", "", bug.test).split("::")
    if not (ROOT / file).exists():
        return f"no {file}"
    text = (ROOT / file).read_text()
    gone = [
        name for name in names if not re.search(rf"^\s*((async )?def|class) {name}\b|^{name} = ", text, re.M)
    ]
    return f"no {gone} in {file}" if gone else ""


def test_each_bug_has_its_text_and_its_test() -> None:
    wrong = {bug.name: said for bug in BUGS if (said := wrong_in(bug))}
    assert BUGS and not wrong
