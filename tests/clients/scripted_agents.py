"""A real server on a loopback port with a scripted engine: it reads what terminal agents send, calls one of
their tools, reads the output, and says how it went.

Their prompts are longer than what the pocket model's context holds, and what it would answer to them is luck.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast.gateway.server import bound_socket, reachable
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted
from holdfast.tests.sessions.text.chat_languages import ids, ours

CONTEXT = 1 << 18
ANSWER = "All done: it says hello from the tool."
LANGUAGE = Language.of(ours("chatml"))


@dataclass
class Script:
    """A model that calls the tool ``name`` once in each conversation that offers it, and then says `ANSWER`.
    ``plain``: what it says to a prompt without that tool. ``prompts``: the texts that it has read."""

    name: str
    arguments: dict[str, Any]
    plain: str = ANSWER
    prompts: list[str] = field(default_factory=list)
    _begun: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __call__(self, tokens: list[int]) -> int:
        """The token after these."""
        for prompt, reply in self._begun:
            said = tokens[len(prompt) :]
            if len(said) < len(reply) and tokens[: len(prompt)] == prompt and said == reply[: len(said)]:
                return reply[len(said)]
        text = ours("chatml").backend.decode(tokens, skip_special_tokens=False)
        self.prompts.append(text)
        reply = [*ids("chatml", self._reply(text)), END]
        self._begun.append((list(tokens), reply))
        return reply[0]

    def _reply(self, prompt: str) -> str:
        if f'"name": "{self.name}"' not in prompt:
            return self.plain
        if prompt.rindex("<|im_start|>user") < prompt.rfind("<tool_response>"):
            return ANSWER
        called = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{called}\n</tool_call>"


@asynccontextmanager
async def scripted_server(script: Script) -> AsyncIterator[str]:
    """Run the server during the block. Yields its URL."""
    settings = GatewaySettings(port=0)
    link = Scripted(script, END, max_context=CONTEXT, tokens_per_row=8)
    service = Service(settings, "pocket", link)
    service.open(SessionRegistry(link, LANGUAGE))
    with bound_socket(settings) as sock:
        async with reachable(service, sock, None) as url:
            try:
                yield url
            finally:
                await service.close()
