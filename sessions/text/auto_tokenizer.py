"""A model folder's tokenizer as transformers' ``AutoTokenizer`` reads it.

Which files count, what a tokenizer's class adds to them, and what it computes in another way than they say,
transformers alone knows. It takes a second to import. So it reads them in a process of its own, which answers
with the tokenizer that it has made, unless it is imported here already.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

READ = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
"""The files in a model's folder that a tokenizer may be read from."""
WAIT_SECONDS = 300.0
"""Seconds by the clock that the caller waits at most for the process that reads a tokenizer."""
CAUSE = 300
"""The most characters of transformers' own text in an error."""


class ReadRefused(Exception):
    """transformers cannot read the tokenizer, or reads one that cannot be computed here; the text says why, in
    one line."""


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Read the tokenizer of the model in ``folder``, as `AutoTokenizer` does.

    Returns ``tokenizer``, in the form of ``tokenizer.json``; ``named``: the special tokens by name;
    ``chat_template``: a text, texts by name, or None; ``response_template``. The code of a tokenizer that
    brings its own is not run. Raises `ReadRefused`. Blocks until the process ends, up to `WAIT_SECONDS`.
    """
    digest = hashlib.blake2b()
    for path in sorted(path for pattern in READ for path in folder.glob(pattern) if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return _read(folder, digest.digest())


@functools.lru_cache(maxsize=8)
def _read(folder: Path, digest: bytes) -> dict[str, Any]:
    """Read ``folder``. ``digest``: of its files, so that changed ones are read again."""
    answer = _made(str(folder)) if "transformers" in sys.modules else _asked(str(folder))
    if "fault" in answer:
        raise ReadRefused(answer["fault"])
    return answer


def _asked(folder: str) -> dict[str, Any]:
    """The answer of another process, which runs this file."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", __file__, folder],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"fault": f"it was not read within {WAIT_SECONDS:g} s"}
    if child.returncode != 0:
        (*_, cause) = ("", *child.stderr.splitlines())
        return {"fault": f"the process that reads it ended with {child.returncode}: {cause[:CAUSE]}"}
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer


def _made(folder: str) -> dict[str, Any]:
    """What `read_tokenizer` returns; or ``fault``: why the tokenizer in ``folder`` cannot be read, or not be
    computed here."""
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, mistral_format=False)
    except Exception as fault:  # it raises whatever its parts do
        cause = " ".join(str(fault).split())
        if "trust_remote_code" in cause:
            return {
                "fault": "it is code of its own, which is not run: save it by transformers as tokenizer.json"
            }
        return {"fault": cause[:CAUSE] or type(fault).__name__}
    backend, clean_up = getattr(found, "backend_tokenizer", None), "clean_up_tokenization_spaces"
    if backend is None:
        return {"fault": f"{type(found).__name__} is not a tokenizer of the tokenizers library"}
    if found.split_special_tokens:
        return {"fault": "with split_special_tokens no control token is one: set it to false"}
    forced = getattr(found, f"{clean_up}_for_bpe_even_though_it_will_corrupt_output", False)
    if getattr(found, clean_up) and (forced or type(backend.model).__name__ != "BPE"):
        return {"fault": f"{clean_up} changes decoded text: set it to false"}
    templates = {name: getattr(found, name, None) for name in ("chat_template", "response_template")}
    return {"tokenizer": backend.to_str(), "named": found.special_tokens_map, **templates}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds to import, and is not needed
    print(json.dumps(_made(sys.argv[1])))
