"""The session: one conversation with its model, kept across turns, cancels and engine restarts.

Gives out responses and owns the engine's sequence of the main branch. Knows nothing of sockets or frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime

from ..runtime.link.client import EngineLink
from .edits import rewind, shorten
from .engine_copy import EngineCopy
from .errors import SessionClosed
from .handles import SessionHandles
from .history import History
from .items import Growing
from .journal.records import AnyOperation, Begun, Branched, SessionLog
from .journal.replay import Past, refused, request_form, retold
from .placement import Placement, ReturnHints, Waits
from .settings import SessionSettings, TenantLimits
from .tenants import Tenant
from .text.eager_prefill import EagerPrefill, PrefilledInput
from .text.language import Language
from .text.renderer import Renderer
from .tree import TurnNode
from .turn.branch import Branch
from .turn.events import ReplyEvent
from .turn.request import RequestBounds, TurnRequest
from .turn.response import TurnResponse
from .turn.turn_grammar import TurnGrammar


class Session:
    """One conversation. ``salt`` separates tenants' cached blocks; ``now`` is the template's date.

    ``log`` is the session's place in the journal; ``handles`` are the secrets that open it. ``history``: that
    of a session that was forked or comes from the journal (``reopened``). ``sequence``: the engine's copy of a
    forked session. ``waits`` records its pauses. ``tenant`` counts its replies.
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
        reopened: bool = False,
        sequence: EngineCopy | None = None,
        waits: Waits | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        settings = settings or SessionSettings()
        self.id = id
        self.log = log or SessionLog()
        if history is None:
            self.history = History(max_items=settings.max_items, record=self.log.append)
        else:
            self.history = history.branch(self.log.append)
        self.handles = handles or SessionHandles(b"", self.log)
        self._sequence = sequence or EngineCopy(link, salt, reopened=reopened)
        self._turn_grammar = TurnGrammar(language)
        now = now or datetime.now().astimezone()
        renderer = Renderer(language.tokenizer, now, language.prefix_rule, language.report.rules)
        self._tenant = tenant or Tenant(TenantLimits())
        slot = self._tenant.slot
        self._branch = Branch(self.history, renderer, language, link, self._sequence, settings, slot)
        self._eager_prefill = EagerPrefill(self._branch)
        self._waits = waits or Waits()
        self._return_hints = ReturnHints(self.history, self._sequence)
        seconds = settings.recovery_seconds
        self.placement = Placement(link, self.history, self._sequence, seconds, self._leaves)
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
        """Begin a turn on the history as it is now; read its events from the response.

        ``note`` is kept with it in the journal. ``whole_calls``: a call's arguments come in one piece.
        Raises ``ConversationBusy`` while another response writes the conversation (one out of band may run
        beside it), ``TurnLimit``, or ``GrammarInvalid``.
        """
        self._check_open()
        self.check_turns()
        self.history.check_free(request)
        bound = self._turn_grammar.prepare(request, request.preamble(self.history.preamble).tools)
        form = {} if request.out_of_band else request_form(request)
        with ExitStack() as undo:  # any error takes the turn back until the journal has it
            placed = self.history.place(request)
            if placed.turn is not None:
                undo.callback(self.history.abort_turn, placed.turn)
            response = TurnResponse(
                self._branch, bound, placed, response_id, ended=self._ended, whole_calls=whole_calls
            )
            undo.callback(response.withdraw)
            if response.writes:
                self._waits.returns(self.id)
                self._return_hints.cancel()
            self._own(response)
            self.log.append(Begun(response=response.id, request=form, writes=response.writes, note=note))
            undo.pop_all()
        return response

    def go_on(self, past: Past) -> TurnResponse:
        """Go on with an interrupted response: it repeats its events so far, and then continues. If it cannot
        go on, this ends it, frees the conversation for the next turn, and raises the reason."""
        try:
            response = TurnResponse(
                self._branch,
                self._turn_grammar.prepare(past.request, past.placed.script.preamble.tools),
                past.placed,
                past.id,
                ended=self._ended,
                said=past.ids,
                logprobs=past.logprobs,
                cut=past.cut,
            )
            self._own(response)
        except BaseException as fault:
            if past.placed.turn is not None:
                self.history.abort_turn(past.placed.turn)
            self.log.append(refused(past.id, fault))
            raise
        return response

    def retold(self, past: Past) -> list[ReplyEvent]:
        """The events of a response that has ended."""
        branch = self._branch
        return retold(past, branch.language, branch.language.end_ids(branch.link.hello.eos_ids))

    def cut(self, item_id: str, end: int) -> TurnResponse | None:
        """Cut a message of the model after ``end`` characters. If its response still runs, returns that:
        cancel it, and it is cut when it ends. Raises ``ItemUnknown`` or ``CutInvalid``."""
        self._check_open()
        response = self.saying(item_id)
        if response is not None:
            response.cut(item_id, end)
        else:
            shorten(self.history, item_id, end, self._branch.language.tokenizer)
        return response

    def branch(self, at: str | None = None) -> tuple[History, list[AnyOperation]]:
        """A second history that goes on from here, or from behind the item ``at``, and the operations that the
        journal needs for it. A running reply ends there with the tokens it has.

        Raises ``ItemUnknown`` or ``CutInvalid``.
        """
        self._check_open()
        operations: list[AnyOperation] = []
        writer = next((response for response in self._live() if response.writes), None)
        if writer is None:
            history = self.history.branch()
        else:
            history, ending = writer.so_far()
            operations.append(ending)
        if at is not None:
            history = history.branch(operations.append)
            rewind(history, at, self._branch.language.tokenizer)
        return history, [*operations, Branched()]

    async def lend(self, children: Sequence[Session], head: TurnNode | None) -> None:
        """Let the engine's copies of forked sessions share this one's blocks up to ``head``."""
        if head is not None:
            await self._sequence.fork([child._sequence for child in children], head.tokens())

    def heir(self) -> EngineCopy:
        """The engine's copy of a session that is forked now; it is empty until `lend`."""
        return self._sequence.child()

    def saying(self, item_id: str) -> TurnResponse | None:
        """The running response that has begun this message of the conversation."""
        return next((response for response in self._live() if response.says(item_id)), None)

    def rewind(self, to: str | int) -> None:
        """Remove everything behind an item (``"root"``: everything), or behind the first ``to`` tokens.
        Raises ``ItemUnknown``, ``CutInvalid`` or ``ConversationBusy``."""
        self._check_open()
        rewind(self.history, to, self._branch.language.tokenizer)

    @property
    def bounds(self) -> RequestBounds:
        """What the model allows in a request."""
        branch = self._branch
        return RequestBounds(branch.link.hello.vocab_size, branch.language.shows_tools)

    @property
    def most_characters(self) -> int | None:
        """A text with more characters does not fit into the model's context; None if that is not known."""
        return self._branch.language.tokenizer.most_characters(self._branch.link.hello.max_context)

    def expect(self, item: Growing | None) -> None:
        """Prefill the stable prefix of the next item, which has come this far. None: it was withdrawn."""
        if not self._closed:
            self._eager_prefill.expect(item)

    async def prefilled_input(self) -> PrefilledInput:
        """How much of the history's end the engine has been given. Raises ``TemplateFailed``."""
        return await self._eager_prefill.prefilled_input()

    def statistics(self) -> dict[str, float]:
        """Counts of items, of tokens on the branch, and of running responses."""
        head = self.history.head
        return {
            "items": len(self.history),
            "tokens": 0 if head is None else head.length,
            "responses": len(self._live()),
        }

    async def aclose(self) -> None:
        """Cancel running responses and close the engine's copy; its KV stays cached until it is evicted."""
        self._closed = True
        self._waits.ends(self.id)
        await self._return_hints.aclose()
        await self._eager_prefill.aclose()
        for response in self._live():
            await response.leave()
        self._tenant.left(self._responses)
        await self._sequence.close()
        self.log.close()

    def _leaves(self, seconds: float) -> None:
        self._return_hints.cancel()
        self._waits.leaves(self.id, seconds)

    def _ended(self) -> None:
        self._eager_prefill.resume()
        if not self._closed:
            self._return_hints.response_ended()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"Session {self.id} was closed")

    def _own(self, response: TurnResponse) -> None:
        self._responses = [*self._live(), response]
        self._tenant.began(response)

    def _live(self) -> list[TurnResponse]:
        return [response for response in self._responses if not response.over]
