"""The prompts of `offline.LLM`: texts, token ids and conversations in; checked token ids out.

All prompts of a call are made before any of them runs, so a wrong one is refused before it costs anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NotRequired, TypeAlias, TypedDict

import msgspec
import numpy as np

from ...sdk.errors import FrameError
from ...sessions.conversation.items import Tool, checked_item, checked_preamble
from ...sessions.conversation.tree import Script
from ...sessions.errors import InputInvalid, ItemInvalid, PromptTooLong, SessionError
from ...sessions.text.language import Language
from ...sessions.text.renderer import Renderer
from ...sessions.token_ids import Ids, frozen
from ..chat import frames
from ..chat.translate import transcript_of
from ..live.sessions import Transcript


class TextPrompt(TypedDict):
    """A text as a prompt. The tokenizer adds what it adds to every text (a token for the beginning, for some
    models), and reads the names of control tokens in it as those tokens."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, ``[tokens]``, as a prompt; nothing is added. ``prompt``: their text, if the output is to have
    it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
"""One prompt: a text, token ids, or a dict with either."""
ChatMessage: TypeAlias = Mapping[str, Any]
"""A message as Chat Completions has it: ``role``, ``content``, and ``tool_calls`` or ``tool_call_id``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt, which fits the model's context. ``text``: None where only ids were given. ``ids``:
    ``[tokens]``."""

    text: str | None
    ids: Ids


class PromptEncoder:
    """Checks and tokenizes the prompts of one call. ``max_context``: in tokens; every token id must be below
    ``vocab_size``."""

    def __init__(self, language: Language, max_context: int, vocab_size: int) -> None:
        self._language = language
        self._max_context = max_context
        self._vocab_size = vocab_size

    def raw(self, prompts: PromptType | Sequence[PromptType]) -> list[Prompt]:
        """Make prompts without a chat template; a single one becomes a list of one.

        Raises ``InputInvalid`` for what is no prompt, ``PromptTooLong`` if the context has no room for a token
        behind it; both say which prompt it is.
        """
        given = [_parts(prompt, name) for name, prompt in _named(prompts)]
        texts = [text for text, ids, _ in given if ids is None]
        backend = self._language.tokenizer.backend
        encoded = iter(backend.encode_batch(texts, add_special_tokens=True) if texts else ())
        made = []
        for text, ids, name in given:
            with _at(name):
                made.append(self._fitting(text, self._ids(next(encoded).ids if ids is None else ids)))
        return made

    def conversations(
        self, conversations: Sequence[Sequence[ChatMessage]], tools: Sequence[Tool]
    ) -> list[Prompt]:
        """Make a prompt of each conversation: what the chat template writes, up to the beginning of the next
        reply. ``tools``: those that all of them offer.

        A system message at the beginning is treated as the instructions of a session. Raises ``ItemInvalid`` or
        ``ToolInvalid`` for a wrong message or tool, ``TemplateFailed`` if the template refuses the
        conversation, ``PromptTooLong`` if the context has no room for a token behind it; all say which
        conversation it is.
        """
        language, made = self._language, []
        now = datetime.now().astimezone()
        renderer = Renderer(language.tokenizer, now, language.prefix_rule, language.report.rules)
        for number, messages in enumerate(conversations):
            with _at("messages" if len(conversations) == 1 else f"messages[{number}]"):
                said = conversation_of(messages, tools)
                ids = renderer.draft(Script(said.preamble, said.items), self._max_context).tokens()
                text: str = language.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
                made.append(self._fitting(text, ids))
        return made

    def _ids(self, ids: Sequence[int]) -> Ids:
        try:
            found = np.asarray(ids)
        except ValueError:
            found = np.empty(0)
        if found.size and (found.ndim != 1 or found.dtype.kind not in "iu"):
            raise InputInvalid("a prompt's token ids are a list of integers")
        if found.size and not 0 <= found.min() <= found.max() < self._vocab_size:
            wrong = next(int(token) for token in found if not 0 <= token < self._vocab_size)
            raise InputInvalid(f"{wrong} is not a token id from 0 to {self._vocab_size - 1}")
        return frozen(found.astype(np.int32))

    def _fitting(self, text: str | None, ids: Ids) -> Prompt:
        if not len(ids):
            raise InputInvalid("a prompt has at least one token")
        if len(ids) >= self._max_context:
            raise PromptTooLong.of(f"it has {len(ids)} tokens", self._max_context, len(ids))
        return Prompt(text, ids)


def conversation_of(messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> Transcript:
    """Make a checked `Transcript` of messages in the form of Chat Completions, and of ``tools``. Raises
    ``ItemInvalid`` or ``ToolInvalid``."""
    if isinstance(messages, str | Mapping) or not messages:
        raise ItemInvalid("a conversation is a list of at least one message")
    try:
        read = msgspec.convert([dict(message) for message in messages], list[frames.ChatMessage])
        made = transcript_of(read, tuple(tools))
    except (msgspec.ValidationError, TypeError, ValueError, FrameError) as fault:
        raise ItemInvalid(str(fault)) from None
    checked_preamble(made.preamble)
    for item in made.items:
        checked_item(item)
    return made


_Parts: TypeAlias = tuple[str | None, Sequence[int] | None, str]
"""One prompt before it is checked: its text and its token ids, of which at least one is not None, and where it
stands in the call (``prompts[2]``), for errors."""


def _named(prompts: PromptType | Sequence[PromptType]) -> Iterable[tuple[str, PromptType]]:
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [("prompts", prompts)]  # type: ignore[list-item]  # one prompt
    if not isinstance(prompts, Sequence):
        raise InputInvalid("prompts are a text, token ids, a dict, or a list of these", param="prompts")
    return [(f"prompts[{number}]", prompt) for number, prompt in enumerate(prompts)]  # type: ignore[misc]


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)


def _parts(prompt: PromptType, name: str) -> _Parts:
    text: Any = None
    ids: Any = None
    if isinstance(prompt, Mapping):
        if set(prompt) <= {"prompt", "prompt_token_ids"}:
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Sequence):
        ids = prompt
    if (text is None and ids is None) or not isinstance(text, str | None):
        raise InputInvalid(
            f"{name}: a prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`",
            param=name,
        )
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise InputInvalid(f"{name}: the text holds a lone surrogate, which is no character") from None
    return text, ids, name


@contextmanager
def _at(name: str) -> Iterator[None]:
    """In the block, put ``name``, the name of an argument such as ``prompts[2]``, before the text of a
    `SessionError`, and name it as the field at fault."""
    try:
        yield
    except SessionError as fault:
        fault.message = f"{name}: {fault.message}"
        fault.args = (fault.message,)
        fault.param = name
        raise
