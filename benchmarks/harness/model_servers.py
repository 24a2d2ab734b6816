"""A real model behind a real server, as a worker: ours, or llama.cpp's ``llama-server``.

Run it with ``python -m``: CONTEXT SLOTS, and for llama-server the path of its program. Both get the same
requests of OpenAI's API, with token ids (Completions) or whole conversations (Chat Completions); ours has its
conversation in a session. Prompts are token ids of the model's tokenizer, without control tokens. A reply has
exactly as many tokens as are asked for, whatever ends the model says.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from holdfast.runtime.model.config import read_config
from holdfast.sdk.sync import SyncChat, connect
from holdfast.sessions.text.tokenizer import ChatTokenizer

from ..peers.worker import answer_all
from .completions import streamed
from .servers import memory_bytes, server
from .workers import environment

Json = dict[str, Any]
COMPLETIONS = "/v1/completions"
START_SECONDS = 120.0
SECONDS = 600.0
"""How long any answer may take: a busy machine is slow."""
KV_ITEM_BYTES = 2
"""Both keep KV in 16 bits."""


@dataclass(frozen=True, slots=True)
class ServerRoom:
    """For how much a server has room: ``slots`` sequences at once of ``context`` tokens each."""

    context: int
    slots: int

    @property
    def tokens(self) -> int:
        return self.context * self.slots


class ServedModel(ABC):
    """`peers.worker.PeerEngine` for a server with OpenAI's API. ``stack``: what is to be closed at the end."""

    def __init__(self, room: ServerRoom, stack: ExitStack) -> None:
        self.room = room
        self.stack = stack
        self.tokenizer: ChatTokenizer
        self._address = ""

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Start the server on a model folder or file. Returns its versions and how it computes."""
        self.tokenizer = ChatTokenizer.load(folder)
        self._address, told = self.start(folder, dtype, threads)
        return told

    @abstractmethod
    def start(self, folder: Path, dtype: str, threads: int) -> tuple[str, Json]:
        """Start the server; it ends with ``stack``. Returns its ``host:port``, and what `load` tells."""

    @abstractmethod
    def begin(self) -> None:
        """Begin another conversation."""

    @abstractmethod
    def say(self, text: str, out: int) -> tuple[float, str]:
        """Take a turn of the conversation. Returns the seconds to the first text, and the reply."""

    @abstractmethod
    def peak(self) -> int:
        """The most memory that the process which computes had so far, in bytes, mapped files too."""

    def turn(self, tokens: list[int], out: int) -> tuple[float, list[int]]:
        """Say the text of ``tokens``. Returns the seconds to the first text, and the reply's tokens, as the
        tokenizer cuts it."""
        first, said = self.say(self.tokenizer.backend.decode(tokens), out)
        return first, self.tokenizer.encode(said, leads=False)

    def decode(self, prompts: list[list[int]], out: int) -> int:
        """Complete all prompts at once, without streams. Returns how many tokens were generated."""

        def complete(prompt: list[int]) -> int:
            with self.client() as client:
                body = json.dumps(self._body(prompt, out))
                client.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
                answer = client.getresponse()
                whole = json.loads(answer.read())
                if answer.status != 200:
                    raise RuntimeError(str(whole))
                return int(whole["usage"]["completion_tokens"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(complete, prompts))

    def prefill(self, request: Json) -> Json:
        """The seconds from a prompt of token ids to the first text behind it."""
        with self.client() as client:
            return {"seconds": streamed(client, self._body(request["tokens"], 1), COMPLETIONS).first}

    def memory(self, request: Json) -> Json:
        return {"peak": self.peak()}

    def client(self) -> _Client:
        return _Client(self._address, timeout=SECONDS)

    def _body(self, prompt: list[int], out: int) -> Json:
        return {"prompt": prompt, "max_tokens": out, "temperature": 0, "ignore_eos": True}


class _Client(http.client.HTTPConnection):
    """A connection that is closed at the end of its ``with`` block."""

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OurServer(ServedModel):
    """``holdfast serve`` with its defaults, but with KV for its room only, and neither host tier nor store. Its
    conversation is a session."""

    def start(self, folder: Path, dtype: str, threads: int) -> tuple[str, Json]:
        config = read_config(folder)
        width = config.layers * 2 * config.kv_heads * config.head_dim * KV_ITEM_BYTES
        kv = ("--kv-bytes", str(self.room.tokens * width), "--host-bytes", "0", "--no-store")
        words = ("--device", "cpu", "--dtype", dtype, *kv)
        self._server = self.stack.enter_context(server(str(folder), threads, *words))
        self._sdk = self.stack.enter_context(connect(self._server.url))
        self._session = self.stack.enter_context(ExitStack())
        self._chat: tuple[SyncChat, int] | None = None
        versions = {name: version(name) for name in ("holdfast-llm", "torch")}
        told = {"versions": versions, "precision": {"weights": "as stored", "computing": dtype, "kv": dtype}}
        return urlsplit(self._server.url).netloc, told

    def begin(self) -> None:
        self._session.close()
        self._chat = None

    def say(self, text: str, out: int) -> tuple[float, str]:
        if self._chat is None:
            session = self._sdk.session(temperature=0, max_output_tokens=out, min_output_tokens=out)
            self._chat = self._session.enter_context(session), out
        chat, known = self._chat
        assert known == out, "all turns of a conversation have replies of one length"
        began, first, pieces = time.perf_counter(), 0.0, list[str]()
        for piece in chat.say(text):
            first = first or time.perf_counter() - began
            pieces.append(piece)
        return first, "".join(pieces)

    def peak(self) -> int:
        return memory_bytes(self._server.engine)["peak"]


class LlamaServer(ServedModel):
    """llama.cpp's server with its defaults, which keep the prompts of its slots, but for threads and room."""

    def __init__(self, room: ServerRoom, stack: ExitStack, program: str) -> None:
        super().__init__(room, stack)
        self._program = program
        self._messages: list[Json] = []

    def start(self, folder: Path, dtype: str, threads: int) -> tuple[str, Json]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        said = self.stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        words = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--threads", str(threads), "--ctx-size", str(self.room.tokens)]
        words += ["--parallel", str(self.room.slots), "--no-kv-unified"]
        self._process = subprocess.Popen(
            [self._program, *words], stdout=said, stderr=said, env=environment(threads, ours=False)
        )
        self.stack.callback(self._process.wait)
        self.stack.callback(self._process.terminate)
        address = f"127.0.0.1:{port}"
        self._await(address, said)
        with _Client(address, timeout=SECONDS) as client:
            client.request("GET", "/props")
            props = json.loads(client.getresponse().read())
        versions = {"llama.cpp": props.get("build_info", "unknown")}
        precision = {"weights": "as stored", "kv": "float16"}
        return address, {
            "versions": versions,
            "precision": precision,
            "options": words[6:],
        }

    def begin(self) -> None:
        self._messages = []

    def say(self, text: str, out: int) -> tuple[float, str]:
        self._messages.append({"role": "user", "content": text})
        body = {"messages": self._messages, "temperature": 0, "max_tokens": out, "ignore_eos": True}
        with self.client() as client:
            said = streamed(client, body)
        self._messages.append({"role": "assistant", "content": said.text})
        return said.first, said.text

    def peak(self) -> int:
        return memory_bytes(self._process.pid)["peak"]

    def _await(self, address: str, said: IO[str]) -> None:
        """Wait until the server has loaded its model. Raises ``RuntimeError`` with its last line if it does
        not."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with _Client(address, timeout=SECONDS) as client:
                try:
                    client.request("GET", "/health")
                    if client.getresponse().status == 200:
                        return
                except OSError:
                    pass
            time.sleep(0.1)
        said.seek(0)
        raise RuntimeError(f"llama-server did not start: {said.read().strip().splitlines()[-1:]}")


def main() -> None:
    context, slots, *program = sys.argv[1:]
    room = ServerRoom(int(context), int(slots))
    with ExitStack() as stack:
        served = LlamaServer(room, stack, *program) if program else OurServer(room, stack)
        answer_all(served, {"prefill": served.prefill, "memory": served.memory})


if __name__ == "__main__":
    main()
