"""The engine's end of the link: the socket and its threads, and the loop that applies verbs and steps.

`serve` runs on the device thread: it takes the verbs that have arrived, applies them, makes a step and sends
its rows. ``EngineEnd.send`` writes at once what the socket takes, so that a slow gateway does not hold up a
step; one thread of the link writes the rest, and heartbeats, and another one reads. Once ``OUTBOX_BYTES`` wait,
``send`` blocks, for ``STALL_SECONDS`` at most: then the gateway counts as gone, the link closes and the engine
ends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

import msgspec

from .. import verbs
from ..errors import EngineDied, FrameInvalid, LinkClosed, RuntimeFault
from ..settings import EngineSettings
from . import messages
from .child import MOST_DESCRIPTORS
from .heartbeat import LOAD_STALL, STEP_FLOOR, Liveness

OUTBOX_BYTES = 8 * 1024 * 1024  # beyond the kernel's own buffer
STALL_SECONDS = 30.0
READ_BYTES = 256 * 1024


class EngineEnd:
    """The engine's end of the link: reads verbs from ``sock`` and writes reports to it, and the heartbeats of
    ``liveness``. ``on_gateway_gone``: called on the reading thread when the gateway closes; must not block."""

    def __init__(
        self, sock: socket.socket, liveness: Liveness, on_gateway_gone: Callable[[], None] = lambda: None
    ) -> None:
        self._sock = sock
        self._liveness = liveness
        self._on_gateway_gone = on_gateway_gone
        self._inbox: SimpleQueue[tuple[verbs.AnyVerb, ...]] = SimpleQueue()  # of one verb, or of none to wake
        self._changed = threading.Condition()  # guards all below
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._closed: str | None = None  # why the link has ended
        self._closing = False
        self._threads = [
            threading.Thread(target=run, name="holdfast-link", daemon=True)
            for run in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads and close the socket; reports that were not sent yet are lost."""
        self._closing = True
        self._end("the engine closed the link")
        for thread in self._threads:
            thread.join()
        self._sock.close()

    def statistics(self) -> dict[str, float]:
        """How many verbs wait to be taken, and how many bytes wait to be sent."""
        return {"link_inbox_verbs": self._inbox.qsize(), "link_outbox_bytes": self._outbox_bytes}

    def check(self) -> None:
        """Raise ``LinkClosed`` if the link has ended."""
        if self._closed:
            raise LinkClosed(self._closed)

    def take(self, wait: bool, seconds: float | None = None) -> list[verbs.AnyVerb]:
        """Take all verbs that have arrived, in order. With ``wait``, block until there is one, but for
        ``seconds`` at most (None: without end).

        Raises ``LinkClosed`` when the link has ended.
        """
        taken: list[verbs.AnyVerb] = []
        self.check()
        with contextlib.suppress(Empty):
            taken += self._inbox.get(wait, seconds)
            while True:
                taken += self._inbox.get_nowait()
        self.check()
        return taken

    def send(self, report: messages.AnyReport) -> None:
        """Send ``report``: write what the socket takes now, and leave the rest to the writing thread. Blocks
        while too much waits to be sent. Raises ``LinkClosed`` when the link has ended."""
        data = memoryview(messages.frame(report))
        with self._changed:
            self.check()
            if not self._outbox:
                with contextlib.suppress(OSError):  # the writing thread tries again, and says what is wrong
                    data = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self._outbox.append(data)
                self._outbox_bytes += len(data)
                self._changed.notify_all()
            if self._outbox_bytes > OUTBOX_BYTES:
                self._wait_for_room()

    def send_fatal(self, fault: RuntimeFault) -> None:
        """Send why this end closes, unless earlier reports are still unsent, and end the link."""
        with self._changed:
            if self._closed is None and not self._outbox:
                self.send(messages.Fatal(fault.code, fault.message))
            self._end(fault.message)

    def _wait_for_room(self) -> None:
        self._liveness.enter(messages.Phase.IDLE, detail="waiting for the gateway to read")
        if not self._changed.wait_for(
            lambda: self._closed or self._outbox_bytes <= OUTBOX_BYTES, STALL_SECONDS
        ):
            self._end(f"the gateway read nothing for {STALL_SECONDS} s")
        self.check()

    def _end(self, reason: str) -> None:
        """Note that the link has ended, and wake all that wait for it. Only the first ``reason`` counts."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()
        self._inbox.put(())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # --- the link's threads ---------------------------------------------------------------------------------

    def _read(self) -> None:
        reader = messages.verb_reader()
        try:
            while data := self._sock.recv(READ_BYTES):
                for verb in reader.feed(data):
                    self._inbox.put((verb,))
            self._end("the gateway closed the link")
        except FrameInvalid as fault:
            self.send_fatal(fault)
        except OSError as error:
            self._end(f"the link broke: {error}")
        if not self._closing:
            self._on_gateway_gone()

    def _write(self) -> None:
        """Write what waits to be sent, and a heartbeat if one is due. None waits behind rows: the rows show
        that the engine is alive."""
        try:
            while not self._closed:
                with self._changed:
                    self._changed.wait_for(lambda: self._outbox or self._closed, self._liveness.due())
                    if not self._outbox and not self._closed and (beat := self._liveness.beat()) is not None:
                        self.send(beat)
                    data = self._outbox[0] if self._outbox else None
                if data is not None:
                    self._sock.sendall(data)
                    with self._changed:
                        self._outbox.popleft()
                        self._outbox_bytes -= len(data)
                        self._changed.notify_all()
        except OSError as error:
            self._end(f"the link broke: {error}")


# --- the device thread's loop -----------------------------------------------------------------------------

LoadProgress: TypeAlias = Callable[[float, str], None]
"""Called with the fraction of loading that is done, 0 to 1, and what is being done."""


class ServedEngine(Protocol):
    """What the link needs of the engine that it serves. `serve` calls both methods on the device thread."""

    def apply(self, verb: verbs.AnyVerb) -> verbs.VerbReply | verbs.Refusal | None:
        """Apply a verb: returns its reply, or why it is refused; None: the reply comes later, by
        ``LoadedEngine.answers``."""
        ...

    def step(self) -> verbs.Step | None:
        """Make one step; returns its rows. None if there is nothing to do until the next verb."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready to serve. ``hello``: what it serves, for the gateway.

    ``next_step_in``: gives the seconds until it must step though no verb arrives; None for never. ``leave``:
    called when the gateway has closed. ``answers``: gives the late replies that became ready since the last
    call.
    """

    engine: ServedEngine
    hello: messages.Hello
    next_step_in: Callable[[], float | None] = lambda: None
    leave: Callable[[], None] = lambda: None
    answers: Callable[[], list[verbs.VerbReply | verbs.Refusal]] = list


Load: TypeAlias = Callable[[LoadProgress, Liveness], LoadedEngine]
"""Makes an engine. It reports the progress of loading to the first argument, and to the second how long a
step may take."""


def receive_settings(sock: socket.socket) -> tuple[EngineSettings, list[int]]:
    """Wait for what an engine's process is sent first: its settings and, before them, the descriptors that
    `child.DESCRIPTORS` lists. Raises ``LinkClosed`` if the gateway has gone, ``FrameInvalid``."""
    try:
        _, descriptors, _, _ = socket.recv_fds(sock, 1, MOST_DESCRIPTORS)
    except ConnectionError:
        raise LinkClosed("the link ended before the settings came") from None
    return messages.receive_one(sock, EngineSettings), descriptors


def serve(
    sock: socket.socket,
    load: Load,
    on_gateway_gone: Callable[[], None] = lambda: None,
    liveness: Liveness | None = None,
) -> None:
    """Load an engine and serve it on ``sock`` until the gateway closes; then close ``sock``.

    Verbs take effect between two steps, in order. Each is answered before the rows of the next step, but those
    that wait (``ServedEngine.apply``). When the gateway closes, ``on_gateway_gone`` is called on a thread of
    the link, and this returns after the step in flight. Raises what ``load`` or the engine raised, after
    sending a ``Fatal`` that names it.
    """
    liveness = liveness or Liveness()
    end = EngineEnd(sock, liveness, on_gateway_gone)

    def progress(fraction: float, detail: str) -> None:
        end.check()  # stop loading if the gateway is gone
        liveness.enter(messages.Phase.LOADING, LOAD_STALL, detail, fraction)

    try:
        progress(0.0, "starting")
        loaded = load(progress, liveness)
        liveness.enter(messages.Phase.IDLE)
        _shorten(end, liveness)
        end.send(loaded.hello)
        with contextlib.suppress(LinkClosed):
            _drive(loaded, end, liveness)
        loaded.leave()
    except LinkClosed:
        return
    except Exception as error:
        end.send_fatal(
            error if isinstance(error, RuntimeFault) else EngineDied(f"{type(error).__name__}: {error}")
        )
        raise
    finally:
        end.close()


def _drive(loaded: LoadedEngine, end: EngineEnd, liveness: Liveness) -> None:
    engine, busy = loaded.engine, True
    while True:
        if not busy:
            liveness.enter(messages.Phase.IDLE)
        taken = end.take(wait=not busy, seconds=None if busy else loaded.next_step_in())
        # The runner sets a better limit once it has a plan.
        liveness.enter(messages.Phase.STEPPING, STEP_FLOOR)
        for verb in taken:
            answer = engine.apply(verb)
            if isinstance(verb, verbs.Statistics) and isinstance(answer, verbs.VerbReply):
                told = {**(answer.statistics or {}), **end.statistics()}
                answer = msgspec.structs.replace(answer, statistics=told)
            if answer is not None:
                end.send(answer)
        step = engine.step()
        busy = step is not None
        for reply in loaded.answers():
            end.send(reply)
        if step is not None:
            liveness.enter(messages.Phase.STEPPING, STEP_FLOOR)
            _shorten(end, liveness)
            if step.others or step.decoded:  # a step of prefill alone need not wake the gateway
                liveness.release([row.seq for row in step.others if row.finish is not None])
                end.send(step)


def _shorten(end: EngineEnd, liveness: Liveness) -> None:
    """Send a heartbeat with a short deadline after a long phase, as loading is: a process that stops now must
    not seem to be busy with that phase."""
    beat = liveness.shortened()
    if beat is not None:
        end.send(beat)
