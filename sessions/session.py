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
from .items import Growing, Tool
from .journal.records import AnyOperation, Begun, Branched, SessionLog
from .journal.replay import Past, refused, request_form, retold
from .placement import Placement
from .return_hints import ReturnHints, Waits
from .settings import SessionSettings, TenantLimits
from .tenants import Tenant
from .text.eager_prefill import EagerPrefill, PrefilledInput
from .text.language import Language
from .text.renderer import Renderer
from .tree import TurnNode
from .turn.branch import Branch
from .turn.events import ReplyEvent
from .turn.request import TurnRequest
from .turn.response import TurnResponse
from .turn.turn_grammar import TurnGrammar


class Session:
    """One conversation. ``salt`` separates tenants' cached blocks; ``now`` is the template's today.

    ``log`` is its place in the journal, ``handles`` are those that open it, ``reopened`` tells that it comes
    from there. ``sequence``: that of a session that was forked. ``waits``: where its pauses are noted.
    ``tenant``: whose replies its own are counted with.
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
        """Raises ``TurnLimit`` where the tenant has as many replies running as it may."""
        self._tenant.check_turns()

    def respond(
        self,
        request: TurnRequest,
        response_id: str | None = None,
        note: bytes = b"",
        *,
        whole_calls: bool = False,
    ) -> TurnResponse:
        """Begin a turn: what it puts before the model is settled now, its events are read from the
        response. ``note`` is kept with it in the journal. ``whole_calls``: nobody wants arguments as they come.

        Raises ``ConversationBusy`` while another one writes the conversation; out-of-band ones may run
        beside it. Raises ``TurnLimit`` where the tenant has as many running as it may.
        """
        self._check_open()
        self.check_turns()
        self.history.check_free(request)
        bound = self._bound(request, request.preamble(self.history.preamble).tools)
        form = {} if request.out_of_band else request_form(request)
        with ExitStack() as undo:  # until the journal has the turn, whatever raises takes it back
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
        """The response that was interrupted: it tells what it had told, and goes on from there.

        Where it cannot it is refused for good, and raises why: the conversation is free for the next turn.
        """
        try:
            response = TurnResponse(
                self._branch,
                self._bound(past.request, past.placed.script.preamble.tools),
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
        """What a response told that has ended."""
        branch = self._branch
        return retold(past, branch.language, branch.language.end_ids(branch.link.hello.eos_ids))

    async def cancel(self) -> bool:
        """Cancel the response that writes the conversation; False if there is none."""
        writers = [response for response in self._live() if response.writes]
        for response in writers:
            await response.cancel()
        return bool(writers)

    def cut(self, item_id: str, end: int) -> TurnResponse | None:
        """End a message of the model after ``end`` characters, as far as it was heard.

        Where it is still being said gives the response, for the caller to cancel: it is cut when that is over.
        Raises ``ItemUnknown`` or ``CutInvalid``.
        """
        self._check_open()
        response = self.saying(item_id)
        if response is not None:
            response.cut(item_id, end)
        else:
            shorten(self.history, item_id, end, self._branch.language.tokenizer)
        return response

    def branch(self, at: str | None = None) -> tuple[History, list[AnyOperation]]:
        """A history that goes on from here, a reply that runs in it as far as it has come; or from item ``at``.

        And what the journal has to say of the way there. Raises ``ItemUnknown`` or ``CutInvalid``.
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

    async def lend(self, children: Sequence[EngineCopy], head: TurnNode | None) -> None:
        """Let the engine's sequences of sessions that were forked share what they have in common with this."""
        if head is not None:
            await self._sequence.fork(children, head.tokens())

    def heir(self) -> EngineCopy:
        """A sequence for a session that is forked off: `lend` gives it what it shares."""
        return self._sequence.child()

    def saying(self, item_id: str) -> TurnResponse | None:
        """The response that runs and has begun this message of the conversation."""
        return next((response for response in self._live() if response.says(item_id)), None)

    def rewind(self, to: str | int) -> None:
        """Take out all behind an item (``"root"``: all), or behind the first ``to`` tokens.

        Raises ``ItemUnknown``, ``CutInvalid`` or ``ConversationBusy``.
        """
        self._check_open()
        rewind(self.history, to, self._branch.language.tokenizer)

    @property
    def most_characters(self) -> int | None:
        """A longer text than that cannot be in the model's context; None where that cannot be said."""
        return self._branch.language.tokenizer.most_characters(self._branch.link.hello.max_context)

    def expect(self, item: Growing | None) -> None:
        """This much of the next item has come: its settled beginning is prefilled. None: taken back."""
        if not self._closed:
            self._eager_prefill.expect(item)

    async def prefilled_input(self) -> PrefilledInput:
        """How much of the history's end the engine was given already. Raises ``TemplateFailed``."""
        return await self._eager_prefill.prefilled_input()

    def statistics(self) -> dict[str, float]:
        """Items, tokens on the branch, and responses that run."""
        head = self.history.head
        return {
            "items": len(self.history),
            "tokens": 0 if head is None else head.length,
            "responses": len(self._live()),
        }

    async def aclose(self) -> None:
        """Cancel what runs and let the engine's sequence go; its KV stays cached until evicted."""
        self._closed = True
        self._waits.ends(self.id)
        await self._return_hints.aclose()
        await self._eager_prefill.aclose()
        for response in self._live():
            await response.leave()
        self._tenant.left(self._responses)
        await self._sequence.close()
        self.log.close()

    def _leaves(self, tokens: int, seconds: float) -> None:
        self._return_hints.cancel()
        self._waits.leaves(self.id, tokens, seconds)

    def _ended(self) -> None:
        self._eager_prefill.resume()
        if not self._closed:
            self._return_hints.response_ended()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"Session {self.id} was closed")

    def _bound(self, request: TurnRequest, tools: Sequence[Tool]) -> TurnRequest:
        """The request as the engine is asked: with its bad words in tokens, and the grammar of its reply.

        Raises ``GrammarInvalid``.
        """
        return self._turn_grammar.prepare(request, tools)

    def _own(self, response: TurnResponse) -> None:
        self._responses = [*self._live(), response]
        self._tenant.began(response)

    def _live(self) -> list[TurnResponse]:
        return [response for response in self._responses if not response.over]
