"""One streamed request of Chat Completions or Completions, as a client sends it that does nothing else."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
PATH = "/v1/chat/completions"
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A reply's text, the seconds to its ``first`` piece, and the turn's KV ``receipt``."""

    text: str
    first: float
    receipt: dict[str, int]


def streamed(client: http.client.HTTPConnection, body: Json, path: str = PATH) -> StreamedReply:
    """Send the request with this ``body`` to ``path``, and read the reply as it comes. Raises ``RuntimeError``
    if it is refused or fails."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = client.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    first, pieces, receipt = 0.0, list[str](), dict[str, int]()
    while (line := answer.readline().strip()) != b"data: [DONE]":
        if not line:
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                first = first or time.perf_counter() - began
                pieces.append(text)
        receipt = chunk.get("kv", receipt)
    answer.read()
    return StreamedReply("".join(pieces), first or time.perf_counter() - began, receipt)
