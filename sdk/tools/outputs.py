"""What a tool answered, as the text that a model reads. Knows nothing of tools being run."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import ToolFailed

MAX_OUTPUT_BYTES = 512 << 10
"""Of an output as it stands in a frame; half of what that may have."""


def failure(message: str) -> str:
    """An output that tells the model what went wrong."""
    return output_text({"error": message})


def broken_off(written: str, told: str) -> str:
    """An output that went wrong after some of it was written: that, on a line of its own what went wrong."""
    return f"{written}{'' if written.endswith(chr(10)) else chr(10)}{told}" if written else told


def joined(written: str, rest: str) -> str:
    """An output of which some was written before. Raises `ToolFailed` for more than a frame holds."""
    return checked(written + rest) if written and rest else written or rest


def output_text(result: Any) -> str:
    """Text as it is, bytes as the text they are, anything else as JSON, spaced as models have mostly read it.

    What is no character becomes U+FFFD. Raises `ToolFailed` for more than a frame holds.
    """
    if isinstance(result, bytes | bytearray):
        with suppress(UnicodeDecodeError):
            result = bytes(result).decode()
    if not isinstance(result, str):
        result = json.dumps(msgspec.to_builtins(result, enc_hook=_builtin), ensure_ascii=False)
    return checked(characters(str(result)))


def checked(text: str) -> str:
    """The text. Raises `ToolFailed` for more than a frame holds."""
    if (size := size_of(text)) > MAX_OUTPUT_BYTES:
        raise ToolFailed(f"The output has {size} bytes; at most {MAX_OUTPUT_BYTES} can be read")
    return text


def size_of(text: str) -> int:
    """Bytes that it has in a frame."""
    return len(msgspec.json.encode(text))


def characters(text: str) -> str:
    """The text without lone surrogates, as file names may hold them: no frame does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _builtin(value: Any) -> Any:
    """What JSON has no word for: models and arrays by their own account, the rest as text."""
    for dumps in ("model_dump", "tolist"):
        if callable(dump := getattr(value, dumps, None)) and not isinstance(value, type):
            return dump()
    return str(value)
