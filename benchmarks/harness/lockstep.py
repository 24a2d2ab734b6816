"""Asks a server for its next step when every client has read the last one, so that each token is read, handled
and sent alone, as fast as the machine can: a busy machine cannot join two of them in one write.

The server is one with a scripted engine, or the bare sender (`scripted_engine`, `bare`).
"""

from __future__ import annotations

import socket
from pathlib import Path


class Lockstep:
    """Asks for steps at the socket ``pace``. ``clients``: how many connections get a frame in each step.
    ``steps``: how many steps are asked for in all; the first one at once."""

    def __init__(self, pace: Path, clients: int, steps: int) -> None:
        self._clients = clients
        self._steps = steps
        self._read = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(str(pace))
        self._ask()

    def took(self) -> None:
        """A client has read its frame of this step. When all have, the next step is asked for."""
        self._read += 1
        if self._read == self._clients:
            self._read = 0
            self._ask()

    def _ask(self) -> None:
        if self._steps:
            self._steps -= 1
            self._socket.send(str(self._clients).encode())
        else:
            self._socket.close()
