"""Makes the encoded `response.output_text.delta` events of one message fast: all but the text and the event's
id is encoded once."""

from __future__ import annotations

import msgspec

from ...sdk.frames import codec
from ...sdk.frames.server import TextDelta

_ENCODER = msgspec.json.Encoder()
_TAIL = b'"","event_id":""}'


class DeltaFrames:
    """Encodes the `response.output_text.delta` events of one message. ``delta``: such an event with an empty
    text and event id and no log probabilities."""

    __slots__ = ("_head",)

    def __init__(self, delta: TextDelta) -> None:
        frame = codec.encode(delta)
        assert frame.endswith(b'"delta":' + _TAIL), "text and id are the last fields"
        self._head = frame.removesuffix(_TAIL)

    def frame(self, event_id: str, text: str) -> bytes:
        """The encoded event with this id and text: the same bytes as `codec.encode` makes. JSON must need no
        escape in ``event_id``."""
        return b'%b%b,"event_id":"%b"}' % (self._head, _ENCODER.encode(text), event_id.encode())
