"""What the journal keeps of a session for the Realtime protocol beside its history."""

from __future__ import annotations

import msgspec

from ...sdk.frames.session import SessionResource
from ...sessions.journal.records import SessionRecord


class RealtimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a new session for this protocol: ``session``, its first configuration, and
    ``conversation``, the id of its conversation."""

    session: SessionResource
    conversation: str


def resource_of(record: SessionRecord, latest: bytes | None) -> SessionResource | None:
    """The configuration of a session: the ``latest`` that the journal has, or else that of its ``record``. None
    for a session of another protocol."""
    try:
        if latest:
            return msgspec.msgpack.decode(latest, type=SessionResource)
        return msgspec.msgpack.decode(record.config, type=RealtimeConfig).session
    except msgspec.MsgspecError:
        return None
