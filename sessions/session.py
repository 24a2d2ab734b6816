"""The session: one conversation with its model, kept across turns, cancels and engine restarts.

It creates responses, and owns the engine's sequence of the main branch. Knows nothing of sockets or frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

from msgspec.structs import replace

from ..runtime.link.client import EngineLink
from .adapters import SessionAdapter, check_loaded
from .adapters import digest_of as adapter_digest
from .conversation.continuation import Digest, OpenConversations, digest_of, name_digest, space_of
from .conversation.edits import rewind, shorten
from .conversation.history import History
from .conversation.items import Growing, Message
from .conversation.tree import TurnNode
from .engine_copy import EngineCopy
from .errors import SessionClosed
from .handles import SessionHandles
from .journal.records import AnyOperation, Begun, Branched
from .journal.replay import Past, refused, request_form, retold
from .journal.session_log import SessionLog
from .placement import Placement, ReturnHints, Waits
from .settings import SessionSettings, TenantLimits
from .tenants import Tenant
from .text.eager_prefill import EagerPrefill, PrefilledInput
from .text.language import Language
from .text.renderer import Renderer
from .turn.branch import Branch
from .turn.events import ReplyEvent
from .turn.fitting import older_turns
from .turn.request import TurnRequest
from .turn.response import TurnResponse
from .turn.turn_grammar import TurnGrammar


@dataclass(frozen=True, slots=True)
class ForkSummary:
    """How a fork shortens its history: ``summary`` replaces all turns but the last ``turns`` ones."""

    summary: Message
    turns: int


class Session:
    """One conversation, its running responses and its sequence in the engine.

    ``salt`` separates the tenants' cached blocks. ``now``: the date that the chat template may show. ``log``:
    the session's log in the journal. ``handles``: the secrets that open it. ``history``: given if the session
    was forked or comes from the journal (``reopened``). ``sequence``: given for a fork: its copy in the engine.
    ``waits``: records the pauses between turns. ``tenant``: counts its running replies. ``conversations``: gets
    the digest of its conversation after each turn, so that a request that carries it finds the session.
    ``adapter``: the one that its tokens are computed with; None: none.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - the field's own word
        link: EngineLink,
        language: Language,
        *,
        history: History | None = None,
        salt: bytes = b"",
        now: datetime | None = None,
        settings: SessionSettings | None = None,
        log: SessionLog | None = None,
        handles: SessionHandles | None = None,
        sequence: EngineCopy | None = None,
        waits: Waits | None = None,
        tenant: Tenant | None = None,
        conversations: OpenConversations | None = None,
        adapter: SessionAdapter | None = None,
    ) -> None:
        settings = settings or SessionSettings()
        self.id = id
        self.log = log or SessionLog()
        if history is None:
            self.history = History(max_items=settings.max_items, record=self.log.append)
        else:
            self.history = history.branch(self.log.append)
        self.handles = handles or SessionHandles(b"", self.log)
        self.adapter = adapter
        self._sequence = sequence or EngineCopy(link, salt, adapter=adapter)
        self._turn_grammar = TurnGrammar(language)
        now = now or datetime.now().astimezone()
        renderer = Renderer(language.tokenizer, now, language.prefix_rule, language.report.rules)
        self._tenant = tenant or Tenant(TenantLimits())
        slot = self._tenant.slot
        self._branch = Branch(
            self.history, self.log, renderer, language, link, self._sequence, settings, slot
        )
        self._eager_prefill = EagerPrefill(self._branch)
        self._waits = waits or Waits()
        self._conversations = OpenConversations() if conversations is None else conversations
        self._space = space_of(salt, adapter_digest(adapter))
        self._reached: list[Digest] = []
        self._return_hints = ReturnHints(self.history, self._sequence)
        seconds = settings.recovery_seconds
        hints, open_waits = self._return_hints, self._waits

        def leaves(seconds: float) -> None:
            hints.cancel()
            open_waits.leaves(id, seconds)

        self.placement = Placement(link, self.history, self._sequence, seconds, leaves)
        self._responses: list[TurnResponse] = []
        self._closed = False

    def check_turns(self) -> None:
        """Raises ``TurnLimit`` if the tenant has as many replies running as it may."""
        self._tenant.check_turns()

    def respond(
        self,
        request: TurnRequest,
        response_id: str | None = None,
        note: bytes = b"",
        *,
        whole_calls: bool = False,
    ) -> TurnResponse:
        """Begin a turn on the history as it is now. Read its events from the response.

        ``response_id``: None makes a new id. ``note``: bytes of the caller that the journal keeps with the
        response and returns after a restart. ``whole_calls``: deliver each tool call's arguments in one event.
        Raises ``TurnLimit``, ``GrammarInvalid``, ``AdapterUnavailable``, or ``ConversationBusy`` if the reply
        joins the conversation while another response does.
        """
        self._check_open()
        check_loaded(self._branch.link, self.adapter)
        self.check_turns()
        self.history.check_free(request)
        tools = request.preamble(self.history.preamble).tools
        if not tools:  # a call is for a client that can answer it
            request = replace(request, parse_calls=False)
        bound = self._turn_grammar.prepare(request, tools)
        form = {} if request.out_of_band else request_form(request)
        with ExitStack() as undo:  # until the journal has the turn, any error takes it back
            prepared = self.history.prepare(request)
            if prepared.turn is not None:
                undo.callback(self.history.abort_turn, prepared.turn)
            response = TurnResponse(
                self._branch, bound, prepared, response_id, ended=self._ended, whole_calls=whole_calls
            )
            undo.callback(self._tenant.left, [response])
            undo.callback(response.withdraw)
            if response.writes:
                self._waits.returns(self.id)
                self._return_hints.cancel()
            self._own(response)
            self.log.append(Begun(response=response.id, request=form, writes=response.writes, note=note))
            undo.pop_all()
        return response

    def go_on(self, past: Past) -> TurnResponse:
        """Continue a response that a server's end interrupted: it repeats its events so far, and then
        continues. ``past``: what the journal holds of it. If it cannot continue, it is ended here, the
        conversation is free for the next turn, and the reason is raised."""
        try:
            response = TurnResponse(
                self._branch,
                self._turn_grammar.prepare(past.request, past.prepared.script.preamble.tools),
                past.prepared,
                past.id,
                ended=self._ended,
                said=past.ids,
                logprobs=past.logprobs,
                cut=past.cut,
                left_out=past.left_out,
            )
            self._own(response)
        except BaseException as fault:
            if past.prepared.turn is not None:
                self.history.abort_turn(past.prepared.turn)
            self.log.append(refused(past.id, fault))
            raise
        return response

    def retold(self, past: Past) -> list[ReplyEvent]:
        """The events of a response that has ended, as they were first sent; empty if it was refused before it
        began. ``past``: what the journal holds of it."""
        branch = self._branch
        return retold(past, branch.language, branch.language.end_ids(branch.link.hello.eos_ids))

    def cut(self, item_id: str, end: int) -> TurnResponse | None:
        """Cut the model's message ``item_id`` after its first ``end`` characters. If its response still runs,
        that response is returned: the caller has to cancel it, and the cut is made when it ends. Otherwise
        returns None. Raises ``ItemUnknown`` or ``CutInvalid``."""
        self._check_open()
        response = self.saying(item_id)
        if response is not None:
            response.cut(item_id, end)
        else:
            shorten(self.history, item_id, end, self._branch.language.tokenizer)
        return response

    def branch(
        self, at: str | None = None, compaction: ForkSummary | None = None
    ) -> tuple[History, list[AnyOperation]]:
        """What a fork of this session begins with: a second history that continues from here, or from behind
        the item ``at``, and the operations with which the journal makes it from this session's. In it a running
        reply has ended with the tokens that it has so far. ``compaction``: a summary that shortens its context.

        Raises ``ItemUnknown``, ``CutInvalid``, or ``ItemExists`` for the summary.
        """
        self._check_open()
        operations: list[AnyOperation] = []
        writer = self.writer
        if writer is None:
            history = self.history.branch()
        else:
            history, ending = writer.so_far()
            operations.append(ending)
        if at is not None:
            history = history.branch(operations.append)
            rewind(history, at, self._branch.language.tokenizer)
        if compaction is not None:
            history = history.branch(operations.append)
            history.compact(compaction.summary, older_turns(history.segments(), compaction.turns))
        return history, [*operations, Branched()]

    async def lend(self, children: Sequence[Session], head: TurnNode | None) -> None:
        """Fork this session's sequence in the engine into those of ``children``, the sessions that were
        forked from this one, so that they use its KV again. ``head``: the last turn that they share; None:
        nothing is forked."""
        if head is not None:
            await self._sequence.fork([child._sequence for child in children], head.tokens())

    def heir(self) -> EngineCopy:
        """The `EngineCopy` for a session that is forked from this one now. It is empty until `lend`."""
        return self._sequence.child()

    @property
    def writer(self) -> TurnResponse | None:
        """The running response that writes the conversation; None if there is none."""
        return next((response for response in self._live() if response.writes), None)

    def saying(self, item_id: str) -> TurnResponse | None:
        """The running response that has begun the message ``item_id``; None if there is none."""
        return next((response for response in self._live() if response.says(item_id)), None)

    def rewind(self, to: str | int) -> None:
        """Remove everything behind ``to``: an item's id, ``"root"`` for the beginning, or a number of tokens.
        Raises ``ItemUnknown``, ``CutInvalid`` or ``ConversationBusy``."""
        self._check_open()
        rewind(self.history, to, self._branch.language.tokenizer)

    def known_by(self, names: Iterable[str], *, lasting: bool) -> None:
        """Let requests that name one of ``names`` find the session. ``lasting``: also in the next server, if
        the journal keeps the session."""
        for name in names:
            digest = name_digest(self._space, name)
            self._find_by(digest)
            if lasting:
                self.handles.named(digest)

    def expect(self, item: Growing | None) -> None:
        """Prefill the next item while its text is streamed in: the tokens that later text cannot change.
        ``item``: it with its text so far; None: the client withdrew it. Does nothing after `aclose`."""
        if not self._closed:
            self._eager_prefill.expect(item)

    async def prefilled_input(self, item: Growing) -> PrefilledInput:
        """How many tokens of the items behind the last reply the engine has been given already, and how many
        not, with ``item``, the streamed text that is committed next. Begins to prefill the rest. Raises
        ``TemplateFailed``."""
        return await self._eager_prefill.prefilled_input(item)

    def statistics(self) -> dict[str, float]:
        """Counts of the session's items, of the tokens up to the end of its last turn, and of its running
        responses."""
        head = self.history.head
        return {
            "items": len(self.history),
            "tokens": 0 if head is None else head.length,
            "responses": len(self._live()),
        }

    async def aclose(self, *, keep_kv: bool = True) -> None:
        """Cancel running responses and close the engine's copy; with ``keep_kv`` its KV stays cached until it
        is evicted."""
        self._closed = True
        self._waits.ends(self.id)
        self._conversations.forget(self._reached, self.id)
        await self._return_hints.aclose()
        await self._eager_prefill.aclose()
        for response in self._live():
            await response.leave()
        self._tenant.left(self._responses)
        self._responses = []  # nothing refers back to a closed session: it is freed without the collector
        await self._sequence.close(keep_kv=keep_kv)
        self.log.close()

    def _ended(self, response: TurnResponse) -> None:
        self._tenant.left([response])
        self._responses = self._live()
        self._eager_prefill.resume()
        if not self._closed:
            self._return_hints.response_ended()
            self._remember()

    def _remember(self) -> None:
        """After a turn: let requests that carry this conversation find the session."""
        if self.history.busy or not len(self.history):
            return
        digest = digest_of(self._space, self.history)
        self._find_by(digest)
        self.handles.reached(digest)

    def _find_by(self, digest: Digest) -> None:
        self._reached.append(digest)
        self._conversations.add(digest, self.id)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"Session {self.id} was closed")

    def _own(self, response: TurnResponse) -> None:
        self._responses = [*self._live(), response]
        self._tenant.began(response)

    def _live(self) -> list[TurnResponse]:
        return [response for response in self._responses if not response.over]
