"""The engine's end of the link: verbs in, reports out, and the thread that reads, writes and beats.

The device thread calls ``take`` and ``send``. ``send`` writes at once what the socket takes and leaves the
rest to the link thread, so a slow gateway does not hold up a step. Once ``OUTBOX_BYTES`` wait, ``send`` waits
too (a step is worthless if nobody hears of it), for ``STALL_SECONDS`` at most: a gateway that reads nothing
for so long is gone, the link closes and the engine ends. Knows nothing of what verbs mean.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from ..errors import FrameInvalid, LinkClosed, RuntimeFault
from .codec import frame, verb_reader
from .heartbeat import Liveness
from .messages import AnyReport, AnyVerb, Fatal, Phase

OUTBOX_BYTES = 8 * 1024 * 1024  # beyond the kernel's own buffer
STALL_SECONDS = 30.0
READ_BYTES = 256 * 1024


class EngineEnd:
    """Owns ``sock``. ``orphaned`` is called on the link thread at the gateway's end; it must not wait."""

    def __init__(
        self,
        sock: socket.socket,
        liveness: Liveness,
        orphaned: Callable[[], None] = lambda: None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._liveness = liveness
        self._orphaned = orphaned
        self._stall_seconds = stall_seconds
        self._reader = verb_reader()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._changed = threading.Condition()  # guards all below
        self._inbox: deque[AnyVerb] = deque()
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._closed: LinkClosed | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-link", daemon=True)

    def start(self) -> None:
        """Begin to read and to beat."""
        self._thread.start()

    def close(self) -> None:
        """End the link thread and close the socket; what that has not taken by now is lost."""
        if self._closing:
            return
        self._closing = True
        self._hang_up("the engine closed the link")
        self._wake()
        self._thread.join()
        for sock in (self._sock, self._woken, self._waker):
            sock.close()

    def statistics(self) -> dict[str, float]:
        """Verbs that wait for the device thread, bytes that wait for the gateway."""
        with self._changed:
            return {"link_inbox_verbs": len(self._inbox), "link_outbox_bytes": self._outbox_bytes}

    def check(self) -> None:
        """Raise ``LinkClosed`` if nobody is there any more."""
        if self._closed:
            raise LinkClosed(self._closed.message)

    def take(self, wait: bool, seconds: float | None = None) -> list[AnyVerb]:
        """All verbs that have come, in order; with ``wait`` one at least. ``LinkClosed`` at the end.

        ``seconds``: wait no longer; then there may be none.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._inbox or self._closed, seconds)
            self.check()
            verbs = list(self._inbox)
            self._inbox.clear()
            return verbs

    def send(self, report: AnyReport) -> None:
        """Write ``report``, or leave it to the link thread. Raises ``LinkClosed`` where nobody is there."""
        data = memoryview(frame(report))
        with self._changed:
            self.check()
            if not self._outbox:
                data = data[self._write(data) :]
            if data:
                self._outbox.append(data)
                self._outbox_bytes += len(data)
                self._wake()
            if self._outbox_bytes > OUTBOX_BYTES:
                self._wait_for_room()

    def part(self, fault: RuntimeFault) -> None:
        """Say why this end goes, as the last word; a gateway that is not reading goes without."""
        with self._changed:
            if self._closed is None and not self._outbox:
                self.send(Fatal(fault.code, fault.message))
            self._end(fault.message)

    def _wait_for_room(self) -> None:
        self._liveness.enter(Phase.IDLE, detail="waiting for the gateway to read")
        if not self._changed.wait_for(self._has_room, self._stall_seconds):
            self._end(f"the gateway read nothing for {self._stall_seconds} s")
        self.check()

    def _has_room(self) -> bool:
        return self._closed is not None or self._outbox_bytes <= OUTBOX_BYTES

    # --- the link thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._sock, selectors.EVENT_READ)
                while not self._closed:
                    self._turn(selector)
        except FrameInvalid as fault:
            self.part(fault)
        except OSError as error:
            self._hang_up(f"the link broke: {error}")
        if not self._closing:
            self._orphaned()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        writing = selectors.EVENT_WRITE if self._outbox else 0
        selector.modify(self._sock, selectors.EVENT_READ | writing)
        for key, mask in selector.select(self._liveness.due()):
            if key.fileobj is self._woken:
                self._woken.recv(READ_BYTES)
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ:
                self._receive()
        self._beat()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._hang_up("the gateway closed the link")
            return
        for verb in self._reader.feed(data):
            with self._changed:
                self._inbox.append(verb)
                self._changed.notify_all()

    def _flush(self) -> None:
        with self._changed:
            while self._outbox:
                data = self._outbox[0]
                written = self._write(data)
                self._outbox_bytes -= written
                if written < len(data):
                    self._outbox[0] = data[written:]
                    return
                self._outbox.popleft()
                self._changed.notify_all()

    def _write(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._end(f"the link broke: {error}")
            return 0

    def _beat(self) -> None:
        """A heartbeat never waits behind rows: it would be old when it came, and the rows show life."""
        if self._outbox or self._closed:
            return
        heartbeat = self._liveness.beat()
        if heartbeat is not None:
            with contextlib.suppress(LinkClosed):
                self.send(heartbeat)

    def _hang_up(self, reason: str) -> None:
        with self._changed:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self._closed is None:
            self._closed = LinkClosed(reason)
        self._changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")
