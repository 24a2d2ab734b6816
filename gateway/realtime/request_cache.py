"""What a session's responses ask for. Most say nothing of their own: what is made of that is kept.

Knows nothing of when a response may come.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET

from ...sdk.frames.items import InputItem
from ...sdk.frames.response import ResponseParams
from ...sdk.frames.session import SessionResource
from ...sessions.items import Item
from ...sessions.turn.request import TurnRequest
from .translate import request_of

_NOTHING = ResponseParams()


class Requests:
    """Those of one session."""

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
        self._kept: tuple[SessionResource, TurnRequest] | None = None

    def of(
        self,
        params: ResponseParams,
        session: SessionResource,
        resolve: Callable[[InputItem], Item],
        seed: int,
    ) -> TurnRequest:
        """As `request_of`, which says what it raises."""
        own = msgspec.structs.replace(params, metadata=UNSET, events=UNSET)
        if own != _NOTHING:
            return request_of(params, session, resolve, self._vocab_size, seed)
        if self._kept is None or self._kept[0] is not session:
            self._kept = (session, request_of(_NOTHING, session, resolve, self._vocab_size, seed))
        request = self._kept[1]
        drawn = seed if session.seed is None else session.seed
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, seed=drawn)
        )
