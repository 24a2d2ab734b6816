"""The errors of sessions: one tree, each with a stable code and the request field that caused it.

SessionError
├── RequestInvalid            the request is wrong; the client can correct it
│   ├── ItemUnknown           no item of the conversation has this id
│   ├── ItemExists            an item with this id is already there
│   ├── ItemInvalid           an item's fields are out of bounds
│   ├── CallUnknown           no call of the conversation has the id that a tool's output names
│   ├── CallAnswered          the call has an output already
│   ├── InputInvalid          streamed input is out of bounds, or there is none
│   ├── CutInvalid            there is no such place to cut a reply, to rewind to or to fork at
│   ├── MemberUnknown         the session's tree has no such session
│   ├── NameInvalid           a session's name is too long, or another of its tree has it
│   ├── PruneInvalid          a session cannot prune itself
│   ├── ToolInvalid           a tool's definition is out of bounds
│   ├── SamplingInvalid       sampling values or limits out of bounds
│   ├── GrammarInvalid        a schema or grammar is out of bounds, or excludes other parts of the request
│   └── PromptTooLong         the prompt leaves no room for a token in the model's context
├── ConversationBusy          a response already writes this conversation
├── TemplateFailed            the model's chat template refused the conversation
├── TokenizerUnreadable       the model folder's tokenizer or chat template cannot be used
├── SessionUnknown            no session with this id is open on this server
├── SessionLimit              the limit of open sessions is reached
├── TurnLimit                 the tenant's limit of running replies is reached
├── SessionClosed             the session was closed
├── HandleUnknown             no session can be resumed with this handle: unknown, foreign, expired, used up
├── EventsExpired             the events after the client's last one are no longer kept
├── StorageUnavailable        the journal cannot write now: no turn begins, nothing is acknowledged
│   └── ShareFull             the tenant's open sessions fill its share of the journal
├── RecordDamaged             a record of the journal fails its checksum, or is missing
├── StoreUnusable             the journal's store cannot be opened
│   ├── StoreHeld             another server has it
│   ├── StoreForeign          it was written for another model
│   └── StoreNewer            it was written by a later version
└── TurnFailed                a turn began and failed; it was rolled back
    ├── EngineUnavailable     the engine died or does not answer
    ├── EngineFull            the engine holds as many sequences as it may
    ├── GrammarRefused        its grammar cannot be compiled, or not in time
    ├── GrammarStuck          its grammar, with the rest of the request, leaves no next token
    ├── GrammarUnavailable    the engine was installed without the packages that grammars need
    └── SequencePoisoned      engines died in steps of this conversation

Knows nothing of wire errors or close codes: the gateway has that table.
"""

from __future__ import annotations

from typing import ClassVar


class SessionError(Exception):
    """Any failure of a session. ``param`` names the field of the request that caused it, if there is one."""

    code: ClassVar[str] = "session_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestInvalid(SessionError):
    """The request is wrong; nothing changed."""

    code = "request_invalid"


class ItemUnknown(RequestInvalid):
    """No item of the conversation has this id."""

    code = "item_unknown"


class ItemExists(RequestInvalid):
    """An item with this id is already in the conversation."""

    code = "item_exists"


class ItemInvalid(RequestInvalid):
    """An item's fields are out of bounds."""

    code = "item_invalid"


class CallUnknown(RequestInvalid):
    """No call of the conversation has the id that a tool's output names."""

    code = "call_unknown"


class CallAnswered(RequestInvalid):
    """The call has an output already."""

    code = "call_answered"


class InputInvalid(RequestInvalid):
    """Streamed input is out of bounds, or there is none to commit."""

    code = "input_invalid"


class CutInvalid(RequestInvalid):
    """There is no such place to cut a reply, to rewind to or to fork at."""

    code = "cut_invalid"


class MemberUnknown(RequestInvalid):
    """The session's tree has no such session."""

    code = "member_unknown"


