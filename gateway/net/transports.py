"""What asyncio leaves behind of a connection that has ended."""

from __future__ import annotations

import asyncio


def let_go(transport: asyncio.BaseTransport) -> None:
    """Called when the connection is gone. Breaks the cycle of references that the standard library's transport
    of a socket is left with: an attribute of its own is one of its own methods. So it is freed at once, and not
    by a garbage collection. Does nothing to other transports."""
    vars(transport).pop("_read_ready_cb", None)
