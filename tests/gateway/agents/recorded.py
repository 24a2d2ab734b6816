"""The requests of terminal agents as they are kept: shortened, without ids, dates and paths of the machine on
which they were recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "requests"
LONGEST = 60
"""Characters that stay of a text."""
_OWN = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # UUIDs
    r"|[0-9a-f]{16,}"  # digests
    r"|\d{4}-\d\d-\d\d(T[\d:.+Z]+)?"  # dates
    r"|(?<=ses_)\w+"
)
_CALL_IDS = ("id", "call_id", "tool_use_id", "tool_call_id", "previous_response_id")
"""Fields that keep their text: others name the same thing."""
_WORDS = ("type", "role", "name", "namespace", "model")


def kept(name: str) -> Any:
    """What is kept of one task: the ``client``, and its ``requests``, each with ``path`` and ``body``."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def shortened(body: Any, home: str, field: str = "") -> Any:
    """A body with short texts, and with one tool of each form. ``home``: the path of the agent's own files."""
    if isinstance(body, dict):
        return {name: shortened(value, home, name) for name, value in body.items()}
    if isinstance(body, list):
        if field == "tools":
            forms = {(one.get("type"), *sorted(one), *sorted(one.get("function", ()))): one for one in body}
            body = list(forms.values())
        return [shortened(value, home) for value in body]
    if not isinstance(body, str) or field in _WORDS:
        return body
    if field in _CALL_IDS:
        return body if "resp_" not in body else "resp_1"
    text = _OWN.sub("0", body.replace(home, "/home"))
    if field in ("arguments", "input"):
        return text
    return text if len(text) <= LONGEST else text[:LONGEST].rstrip() + "…"


def kinds(requests: list[Any]) -> set[tuple[str, str]]:
    """What kinds of fields and values are in requests, in any number and order: paths, and there the types of
    objects."""
    return {(one["path"], found) for one in requests for found in _kinds(one["body"], "")}


def _kinds(value: Any, path: str) -> set[str]:
    if isinstance(value, list):
        return {found for one in value for found in _kinds(one, f"{path}[]")}
    if not isinstance(value, dict):
        return {path}
    if path.endswith((".parameters", ".input_schema", ".input", "client_metadata")):
        return {path}
    kind = f"({value.get('type', value.get('role', ''))})"
    return {found for name, one in value.items() for found in _kinds(one, f"{path}{kind}.{name}")}
