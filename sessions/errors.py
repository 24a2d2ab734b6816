"""The errors of sessions: one tree, each with a stable code and the request field that caused it.

SessionError
├── RequestInvalid: ItemUnknown, ItemExists, ItemInvalid, CallUnknown, CallAnswered, InputInvalid, CutInvalid,
│                   MemberUnknown, NameInvalid, PruneInvalid, ToolInvalid, SamplingInvalid, GrammarInvalid,
│                   PromptTooLong
├── ConversationBusy, TemplateFailed, TokenizerUnreadable, EventsExpired, HandleUnknown
├── SessionUnknown, SessionLimit, SessionClosed, TurnLimit
├── StorageUnavailable: StorageFull (ShareFull), StoreLost
├── StoreUnusable: StoreHeld, StoreForeign, StoreNewer
├── RecordDamaged
└── TurnFailed: EngineUnavailable, EngineFull, AdapterUnavailable, GrammarRefused, GrammarStuck,
                GrammarUnavailable, SequencePoisoned

Knows nothing of wire errors or close codes: the gateway has that table.
"""

from __future__ import annotations

import re
from typing import ClassVar


class SessionError(Exception):
    """Any failure of a session. ``param``: the field of the request that caused it; None if there is none.

    ``code``: the class's name in snake case, such as ``item_unknown``. Journals store it, so that no class may
    be renamed. ``by_code``: the class of each code.
    """

    code: ClassVar[str] = "session_error"
    by_code: ClassVar[dict[str, type[SessionError]]] = {}

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        cls.by_code[cls.code] = cls

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestInvalid(SessionError, ValueError):
    """The request is wrong; nothing changed."""


class ItemUnknown(RequestInvalid):
    """No item of the conversation has this id."""


class ItemExists(RequestInvalid):
    """An item with this id is already in the conversation."""


class ItemInvalid(RequestInvalid):
    """A field of an item has a value that is not allowed, or the conversation holds as many items as it may."""


class CallUnknown(RequestInvalid):
    """No call of the conversation has the id that a tool's output names."""


class CallAnswered(RequestInvalid):
    """The call has an output already."""


class InputInvalid(RequestInvalid):
    """Input that a client streams in, or a prompt, is out of bounds; or there is no streamed text to commit."""


class CutInvalid(RequestInvalid):
    """There is no such point to cut a reply, to rewind to or to fork at."""


class MemberUnknown(RequestInvalid):
    """The fork tree of this session, all sessions forked from one another, has no session with this id."""


class NameInvalid(RequestInvalid):
    """The name that a session is to have in its fork tree is too long, or another session of the tree has
    it."""


class PruneInvalid(RequestInvalid):
    """A session was asked to prune, which is to delete, itself; it may prune only others of its fork tree."""


class ToolInvalid(RequestInvalid):
    """A tool's definition is out of bounds."""


class SamplingInvalid(RequestInvalid):
    """Sampling values, limits or stop strings are out of bounds."""


class GrammarInvalid(RequestInvalid):
    """A schema or a grammar is out of bounds, or cannot stand beside another part of the request."""


class PromptTooLong(RequestInvalid):
    """The prompt leaves no room for another token in the model's context.

    ``tokens``: how many tokens the prompt has at least. ``context``: how many the model's context holds. Both
    are 0 if they are not known.
    """

    tokens = context = 0

    def __init__(self, message: str, tokens: int = 0, context: int = 0, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.context = context

    @classmethod
    def of(cls, told: str, context: int, tokens: int, *, param: str | None = None) -> PromptTooLong:
        """The error with the standard message, in which LiteLLM, LangChain and others search for words.

        ``told``: the part of the message that says what is too long, such as "it has 9000 tokens". ``context``
        and ``tokens``: the model's context and the prompt's length, in tokens. ``param``: the request's field.
        """
        text = f"The prompt is too long: {told}. This model's maximum context length is {context} tokens"
        return cls(text, tokens, context, param=param)


class ConversationBusy(SessionError):
    """A response already writes this conversation; cancel it or wait for its end."""


class TemplateFailed(SessionError):
    """The model's chat template refused the conversation, or left out a turn."""


class TokenizerUnreadable(SessionError):
    """The model folder's tokenizer or chat template cannot be used; the message names the file."""


class SessionUnknown(SessionError):
    """No session with this id is open on this server."""


class SessionLimit(SessionError):
    """The limit of open sessions is reached; try again later."""


class TurnLimit(SessionError):
    """The tenant's limit of running replies is reached; nothing began."""


class SessionClosed(SessionError):
    """The session was closed.

    Raised for a call on the session that comes after its end.
    """


class HandleUnknown(SessionError):
    """No session can be resumed with this handle. The error does not tell why, so that it does not tell which
    exist."""


class EventsExpired(SessionError):
    """A client resumes behind the last event that it received, but the server does not keep that event, or
    those after it, any more."""


class StorageUnavailable(SessionError):
    """The journal cannot write now: until it can, no turn begins and nothing is acknowledged."""


class StorageFull(StorageUnavailable):
    """The journal has no room for new turns; what makes room is served."""


class ShareFull(StorageFull):
    """The tenant's open sessions fill its share of the journal: no turn of theirs begins."""


class StoreLost(StorageUnavailable):
    """The store's folder, its lock or its logs are not where this server opened them, or another server has
    taken the store: nothing is written until they are back."""


class RecordDamaged(SessionError):
    """A record of the journal fails its checksum, or is missing: its session cannot be opened again."""


class StoreUnusable(SessionError):
    """The journal's store cannot be opened; the message names it."""


class StoreHeld(StoreUnusable):
    """Another server has the store; the message names its process."""


class StoreForeign(StoreUnusable):
    """The store was written for another model: its token ids would mean something else."""


class StoreNewer(StoreUnusable):
    """The store was written by a later version of Holdfast."""


class TurnFailed(SessionError):
    """A turn began and failed; it was rolled back, its input stays."""


class EngineUnavailable(TurnFailed):
    """No engine came back in time; the next turn opens the session again from its tokens."""


class EngineFull(TurnFailed):
    """The engine holds as many sequences as it may; try again later."""


class AdapterUnavailable(TurnFailed):
    """The session's adapter is not loaded, or is loaded with other weights; the message names it.

    A session is not reopened then, and no turn of an open one begins. It stays as it is, and goes on once the
    adapter is loaded again.
    """


class GrammarRefused(TurnFailed):
    """The reply's grammar cannot be compiled within the limits of size and time."""


class GrammarStuck(TurnFailed):
    """The reply's grammar, with bad words, biases and limits, leaves no next token."""


class GrammarUnavailable(TurnFailed):
    """The engine was installed without the packages that grammars need; the message names the extra."""


class SequencePoisoned(TurnFailed):
    """Engines died in steps of this conversation, so it is not computed any more."""
