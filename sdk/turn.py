"""One turn of a chat: the model's text in pieces; the tools that it calls are run in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from .connection.connection import Connection
from .connection.responses import Finished, Rounds
from .errors import ToolRoundsExceeded
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.items import FunctionCallItem
from .frames.server import TextDelta
from .params import in_brief, output_of
from .reading import Reading, Unread
from .reply import Reply, last_of
from .tools.context import failure
from .tools.running import Detached
from .tools.tool import Tool, no_such_tool


class Turn(Reading[str, Finished]):
    """One turn of a chat: iterates over the pieces of the model's text, and runs tools in between; `await`
    reads to the end and gives the last response. `rounds`: the responses that have ended: one, and one more for
    each time that tools were run.

    `first`: items to add before the first response. `steer`: the event that asks for the first response instead
    of `create`, while another turn runs. `max_rounds`: how often tools are run. `claim` is awaited before
    anything is sent.

    If a call is the caller's to answer, because its tool has no callable, the turn ends: the call is in
    `rounds[-1].calls`. If the chat has tools, a call of an unknown one gets an error as its output. Raises what
    `Reply` raises, and `ToolRoundsExceeded` if the model calls tools after `max_rounds` rounds.
    """

    def __init__(
        self,
        connection: Connection,
        create: ResponseCreate,
        first: Sequence[ItemCreate],
        tools: Mapping[str, Tool],
        max_rounds: int,
        claim: Callable[[Turn], Awaitable[None]],
        detached: Detached,
        steer: ResponseSteer | None = None,
        unread: Unread | None = None,
    ) -> None:
        super().__init__(Rounds(), unread)
        self._connection = connection
        self._create = in_brief(create)
        self._tools = tools
        self._max_rounds = max_rounds
        self._claim = claim
        self._detached = detached
        self._stopped = False
        self.reply = Reply(connection, in_brief(steer) if steer else self._create, first, rounds=self.rounds)
        """The response of the turn that was asked for last, or that is asked for first."""

    def stop(self) -> None:
        """Begin no further response after tools were run. The running one can be read to its end."""
        self._stopped = True

    def __repr__(self) -> str:
        known = f"{self.reply.response_id} " if self.reply.response_id else ""
        return f"<Turn {known}{self._state}, {len(self.rounds)} responses ended>"

    async def _next(self) -> str:
        try:
            if not self._begun:
                await self._claim(self)
                self._begun = True
            while not self._over:
                async for event in self.reply:
                    if isinstance(event, TextDelta):
                        return event.delta
                await self._round_ended()
        except Exception:
            self._over = True
            raise
        raise StopAsyncIteration

    async def text(self) -> str:
        """Read to the end; returns the text of all its responses that was not read before."""
        return "".join([piece async for piece in self])

    def _end(self) -> Finished:
        return last_of(self.rounds)

    async def _round_ended(self) -> None:
        """Call this when a response is over: it runs the tools that were called, and makes the next reply,
        which sends their outputs. The turn is over if there are no calls, if the caller answers one, or if it
        was stopped; then the outputs are sent alone. Raises `ToolRoundsExceeded`."""
        finished = self.reply.finished
        if finished is None:
            self._over = True
            return
        calls = finished.calls if finished.status == "completed" else []
        ours = [call for call in calls if self._is_ours(call)]
        if ours and len(self.rounds) > self._max_rounds:
            raise ToolRoundsExceeded(f"The model still calls tools after {self._max_rounds} rounds")
        outputs = await self._outputs(ours)
        if ours and len(ours) == len(calls) and not self._stopped:
            self.reply = Reply(self._connection, self._create, outputs, rounds=self.rounds)
            return
        self._over = True
        for output in outputs:
            await self._connection.send(output)

    def _is_ours(self, call: FunctionCallItem) -> bool:
        """Whether the turn answers the call, not the caller: its tool has a callable, or the chat has tools and
        none that was offered has this name; then the output is an error."""
        tool = self._tools.get(call.name)
        if tool is not None:
            return tool.run is not None
        overridden = self._create.response.tools if self._create.response else None
        offered = [one.name for one in overridden] if isinstance(overridden, list) else []
        return bool(self._tools) and call.name not in offered

    async def _outputs(self, calls: Sequence[FunctionCallItem]) -> list[ItemCreate]:
        """Run the calls concurrently; returns the events that add their outputs, in the order of the calls."""
        outputs: dict[int, str] = {}

        async def run(index: int, call: FunctionCallItem) -> None:
            tool = self._tools.get(call.name)
            if tool is None:
                outputs[index] = failure(no_such_tool(call.name, self._tools))
            else:
                outputs[index] = (await tool.call(call.arguments, detached=self._detached)).output

        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(run, index, call)
        return [output_of(call, outputs[index]) for index, call in enumerate(calls)]
