"""Of which tenant a request is, and by which way it came: what log lines and metrics say of it. All of it is in
the server's own words, never the client's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OTHER = "other"
"""Stands for each tenant that metrics do not name, and for each route that is not served."""
MOST_NAMED = 64
"""The most tenants that metrics name."""
PROTOCOLS = {
    "/v1/realtime": "realtime",
    "/v1/responses": "responses",
    "/v1/conversations": "responses",
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
}
"""The protocol of each of these routes and of those below it."""
ATTRIBUTION = "holdfast.attribution"
"""The key of a request's ASGI scope under which the guard puts its `Attribution`."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """``tenant``: its name; empty if it is not known, or without keys. ``route``: as the server declares it,
    such as ``/v1/responses/{response_id}``; `OTHER` for a path that is not served; empty without a request.
    ``protocol``: one of `PROTOCOLS`, or empty."""

    tenant: str = ""
    route: str = ""
    protocol: str = ""

    @classmethod
    def of(cls, tenant: str, route: str) -> Attribution:
        """That of a request on a route."""
        above = (route[:at] for at in range(len(route), 0, -1) if at == len(route) or route[at] == "/")
        return cls(tenant, route, next((PROTOCOLS[one] for one in above if one in PROTOCOLS), ""))

    def facts(self) -> dict[str, str | None]:
        """What a log line has of it, by name; None for what is not known."""
        return {
            "tenant": self.tenant or None,
            "route": self.route or None,
            "protocol": self.protocol or None,
        }


class TenantLabels:
    """The values of the label ``tenant`` in metrics: the names of the first `MOST_NAMED` tenants of the keys
    file, in its order, and `OTHER` for the rest. A name stays one as long as the server runs, so that a file
    that changes does not add series without end. ``tenants``: the names; that of a server without keys is
    empty."""

    def __init__(self, tenants: Iterable[str] = ()) -> None:
        self._named = {""}
        self.add(tenants)

    def add(self, tenants: Iterable[str]) -> None:
        """Name these tenants, too, as long as there is room."""
        for tenant in tenants:
            if len(self._named) <= MOST_NAMED:
                self._named.add(tenant)

    def of(self, tenant: str) -> str:
        """The label of a tenant."""
        return tenant if tenant in self._named else OTHER
