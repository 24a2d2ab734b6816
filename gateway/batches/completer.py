"""Completes the prompts of one call of `offline.LLM`, many at once, and reads the replies.

Each completion is a sequence of its own in the engine, which batches them as it batches the turns of sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from ...runtime.link.client import EngineLink
from ...runtime.verbs import TokenLimits
from ...sessions.conversation.items import Tool, new_id
from ...sessions.engine_copy import EngineCopy
from ...sessions.errors import EngineUnavailable, TurnFailed
from ...sessions.text.language import Language
from ...sessions.tools.formats import HERMES
from ...sessions.turn.events import ReplyEvent
from ...sessions.turn.generation import ReplyRun
from ...sessions.turn.reply_reader import ReplyReader
from ...sessions.turn.request import MAX_SEED, TurnRequest
from .outputs import CompletionOutput, CompletionPiece, GrowingCompletion, Logprob, RequestOutput
from .prompts import Prompt
from .sampling_params import SamplingParams

Deliver: TypeAlias = Callable[[CompletionPiece], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completer:
    """What all calls of one `offline.LLM` share: the link to the engine, the model's ``language`` (tokenizer,
    template and forms of calls), and ``places``, a semaphore that bounds the running completions.

    ``recovery_seconds``: how long a completion waits for another engine if its own dies.
    """

    link: EngineLink
    language: Language
    places: asyncio.Semaphore
    most: int
    """The number of places in ``places``: completions that may be with the engine at once, running or in its
    queue."""
    recovery_seconds: float = 0.0


@dataclass(slots=True)
class PromptTask:
    """One prompt of a call, how to complete it, and the completions of it that have ended (``outputs``).

    ``params``: what the caller asked for; ``n`` of it is the number of completions. ``request``: the checked
    request for the engine; its seed is that of completion 0. ``begun``: set when completion 0 has a token: then
    its prompt is in the prefix cache, where the other completions find it. ``cached``: prompt tokens of
    completion 0 that had cached KV. ``prompt_logprobs``: what completion 0 was told of its prompt, which it
    alone asks for.
    """

    prompt: Prompt
    params: SamplingParams
    request: TurnRequest
    request_id: str
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    outputs: list[CompletionOutput] = field(default_factory=list)
    cached: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def ended(self) -> bool:
        """Whether all completions of the prompt have ended."""
        return len(self.outputs) == self.params.n

    def output(self) -> RequestOutput:
        """Make the output of the prompt, with its completions in order, after all have ended."""
        outputs = sorted(self.outputs, key=lambda output: output.index)
        ids = self.prompt.ids.tolist()
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            ids,
            outputs,
            num_cached_tokens=self.cached,
            prompt_logprobs=self.prompt_logprobs,
        )


class Completions:
    """The completions of one call of `AsyncLLM`.

    ``await`` it for the list of outputs, one for each prompt. Or iterate with ``async for`` over pieces of text
    as they come, each with its ``prompt`` and ``completion``; after the loop `outputs` has the list. Nothing is
    checked or sent before, and it can be read once. Leaving the loop, or cancelling the task, ends what still
    runs.

    ``run``: does the work; it calls its argument with each piece, and returns the list of outputs.
    """

    def __init__(self, run: Callable[[Deliver], Coroutine[Any, Any, list[RequestOutput]]]) -> None:
        self._run = run
        self._whole = self._read_whole()
        self._outputs: list[RequestOutput] | None = None

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs, one for each prompt, in order. Raises ``LookupError`` before the end."""
        if self._outputs is None:
            raise LookupError("The completions have not ended yet")
        return self._outputs

    def __await__(self) -> Generator[Any, None, list[RequestOutput]]:
        return self._whole.__await__()

    def __aiter__(self) -> AsyncIterator[CompletionPiece]:
        self._whole.close()  # so that Python does not warn of it
        return self._pieces()

    async def _read_whole(self) -> list[RequestOutput]:
        self._outputs = await self._run(lambda piece: None)
        return self._outputs

    async def _pieces(self) -> AsyncGenerator[CompletionPiece, None]:
        pieces: asyncio.Queue[CompletionPiece | None] = asyncio.Queue()
        running = asyncio.create_task(self._run(pieces.put_nowait))
        running.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            self._outputs = await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class CompletionBatch:
    """All completions of one call, for ``tasks``, one for each prompt.

    ``tools``: those of the conversations. None: the prompts are no conversations, and their completions are
    plain text, in which no calls and no reasoning are looked for.
    """

    def __init__(
        self, completer: Completer, tasks: Sequence[PromptTask], tools: Sequence[Tool] | None = None
    ) -> None:
        self._completer = completer
        self._tasks = tasks
        self._tools = tools

    async def run(self, deliver: Deliver, ended: Callable[[PromptTask], None]) -> list[RequestOutput]:
        """Complete all prompts. Returns one output for each, in order.

        ``deliver`` is called with each piece of text, ``ended`` with each prompt's task when all its
        completions have ended. A completion that fails ends alone, with its `CompletionOutput.error`. Raises
        ``EngineUnavailable`` if no engine is left that could complete anything.
        """
        queue = ((number, index) for number, task in enumerate(self._tasks) for index in range(task.params.n))
        count = sum(task.params.n for task in self._tasks)
        workers = [
            asyncio.create_task(self._work(queue, deliver, ended))
            for _ in range(min(count, self._completer.most))
        ]
        try:
            for worker in workers:
                await worker
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [task.output() for task in self._tasks]

    async def _work(
        self, queue: Iterator[tuple[int, int]], deliver: Deliver, ended: Callable[[PromptTask], None]
    ) -> None:
        """Run completions from ``queue``, one after the other, until it is empty. Its entries are pairs: the
        number of a task in the batch, and the index of one of its completions. The others of a prompt wait
        until the first one has begun."""
        for number, index in queue:
            task = self._tasks[number]
            try:
                async with self._completer.places:
                    if index:
                        await task.begun.wait()
                    output = await self._complete(number, index, deliver)
            finally:
                if not index:
                    task.begun.set()
            if isinstance(output.error, EngineUnavailable):
                raise output.error
            task.outputs.append(output)
            if task.ended:
                ended(task)

    async def _complete(self, number: int, index: int, deliver: Deliver) -> CompletionOutput:
        completer, task = self._completer, self._tasks[number]
        request = _numbered(task.request, index)
        hello = completer.link.hello
        ends: frozenset[int] = frozenset()
        if not task.params.ignore_eos:
            ends = completer.language.end_ids(hello.eos_ids)
        reader = self._reader(request, ends)
        growing = GrowingCompletion(index, reader, keep_stop=task.params.include_stop_str_in_output)
        room = hello.max_context - len(task.prompt.ids)
        most = min(room, request.max_output_tokens or room)
        limits = TokenLimits(
            most, tuple(sorted(ends.union(request.stop_ids))), min(request.min_output_tokens, most)
        )
        sequence = EngineCopy(completer.link)
        prompt = task.prompt.ids
        recovery = completer.recovery_seconds
        run = ReplyRun(sequence, reader, prompt, request.sampling, limits, len(prompt), recovery)
        ending = run.ending
        try:
            while ending is None:
                events = await _advanced(run, task)
                ending = run.ending
                text = growing.take(events) + ("" if ending is None else growing.end())
                if text:
                    deliver(CompletionPiece.of(text, number, index))
                if reader.ids and not index:
                    task.begun.set()
        finally:
            await asyncio.shield(sequence.close())
        if not index and ending.work is not None:
            task.cached = ending.work.resident + ending.work.host + ending.work.disk
        if not index:
            task.prompt_logprobs = growing.prompt_logprobs
        return growing.output(ending)

    def _reader(self, request: TurnRequest, ends: frozenset[int]) -> ReplyReader:
        language = self._completer.language
        if self._tools is None:  # all of the reply is text, which goes on behind the prompt's
            language = replace(language, forms=HERMES)
            request = msgspec.structs.replace(request, parse_calls=False, prompt=())
        return ReplyReader(language, request, ends, new_id("resp"), self._tools or ())


async def _advanced(run: ReplyRun, task: PromptTask) -> list[ReplyEvent]:
    """The next events of ``run``, a completion of ``task``. If a mistake of this server, for example in reading
    the text, raises, this completion alone ends with an error."""
    try:
        return await run.advance()
    except Exception as fault:
        log.exception("a completion of prompt %s failed", task.request_id)
        await run.give_up(TurnFailed("The reply broke off for an internal reason"), fault)
        return []


def _numbered(request: TurnRequest, index: int) -> TurnRequest:
    """The request of the completion with this index: the same with its seed raised by the index. Only the first
    one asks for the log probabilities of the prompt, so the others use its KV."""
    if not index:
        return request
    seed = (request.sampling.seed + index) % (MAX_SEED + 1)
    sampling = msgspec.structs.replace(request.sampling, seed=seed, prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=sampling)
