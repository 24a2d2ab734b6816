"""Default sampling parameters for GGUF files: those in the file, or else those that the authors of its family
publish. Without any, a small model repeats itself soon."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .gguf_file import GGUFFile

PUBLISHED: Mapping[str, tuple[Mapping[str, float], str]] = {
    "smollm3": ({"temperature": 0.6, "top_p": 0.95}, "HuggingFaceTB/SmolLM3-3B"),
    "smollm2": ({"temperature": 0.2, "top_p": 0.9}, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "qwen3.*instruct-2507": ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, "Qwen/Qwen3-4B-Instruct-2507"),
    "qwen3": ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, "Qwen/Qwen3-8B"),
    "qwen2.5": (
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        "Qwen/Qwen2.5-7B-Instruct",
    ),
    "llama-3": ({"temperature": 0.6, "top_p": 0.9}, "meta-llama/Llama-3.1-8B-Instruct"),
    "gemma-3": ({"temperature": 1.0, "top_p": 0.95, "top_k": 64}, "google/gemma-3-4b-it"),
}
"""What the authors of models publish: by a pattern of the model's name, in small letters with hyphens between
words, fields of a ``generation_config.json`` and the model on the hub that has them, there or in its card. The
first that matches counts."""

_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys below ``general.sampling`` and the fields that they are."""


def sampling_of(file: GGUFFile) -> tuple[dict[str, Any], str]:
    """The fields of a ``generation_config.json`` with which the model samples, and where they are from; none
    and "" if that is nowhere said. Numbers are rounded, as a file has them in 32 bits."""
    stored = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _KEYS.items()}
    own = {name: round(value, 6) if type(value) is float else value for name, value in stored.items()}
    own = {name: value for name, value in own.items() if value is not None}
    if own:
        return {"do_sample": own.get("temperature") != 0, **own}, "the file's own"
    named = (str(file.metadata.get(f"general.{key}", "")) for key in ("basename", "name"))
    name = re.sub(r"[\s_]+", "-", " ".join(named).lower())
    for pattern, (fields, model) in PUBLISHED.items():
        if re.search(pattern, name):
            return {"do_sample": True, **fields}, f"those of https://huggingface.co/{model}"
    return {}, ""
