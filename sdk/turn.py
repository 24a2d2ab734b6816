"""One turn of a chat: the model's text in pieces, with the tools it calls run in between.

Knows nothing of how a tool is described, nor of other turns.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec

from .connection import Connection
from .detached import Detached
from .errors import ToolRoundsExceeded
from .frames.client import ItemCreate, ResponseCreate, ResponseSteer
from .frames.items import AnyItem, FunctionCallItem, FunctionCallOutputItem
from .frames.server import TextDelta
from .params import in_brief
from .reply import Reply, Rounds
from .tools.outputs import failure
from .tools.tool import Tool, no_such_tool


class Turn:
    """Iterates over pieces of text. `rounds` are its responses: one, and one more for each round of tools.

    With `steer` it is begun by that, in the middle of another. Calls of tools that have no callable end the
    turn: they stand in `rounds[-1].calls`, for the caller. A name that the model made up is answered with that.
    Raises what `Reply` raises, and `ToolRoundsExceeded` when a round beyond `max_rounds` wants tools.
    """

    def __init__(
        self,
        connection: Connection,
        create: ResponseCreate,
        first: Sequence[ItemCreate],
        tools: Mapping[str, Tool],
        max_rounds: int,
        claim: Callable[[Turn], Awaitable[None]],
        apart: Detached,
        steer: ResponseSteer | None = None,
    ) -> None:
        self._connection = connection
        self._create = in_brief(create)
        self._tools = tools
        self._max_rounds = max_rounds
        self._claim = claim
        self._apart = apart
        self._begun = False
        self._stopped = False
        self._over = False
        self._given_up = False
        self.rounds = Rounds()
        self._reply = Reply(connection, in_brief(steer) if steer else self._create, first, rounds=self.rounds)

    @property
    def running(self) -> bool:
        """Whether it has begun and is not over."""
        return self._begun and not self._over

    @property
    def given_up(self) -> bool:
        """Whether reading it was cancelled, and not taken up again."""
        return self._given_up

    def close(self) -> None:
        """Nothing more is read of it."""
        self._over = True

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        self._given_up = False
        try:
            if not self._begun:
                await self._claim(self)
                self._begun = True
            while not self._over:
                async for event in self._reply:
                    if isinstance(event, TextDelta):
                        return event.delta
                await self._round_ended()
        except Exception:
            self._over = True
            raise
        except anyio.get_cancelled_exc_class():
            self._given_up = True
            raise
        raise StopAsyncIteration

    @property
    def reply(self) -> Reply:
        """Its latest response."""
        return self._reply

    def stop(self) -> None:
        """Begin no further round."""
        self._stopped = True

    async def text(self) -> str:
        """The whole turn's text, read to its end."""
        return "".join([piece async for piece in self])

    async def _round_ended(self) -> None:
        """Run the tools the reply called and ask for the next one; without calls the turn is over."""
        finished = self._reply.finished
        if finished is None:
            self._over = True
            return
        calls = finished.calls if finished.status == "completed" else []
        ours = [call for call in calls if self._is_ours(call)]
        if ours and len(self.rounds) > self._max_rounds:
            raise ToolRoundsExceeded(f"The model still calls tools after {self._max_rounds} rounds")
        outputs = await self._outputs(ours)
        if ours and len(ours) == len(calls) and not self._stopped:
            self._reply = Reply(self._connection, self._create, outputs, rounds=self.rounds)
            return
        self._over = True
        for output in outputs:
            await self._connection.send(output)

    def _is_ours(self, call: FunctionCallItem) -> bool:
        """Whether it is answered here: there is something to run, or no tool of that name."""
        tool = self._tools.get(call.name)
        if tool is not None:
            return tool.run is not None
        asked = self._create.response.tools if self._create.response else None
        offered = [one.name for one in asked] if isinstance(asked, list) else []
        return bool(self._tools) and call.name not in offered

    async def _outputs(self, calls: Sequence[FunctionCallItem]) -> list[ItemCreate]:
        """Run the calls side by side; their outputs in the order of the calls."""
        outputs: dict[int, str] = {}

        async def run(index: int, call: FunctionCallItem) -> None:
            tool = self._tools.get(call.name)
            if tool is None:
                outputs[index] = failure(no_such_tool(call.name, self._tools))
            elif tool.run is not None:
                outputs[index] = (await tool.call(call.arguments, apart=self._apart)).output

        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(run, index, call)
        return [output_of(call, outputs[index]) for index, call in enumerate(calls)]


def output_of(call: FunctionCallItem, output: str) -> ItemCreate:
    """The event that answers a call."""
    return ItemCreate(item=named(FunctionCallOutputItem(call_id=call.call_id or "", output=output)))


def named(item: AnyItem) -> AnyItem:
    """The item with an id, by which its answer is known."""
    return item if item.id else msgspec.structs.replace(item, id=f"item_{secrets.token_hex(12)}")