class NameInvalid(RequestInvalid):
    """A session's name is too long, or another of its tree has it."""

    code = "name_invalid"


class PruneInvalid(RequestInvalid):
    """A session cannot prune itself."""

    code = "prune_invalid"


class ToolInvalid(RequestInvalid):
    """A tool's definition is out of bounds."""

    code = "tool_invalid"


class SamplingInvalid(RequestInvalid):
    """Sampling values, limits or stop strings are out of bounds."""

    code = "sampling_invalid"


class GrammarInvalid(RequestInvalid):
    """A schema or a grammar is out of bounds, or excludes other parts of the request."""

    code = "grammar_invalid"


class PromptTooLong(RequestInvalid):
    """The prompt has at least ``tokens`` tokens and leaves no room for another in the model's context."""

    code = "prompt_too_long"

    def __init__(self, message: str, tokens: int = 0, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens


class ConversationBusy(SessionError):
    """A response already writes this conversation; cancel it or wait for its end."""

    code = "conversation_busy"


class TemplateFailed(SessionError):
    """The model's chat template refused the conversation, or left out a turn."""

    code = "template_failed"


class TokenizerUnreadable(SessionError):
    """The model folder's tokenizer or chat template cannot be used; the message names the file."""

    code = "tokenizer_unreadable"


class SessionUnknown(SessionError):
    """No session with this id is open on this server."""

    code = "session_unknown"


class SessionLimit(SessionError):
    """The limit of open sessions is reached; try again later."""

    code = "session_limit"


class TurnLimit(SessionError):
    """The tenant's limit of running replies is reached; nothing began."""

    code = "turn_limit"


class SessionClosed(SessionError):
    """The session was closed."""

    code = "session_closed"


class HandleUnknown(SessionError):
    """No session can be resumed with this handle: the same error for every reason."""

    code = "handle_unknown"


class EventsExpired(SessionError):
    """The events after the client's last one are no longer kept."""

    code = "events_expired"


class StorageUnavailable(SessionError):
    """The journal cannot write now: until it can, no turn begins and nothing is acknowledged."""

    code = "storage_unavailable"


class ShareFull(StorageUnavailable):
    """The tenant's open sessions fill its share of the journal: no turn of theirs begins."""

    code = "share_full"


class RecordDamaged(SessionError):
    """A record of the journal fails its checksum, or is missing: its session cannot be opened again."""

    code = "record_damaged"


class StoreUnusable(SessionError):
    """The journal's store cannot be opened; the message names it."""

    code = "store_unusable"


class StoreHeld(StoreUnusable):
    """Another server has the store; the message names its process."""

    code = "store_held"


class StoreForeign(StoreUnusable):
    """The store was written for another model: its token ids would mean something else."""

    code = "store_foreign"


class StoreNewer(StoreUnusable):
    """The store was written by a later version of Holdfast."""

    code = "store_newer"


class TurnFailed(SessionError):
    """A turn began and failed; it was rolled back, its input stays."""

    code = "turn_failed"


class EngineUnavailable(TurnFailed):
    """No engine came back in time; the next turn opens the session again from its tokens."""

    code = "engine_unavailable"


class EngineFull(TurnFailed):
    """The engine holds as many sequences as it may; try again later."""

    code = "engine_full"


class GrammarRefused(TurnFailed):
    """The reply's grammar cannot be compiled within the limits of size and time."""

    code = "grammar_refused"


class GrammarStuck(TurnFailed):
    """The reply's grammar, with bad words, biases and limits, leaves no next token."""

    code = "grammar_stuck"


class GrammarUnavailable(TurnFailed):
    """The engine was installed without the packages that grammars need; the message names the extra."""

    code = "grammar_unavailable"


class SequencePoisoned(TurnFailed):
    """Engines died in steps of this conversation, so it is not computed any more."""

    code = "sequence_poisoned"
