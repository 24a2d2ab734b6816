"""All settings of the gateway, in one frozen object. It carries the journal's settings, too.

The engine's are in ``runtime.settings``, a session's in ``sessions.settings``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING

from ..sessions.settings import JournalSettings
from .errors import NetworkInvalid
from .net.rates import Rate

if TYPE_CHECKING:  # importing it takes a second, and `--help` does not need it
    from ..sessions.tools.formats import CallForm, ReasoningForm

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8040
ALLOWED_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@]+")
ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client may take. Sizes in bytes, times in seconds. `quotas` tells what happens beyond each."""

    frame_bytes: int = 1 << 20
    """A longer frame is refused; one of more than ``socket_bytes`` closes the socket with 1009."""
    socket_bytes: int = 2 << 20
    outbox_events: int = 256
    outbox_bytes: int = 1 << 20
    """With so much unsent a session's reply waits: a slow reader slows down only its own session."""
    stall_seconds: float = 20.0
    """A client that takes no frame for so long is dropped, with the reason ``slow_reader``."""
    close_seconds: float = 5.0
    """The time that a client has to take the server's close frame."""
    parallel_responses: int = 8
    """Responses that may run at once on one socket, out-of-band ones included."""
    moves: int = 8
    """Leases, stages and settles of one session that may run at once."""
    send_buffer_bytes: int = 256 << 10
    """The kernel's buffer for one socket (by default some 4 MB for a stalled client)."""
    header_seconds: float = 10.0
    """A connection that has not sent a whole request head by then is closed; so is one that sends a request's
    body for so long after the answer."""
    ping_seconds: float = 20.0
    """Between keepalive pings, and for their answers."""
    resume_seconds: float = 120.0
    """The time that a session stays in memory for a client that can come back; its replies go on."""
    unopened_forks: int = 1024
    """Unopened forks of one tenant in memory. Beyond that the oldest wait in the journal."""
    young_seconds: float = 10.0
    """The time that a fork stays in memory in any case. Where all are younger, further ones are refused."""
    log_bytes: int = 4 << 20
    """Bytes of events that are kept per session, to be sent again."""
    client_events: int = 1024
    """Ids of client events that are kept per session, to recognise one that is sent twice."""
    frames: Rate = Rate(2000.0, 8000)
    """Data frames of one socket, fragments included. Frames that come faster are read later."""
    control_frames: Rate = Rate(20.0, 200)
    """Pings and pongs of one socket. More close it with 1008. Streamed voice input needs one in 20 s."""
    fragments: int = 4096
    """Frames that one message may come in: 2 MiB in pieces of 512 bytes. More close the socket with 1008."""
    invalid_events: Rate = Rate(5.0, 100)
    """Frames of one socket that are no events. Each is answered with an error; more close it with 1008."""


@dataclass(frozen=True, slots=True)
class Network:
    """How the server is reached from elsewhere: names, proxies, TLS. Raises ``NetworkInvalid``."""

    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are answered besides addresses and localhost: ``chat.example.com``,
    ``*.example.com``, or ``*`` for any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of other servers' pages that may connect without a key: ``https://app.example.com``, or ``*``."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies: their ``X-Forwarded-For``, ``-Proto`` and ``-Host`` count."""
    root_path: str = ""
    """The prefix below which a proxy serves this server: ``/holdfast``."""
    certificate: Path | None = None
    """TLS: the server's certificate and those that link it to its authority, in PEM."""
    private_key: Path | None = None
    """Its key, where that is not in the same file."""
    private_key_password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            if not ALLOWED_HOST.fullmatch(host):
                raise NetworkInvalid(f"--allowed-host {host!r} is not a host name, *.NAME or *")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise NetworkInvalid(
                    f"--allow-origin {origin!r} is not an origin such as https://app.example.com"
                )
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy, strict=False)
            except ValueError as error:
                raise NetworkInvalid(f"--trusted-proxies: {error}") from None
        if self.root_path and not ROOT_PATH.fullmatch(self.root_path):
            raise NetworkInvalid(f"--root-path {self.root_path!r} is not a path such as /holdfast")
        if self.certificate is None and self.private_key is not None:
            raise NetworkInvalid("--ssl-keyfile needs --ssl-certfile")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where the gateway listens, which keys are valid, and how it ends. ``port`` 0 takes a free one.

    ``store``: the folder of the journal, in which sessions outlive the server; None keeps them in memory.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    keys: Path | None = None
    """A file of keys, their tenants and what these may take (`tenants`), in place of ``api_key``."""
    operator_key: str | None = field(default=None, repr=False)
    """Opens the totals of ``/metrics``, which tenants do not see."""
    network: Network = Network()
    limits: ClientLimits = ClientLimits()
    store: Path | None = None
    journal: JournalSettings = JournalSettings()
    calls: CallForm | None = None
    """How the model writes tool calls; None: derived from its templates."""
    reasoning: ReasoningForm | None = None
    """How it writes its reasoning; None: derived, too."""
    tool_fallback: bool = False
    """If the model's template does not show tools, write them into the instructions."""
    recovery_seconds: float = 60.0
    """The time that a reply waits for another engine when its own has died; then it fails."""
    drain_seconds: float = 10.0
    """At SIGTERM running replies may end within this time; then sockets close with 1012."""
