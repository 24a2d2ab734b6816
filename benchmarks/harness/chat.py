"""Our server through Chat Completions, as a worker: HTTP, gateway process, engine process; run it with ``python
-m``.

The client sends the whole conversation with each turn. Besides the requests that every worker answers
(`peers.worker`), it answers `restart` (the server ends and another begins with its store) and `crowd` (other
conversations, one turn each). The KV receipt of each turn is checked: the turn must prefill its new tokens and
no other.
"""

from __future__ import annotations

import http.client
import random
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from ..peers.worker import answer_all
from ..toys import ASSISTANT, USER, ids_of, text_of
from .completions import SECONDS, streamed
from .ours import KV_BYTES
from .rounds import prompt
from .servers import Server, server

Json = dict[str, Any]


class ThroughChat:
    """`peers.worker.PeerEngine` for Chat Completions of a real server."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._folder = TemporaryDirectory()
        self._words: tuple[str, ...] = ()
        self._model: tuple[str, int] = ("", 0)
        self._server: Server
        self._client: http.client.HTTPConnection
        self._messages: list[Json] = []

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Start a server on the model in ``folder`` with its defaults, except for the memory for KV and a store
        of its own."""
        kept = ("--kv-bytes", str(KV_BYTES), "--store", self._folder.name)
        self._words = ("--device", "cpu", "--dtype", dtype, *kept)
        self._model = str(folder), threads
        self._start()
        versions = {name: version(name) for name in ("holdfast-llm", "torch", "uvicorn")}
        return {"versions": versions, "precision": {"weights": dtype, "kv": dtype}}

    def begin(self) -> None:
        """Begin another conversation."""
        self._messages = []

    def turn(self, tokens: list[int], out: int) -> tuple[float, list[int]]:
        """Send all messages of the conversation and one more, with the text of ``tokens`` without the two marks
        around it, which the chat template writes. Returns the seconds to the first text, and the reply's
        tokens."""
        first, said = self._say(self._messages, tokens, out)
        return first, said

    def decode(self, prompts: list[list[int]], out: int) -> int:
        """Hold a conversation of one turn for each prompt, one after another. Returns the number of generated
        tokens."""
        return sum(len(self._say([], tokens, out)[1]) for tokens in prompts)

    def restart(self, request: Json) -> Json:
        """End the server and start another one with the same store."""
        self._running.close()
        self._start()
        return {}

    def crowd(self, request: Json) -> Json:
        """Run ``count`` other conversations of one turn each, with prompts of ``new`` tokens."""
        rng = random.Random(request["seed"])
        for _ in range(request["count"]):
            self._say([], prompt(rng, request["new"], request["vocabulary"]), request["out"])
        return {}

    def close(self) -> None:
        self._running.close()
        self._folder.cleanup()

    def _start(self) -> None:
        self._server = self._running.enter_context(server(*self._model, *self._words))
        address = urlsplit(self._server.url)
        self._client = http.client.HTTPConnection(address.netloc, timeout=SECONDS)
        self._running.callback(self._client.close)

    def _say(self, messages: list[Json], tokens: list[int], out: int) -> tuple[float, list[int]]:
        """Take one turn of the conversation ``messages``, which gets the user's message and the reply. Returns
        the seconds to the first text, and the reply's tokens. Raises ``RuntimeError`` if the turn fails or has
        prefilled other than its new tokens."""
        assert tokens[0] == USER and tokens[-1] == ASSISTANT, "a turn as the toys' template writes it"
        wanted = len(tokens) + bool(messages)  # and the pending token
        messages.append({"role": "user", "content": text_of(tokens[1:-1])})
        body = {"messages": messages, "temperature": 0, "max_tokens": out}
        said = streamed(self._client, body)
        messages.append({"role": "assistant", "content": said.text})
        receipt = said.receipt
        if (receipt["new"], receipt["prefilled"], receipt["recomputed"]) != (wanted, wanted, 0):
            raise RuntimeError(f"the turn has {wanted} new tokens; its receipt is {receipt}")
        return said.first, ids_of(said.text)


if __name__ == "__main__":
    through = ThroughChat()
    try:
        answer_all(through, {"restart": through.restart, "crowd": through.crowd})
    finally:
        through.close()
