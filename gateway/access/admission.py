"""Decides about a request when its head has come: whether its turn gets a place in the queue, or is refused.

A refusal must cost far less than an answer, because it is given when there is too much to do. So `Admission`
reads the request's bytes itself: no connection object, parser, route or task is made for what it refuses.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers

from ...kvstore.log_lines import logging_with
from ..errors import GatewayError
from ..live.turns import Turns
from ..net.heads import whole_answer
from ..net.listener import Refused
from .attribution import Attribution
from .auth import MESSAGES, Keys, TurnCaller, key_of, refusal, salt_of
from .rate_limits import RateLimiter
from .turn_queue import Place

TURN_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Routes that begin a turn when they are posted to: their answers tell what is left to the client's key."""
POST, VERSION = b"POST ", b" HTTP/1.1"
LEFT_ALONE = frozenset({b"transfer-encoding", b"upgrade", b"origin"})
"""Requests with one of these headers are decided behind the parser: their body has another form, or a web page
must be able to read the answer."""


class Admission:
    """Decides about the requests of `TURN_ROUTES`. ``turns``: of the server. ``keys`` returns the keys that are
    valid now, None if any client is admitted. ``root_path``: the prefix of a proxy."""

    def __init__(self, turns: Turns, keys: Callable[[], Keys | None], root_path: str = "") -> None:
        self._turns = turns
        self._keys = keys
        self._root_path = root_path

    def decide(self, data: bytes, peer: tuple[str, int] | None, *, close: bool) -> Place | Refused | None:
        """Decide about what a client has sent on a connection that has no other request. ``peer``: its address.
        ``close``: the connection ends with a refusal, even if the client would keep it.

        Returns a place in the queue, or the answer that refuses. Returns None, and does nothing, for anything
        but one whole request that would begin a turn of a valid key, and as long as the queue does not know how
        fast turns start: what waits for an engine that loads says nothing of it.
        """
        if not data.startswith(POST):
            return None
        head, end, body = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        path = first[len(POST) :].partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        route = path.removeprefix(self._root_path)
        if not end or not first.endswith(VERSION) or route not in TURN_ROUTES:
            return None
        if head.count(b"\n") != len(lines):  # the parser ends a line, and a head, by a line feed alone, too
            return None
        raw = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        named = dict(raw)
        if not LEFT_ALONE.isdisjoint(named) or named.get(b"content-length") != b"%d" % len(body):
            return None
        headers = Headers(raw=raw)
        caller = self._caller(headers, route)
        if caller is None:
            return None
        try:
            self._turns.foresee(caller)
        except GatewayError as error:
            close = close or headers.get("connection", "").lower() == "close"
            scope = {"path": path, "root_path": self._root_path, "headers": raw, "client": peer}
            limits = limit_headers(self._turns.rates, caller, caller.attribution.route)
            with logging_with(**caller.attribution.facts()):
                answer = refusal(error, scope)
            self._turns.metrics.request(caller.attribution, str(answer.status_code))
            return Refused(whole_answer(answer, limits, close=close), close)
        return Place(self._turns.queue, caller.salt) if self._turns.queue.seconds_per_start else None

    def _caller(self, headers: Headers, route: str) -> TurnCaller | None:
        """The client of a request on a route; None if its key is not valid."""
        keys = self._keys()
        if keys is None:
            return TurnCaller(attribution=Attribution.of("", route))
        key = key_of(headers)
        tenant = keys.tenant(key)
        if tenant is None:
            return None
        attribution = Attribution.of(tenant, route)
        return TurnCaller(keys.digests_of(key)[0], salt_of(tenant), attribution=attribution)


def limit_headers(rates: RateLimiter, caller: TurnCaller, path: str) -> dict[str, str]:
    """What is left to the client's key, as headers of an answer on ``path``; empty if it has no limits."""
    left = rates.left(caller.key, caller.salt)
    if path == MESSAGES:
        return {**left.headers(), **left.messages_headers(time.time())}
    return left.headers()
