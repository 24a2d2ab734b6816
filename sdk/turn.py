"""One turn of a chat: the model's text in pieces; the tools that it calls are run in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import anyio

from .connection import Connection
from .errors import ToolRoundsExceeded
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.items import FunctionCallItem
from .frames.server import TextDelta
from .params import in_brief, output_of
from .reply import Reply
from .responses import Rounds
from .tools.context import failure
from .tools.running import Detached
from .tools.tool import Tool, no_such_tool


class Turn:
    """Iterates over pieces of text. `rounds` are its responses: one, and one more for each round of tools.

    With `steer` the first response is asked for by that, while another turn runs. A call of a tool without a
    callable ends the turn: it stands in `rounds[-1].calls`, and the caller answers it. A call of an unknown
    tool is answered with an error.
    Raises what `Reply` raises, and `ToolRoundsExceeded` when a round beyond `max_rounds` calls tools.
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
    ) -> None:
        self._connection = connection
        self._create = in_brief(create)
        self._tools = tools
        self._max_rounds = max_rounds
        self._claim = claim
        self._detached = detached
        self._begun = False
        self._stopped = False
        self._over = False
        self.given_up = False
        """Whether reading was cancelled, and not taken up again."""
        self.rounds = Rounds()
        self.reply = Reply(connection, in_brief(steer) if steer else self._create, first, rounds=self.rounds)
        """The latest response."""

    @property
    def running(self) -> bool:
        """Whether it has begun and is not over."""
        return self._begun and not self._over

    def stop(self) -> None:
        """Begin no further round."""
        self._stopped = True

    def close(self) -> None:
        """Read no more of it."""
        self._over = True

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        self.given_up = False
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
        except anyio.get_cancelled_exc_class():
            self.given_up = True
            raise
        raise StopAsyncIteration

    async def text(self) -> str:
        """Read to the end; the whole turn's text."""
        return "".join([piece async for piece in self])

    async def _round_ended(self) -> None:
        """Run the tools that the reply called and ask for the next response; without calls the turn is over."""
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
        """Whether the turn answers the call: its tool has a callable, or no tool has that name."""
        tool = self._tools.get(call.name)
        if tool is not None:
            return tool.run is not None
        overridden = self._create.response.tools if self._create.response else None
        offered = [one.name for one in overridden] if isinstance(overridden, list) else []
        return bool(self._tools) and call.name not in offered

    async def _outputs(self, calls: Sequence[FunctionCallItem]) -> list[ItemCreate]:
        """Run the calls concurrently; their outputs in the order of the calls."""
        outputs: dict[int, str] = {}

        async def run(index: int, call: FunctionCallItem) -> None:
            tool = self._tools.get(call.name)
            if tool is None:
                outputs[index] = failure(no_such_tool(call.name, self._tools))
            elif tool.run is not None:
                outputs[index] = (await tool.call(call.arguments, detached=self._detached)).output

        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(run, index, call)
        return [output_of(call, outputs[index]) for index, call in enumerate(calls)]
