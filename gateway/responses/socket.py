"""Responses over a WebSocket: requests come in, each for one queue, and the events of their responses go out.

A request names its queue by ``stream_id``; such a queue is called a lane. The requests of a lane are served one
after the other, those of different lanes at once; requests without a name share one lane. A response that is
not stored is remembered for the connection. A slow reader makes its own responses wait, and is dropped when it
takes nothing for too long. A `response.steer` gives a running response more input: the response ends, and
another one (its successor) answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from ...sdk.errors import FieldInvalid, FrameError, FrameTooLarge
from ...sdk.frames.codec import checked
from ...sessions.conversation.items import new_id
from ...sessions.turn.events import EndReason
from ..access.auth import ClientIdentity
from ..clients import Asked
from ..errors import (
    NothingToCancel,
    TooManyLanes,
    TooManyRequests,
    http_answer,
)
from ..live.client_socket import ClientSocket
from ..live.session import log_refusal, spawn
from ..net.channel import Channel
from ..net.outbox import Outbox
from .face import LocalResponses, ResponsesFace
from .frames import LaneCancel, LaneCreate, LaneEvent, LaneSteer, decoded_event
from .items import GivenItem, GivenMessage, KeptCall
from .running import RunningResponse

log = logging.getLogger(__name__)

IN_FLIGHT = 16
"""The most requests of one socket that run or wait in its queues."""
LANES = 32
"""The most queues (``stream_id``s) of one socket, without the one for requests that name none."""
MAX_STEERS = 16
"""The most `response.steer` events that wait for the end of one response."""
REMEMBERED = 256
"""A socket remembers the ids of so many responses that have ended, the latest ones, so that a `response.steer`
that comes too late gets an error that says so."""

_ENCODER = msgspec.json.Encoder()


@dataclass(slots=True)
class _Steer:
    """The input of one `response.steer`, which waits for the end of a response. ``items``: as items; ``given``:
    as the client sent it, for an event that says that it failed."""

    id: str
    items: Sequence[GivenItem]
    given: str | list[GivenItem]


@dataclass(slots=True)
class _Served:
    """A response that runs on this socket, its request, and the input of `response.steer` events that waits for
    its end."""

    running: RunningResponse
    request: LaneCreate
    steers: list[_Steer] = field(default_factory=list)


class ResponsesSocket(ClientSocket):
    """Serves one ``client`` of Responses on one WebSocket. ``channel``: the connection."""

    def __init__(self, channel: Channel, face: ResponsesFace, client: ClientIdentity) -> None:
        super().__init__(channel, client, face.limits, Outbox(face.limits))
        self._face = face
        self._local = LocalResponses()
        self._lanes: dict[str | None, deque[Asked[LaneCreate]]] = {}  # what waits, by lane
        self._works: dict[str | None, asyncio.Task[None]] = {}  # what serves each lane
        self._others: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._served: dict[str, _Served] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._owed: dict[str, _Served] = {}  # those with steers that wait for tools' outputs, by response
        self._steer_events = 0

    async def begin(self) -> None:
        """There is nothing to open: each request says what it continues."""

    def end(self) -> None:
        """The running responses are cancelled."""
        for task in (*self._works.values(), *self._others):
            task.cancel()
        for served in self._served.values():
            served.running.forsake()
            self._face.service.spawn(served.running.cancel())

    # --- in -------------------------------------------------------------------------------------------------

    async def serve(self, frame: bytes | str) -> None:
        """Serve one client event."""
        self._take(decoded_event(checked(frame, self._limits.frame_bytes)))

    def refuse_frame(self, frame: bytes | str, error: FrameError) -> None:
        """Send an ``error`` event, in the lane that the frame names."""
        try:
            found = None if isinstance(error, FrameTooLarge) else msgspec.json.decode(frame)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            found = None
        names = found if isinstance(found, dict) else {}
        previous, lane = names.get("previous_response_id"), names.get("stream_id")
        self._local.evict(previous if isinstance(previous, str) else None)
        self._tell_error(error, lane if isinstance(lane, str) and len(lane) <= 128 else None)

    def _take(self, asked: Asked[LaneEvent]) -> None:
        match event := asked.body:
            case LaneCreate():
                self._enqueue(Asked(event, asked.unserved))
            case LaneSteer():
                self._steer(event)
            case LaneCancel():
                self._cancel(event)

    def _enqueue(self, asked: Asked[LaneCreate]) -> None:
        lane = asked.body.stream_id
        try:
            if self._in_flight >= IN_FLIGHT:
                raise TooManyRequests(f"This socket has {IN_FLIGHT} requests in flight; it may have no more")
            if lane is not None and lane not in self._lanes:
                named = len(self._lanes) - (None in self._lanes)
                if named >= LANES:
                    raise TooManyLanes(f"This socket has {LANES} streams; it may have no more")
        except (TooManyRequests, TooManyLanes) as error:
            self._tell_error(error, lane)
            return
        self._in_flight += 1
        self._lanes.setdefault(lane, deque()).append(asked)
        if lane not in self._works:
            self._works[lane] = asyncio.create_task(self._serve_lane(lane))

    def _cancel(self, event: LaneCancel) -> None:
        if event.response_id is not None:
            found = [served for name, served in self._served.items() if name == event.response_id]
        else:
            found = [one for one in self._served.values() if one.request.stream_id == event.stream_id]
        if not found:
            self._tell_error(NothingToCancel("There is no such response to cancel"), event.stream_id)
        for served in found:
            spawn(served.running.cancel(), self._others)

    # --- lanes ----------------------------------------------------------------------------------------------

    async def _serve_lane(self, lane: str | None) -> None:
        """Serve the requests of one queue, one after the other, until it is empty. ``lane``: its ``stream_id``;
        None: the queue of requests that name none."""
        waiting = self._lanes[lane]
        try:
            while waiting:
                asked = waiting.popleft()
                try:
                    await self._serve(asked)
                finally:
                    self._in_flight -= 1
        finally:
            del self._works[lane]

    async def _serve(self, asked: Asked[LaneCreate]) -> None:
        """Serve one request, and after it the successors of its response, as long as `response.steer` events
        give these more input."""
        request = asked.body
        before = self._owed.pop(request.previous_response_id or "", None)
        steers = [] if before is None else before.steers
        try:
            if request.background:
                raise FieldInvalid("`background` is not served over a WebSocket", "background")
            running = await self._begin(asked, steers)
        except Exception as error:
            self._local.evict(request.previous_response_id)
            self._tell_error(error, request.stream_id)
            self._fail_steers(steers, request.previous_response_id or "", request.stream_id, error)
            return
        while True:
            served = await self._tell(running, request)
            response = running.response
            if not served.steers:
                return
            calls = [item for item in response.output if isinstance(item, KeptCall)]
            owed = [call for call in calls if call.status == "completed"]
            if owed:
                self._owed[response.id] = served
                self._tell_pending(served, owed)
                if len(self._owed) > IN_FLIGHT:
                    name, left = next(iter(self._owed.items()))
                    del self._owed[name]
                    why = TooManyRequests(f"{IN_FLIGHT} later responses wait for outputs of tools")
                    self._fail_steers(left.steers, name, left.request.stream_id, why)
                return
            request = replace(request, input=None, previous_response_id=response.id)
            try:
                running = await self._begin(Asked(request, asked.unserved), served.steers)
            except Exception as error:
                log_refusal("", error)
                self._fail_steers(served.steers, response.id, request.stream_id, error)
                return

    async def _begin(self, asked: Asked[LaneCreate], steers: Sequence[_Steer]) -> RunningResponse:
        request = asked.body
        caching = request.prompt_cache_options
        silent = request.generate is False or (caching is not None and bool(caching.prewarm))
        items = [item for steer in steers for item in steer.items]
        return await self._face.begin(
            self.client.caller, asked, streamed=True, generate=not silent, local=self._local, steers=items
        )

    async def _tell(self, running: RunningResponse, request: LaneCreate) -> _Served:
        """Send the events of a running response to the last one. Returns the response with the input of
        `response.steer` events that came while it ran."""
        name = running.response.id
        served = self._served[name] = _Served(running, request)
        try:
            async for batch in running.events(asker=True):
                if running.over:
                    self._served.pop(name, None)  # from now on it is too late to steer it
                    self._ended.append(name)
                self._post([event.data for event in batch], request.stream_id)
                await self.outbox.room()
        finally:
            if running.over:
                self._served.pop(name, None)
        return served

    # --- steering -------------------------------------------------------------------------------------------

    def _steer(self, event: LaneSteer) -> None:
        """Serve a `response.steer`: accept the input and cancel the running response, so that its successor
        answers; or send `response.steer.failed`."""
        name = event.previous_response_id
        served = self._served.get(name)
        lane = None if served is None else served.request.stream_id
        given = event.input
        items = [GivenMessage(role="user", content=given)] if isinstance(given, str) else given
        steer = _Steer(new_id("steer"), items, given)
        users = all(isinstance(item, GivenMessage) and item.role == "user" for item in items)
        if served is None:
            ended = name in self._ended
            code = "response_already_completed" if ended else "response_not_found"
            told = "The response has ended" if ended else "No such response runs on this connection"
            self._tell_steer_failed(steer, name, None, code, told, accepted=False)
        elif served.request.conversation is not None or served.request.generate is False:
            told = "A response of a conversation, or one without output, cannot be steered"
            self._tell_steer_failed(steer, name, lane, "steering_not_supported", told, accepted=False)
        elif not users:
            told = "Only messages of the user can steer"
            self._tell_steer_failed(steer, name, lane, "invalid_input", told, accepted=False)
        elif len(served.steers) >= MAX_STEERS:
            told = f"{MAX_STEERS} steers wait for this response"
            self._tell_steer_failed(steer, name, lane, "too_many_pending_steers", told, accepted=False)
        else:
            served.steers.append(steer)
            accepted = {"id": steer.id, "previous_response_id": name}
            self._tell_steer("accepted", {"steer": accepted}, lane)
            if len(served.steers) == 1:
                spawn(served.running.cancel(EndReason.STEERED), self._others)

    def _tell_pending(self, served: _Served, owed: Sequence[KeptCall]) -> None:
        """Send `response.steer.pending` for the waiting input: the response ended with the tool calls ``owed``,
        and the client must send their outputs before the successor can begin."""
        required = [
            {"type": "function_call_output", "call_id": call.call_id, "name": call.name} for call in owed
        ]
        for steer in served.steers:
            told = {
                "steer": {"id": steer.id, "previous_response_id": served.running.response.id},
                "reason": "waiting_for_required_input",
                "required_input": required,
            }
            self._tell_steer("pending", told, served.request.stream_id)

    def _fail_steers(self, steers: Sequence[_Steer], name: str, lane: str | None, error: Exception) -> None:
        told = http_answer(error)[0]["error"]
        message = told["message"] if isinstance(told, dict) else str(error)
        for steer in steers:
            self._tell_steer_failed(steer, name, lane, "successor_creation_failed", message, accepted=True)

    def _tell_steer_failed(
        self, steer: _Steer, name: str, lane: str | None, code: str, message: str, *, accepted: bool
    ) -> None:
        told = {"previous_response_id": name, "input": steer.given}
        failed = {"type": "invalid_request_error", "code": code, "message": message}
        self._tell_steer(
            "failed", {"steer": {**told, **({"id": steer.id} if accepted else {})}, "error": failed}, lane
        )

    def _tell_steer(self, kind: str, told: dict[str, Any], lane: str | None) -> None:
        event = {"type": f"response.steer.{kind}", "sequence_number": self._steer_events, **told}
        self._steer_events += 1
        self._post([_ENCODER.encode(event)], lane)

    # --- out ------------------------------------------------------------------------------------------------

    def _tell_error(self, error: Exception, lane: str | None) -> None:
        log_refusal("", error)
        body, status, _ = http_answer(error)
        self._post([_ENCODER.encode({"type": "error", "status": status, **body})], lane)

    def _post(self, frames: Sequence[bytes], lane: str | None) -> None:
        """Send these encoded events. The name of the queue ``lane`` is put into each as ``stream_id``, if it
        has a name."""
        if lane is not None:
            name = b'{"stream_id":' + _ENCODER.encode(lane) + b","
            frames = [name + frame[1:] for frame in frames]
        self.outbox.post(frames)
