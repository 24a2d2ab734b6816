"""All settings of the gateway, in one frozen object. It carries the journal's settings, too.

The engine's are in ``runtime.settings``, a session's in ``sessions.settings``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..sessions.settings import JournalSettings
from .errors import NameUnusable, NetworkInvalid, TracingUnavailable
from .net.rates import Rate

if TYPE_CHECKING:  # importing it takes a second, and `--help` does not need it
    from ..sessions.tools.formats import CallForm, ReasoningForm

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8040
CYCLE_TOKENS = 512
MetricsCompat: TypeAlias = Literal["none", "vllm"]
ALLOWED_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@]+")
ENDPOINT = re.compile(r"https?://[^\s/?#@]+[^\s]*")
ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
MODEL_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,256}")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client, socket or session may take. Sizes in bytes, times in seconds. `quotas` says what happens
    beyond each limit."""

    frame_bytes: int = 1 << 20
    """The longest frame of a WebSocket. A longer one is refused; one of more than ``socket_bytes`` closes the
    socket with 1009."""
    socket_bytes: int = 2 << 20
    body_bytes: int = 32 << 20
    """The longest body of an HTTP request: a client that sends the whole conversation may have a long one."""
    body_seconds: float = 30.0
    """The time in which the body of an HTTP request must end, and a message on a WebSocket."""
    outbox_events: int = 256
    outbox_bytes: int = 1 << 20
    """If so many events (``outbox_events``) or bytes are unsent on a socket, its replies wait. A slow reader
    slows down only its own sessions."""
    stall_seconds: float = 20.0
    """A client that takes no frame for this long is dropped, with the reason ``slow_reader``."""
    close_seconds: float = 5.0
    """The time that a client has to take the server's close frame, and to close a connection that the server
    has closed."""
    parallel_responses: int = 8
    """Responses of one session that may run at once, out-of-band ones included."""
    moves: int = 8
    """Requests about the KV of one session (lease, stage, settle, block map) that may run at once."""
    send_buffer_bytes: int = 256 << 10
    """The kernel's buffer for one socket (by default some 4 MB for a stalled client)."""
    header_seconds: float = 10.0
    """A connection is closed if it has not sent all of a request's head in this time, with a TLS handshake
    before it, or if it still sends the body this long after the answer."""
    header_bytes: int = 32 << 10
    """The longest head of a request, cookies included. A longer one is refused with 431."""
    idle_seconds: float = 5.0
    """A connection is closed if so long after an answer no other request has come on it."""
    ping_seconds: float = 20.0
    quiet_seconds: float = 10.0
    """The time between two keepalive pings, and the time that the client has to answer each."""
    resume_seconds: float = 120.0
    """How long a session without a connection stays in memory for a client that can come back. Its replies
    continue."""
    unopened_forks: int = 1024
    """Forks of one tenant that no client has opened yet and that stay in memory. Beyond that, the oldest ones
    stay only in the journal."""
    young_seconds: float = 10.0
    """How long a fork that no client has opened stays in memory in any case. If all such forks are younger,
    further forks are refused."""
    log_bytes: int = 4 << 20
    """Bytes of sent events that are kept for each session, to be sent again after a connection was lost."""
    client_events: int = 1024
    """Ids of client events that are kept for each session, to recognise an event that is sent twice."""
    frames: Rate = Rate(2000.0, 8000)
    """The rate of one socket's data frames, fragments included. Frames that come faster are read later."""
    control_frames: Rate = Rate(20.0, 200)
    """The rate of one socket's pings and pongs. A faster socket is closed with 1008."""
    fragments: int = 4096
    """Frames in which one message may come: enough for 2 MiB in frames of 512 bytes. More close the socket with
    1008."""
    invalid_events: Rate = Rate(5.0, 100)
    """The rate of one socket's frames that are no valid events. Each is answered with an error; if they come
    faster, the socket is closed with 1008."""


@dataclass(frozen=True, slots=True)
class Network:
    """How the server is reached from elsewhere: host names, proxies, TLS. Raises ``NetworkInvalid`` if a value
    is not valid."""

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
    """For TLS: the server's certificate, and those that link it to its authority, in PEM."""
    private_key: Path | None = None
    """The certificate's private key, if it is not in the same file."""
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
    """All settings of a server's gateway. ``port``: 0 takes a free one. ``api_key``: the only valid key; None,
    without ``keys``: no key is needed. ``journal``: settings of the journal of sessions.

    ``store``: the folder of the journal, in which sessions outlive the server; None keeps them in memory.
    Raises ``NameUnusable`` if one of ``served_names`` is not valid, ``TracingUnavailable`` if
    ``traces_endpoint`` is no URL.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_key: str | None = None
    keys: Path | None = None
    """A file with keys, their tenants and the tenants' limits (`tenants`), in place of ``api_key``."""
    operator_key: str | None = field(default=None, repr=False)
    """The key that opens the totals in ``/metrics``, which tenants do not see."""
    network: Network = Network()
    limits: ClientLimits = ClientLimits()
    store: Path | None = None
    journal: JournalSettings = JournalSettings()
    calls: CallForm | None = None
    """How the model writes tool calls; None: derived from its templates."""
    reasoning: ReasoningForm | None = None
    """How the model writes its reasoning; None: derived from its templates."""
    tool_fallback: bool = False
    """For a model with a template that does not show tools: write them into the instructions."""
    page: bool = True
    """Whether browsers get the playground at ``/`` and the documents at ``/docs``."""
    served_names: tuple[str, ...] = ()
    """The names under which the model is served, in place of its folder's name. A client that asks for none
    gets the first. Raises ``NameUnusable``."""
    default_max_tokens: int | None = 4096
    """The most tokens of a reply that sets no limit of its own; None: as many as the context holds."""
    cycle_tokens: int = CYCLE_TOKENS
    """A reply that repeats the same tokens again and again ends after this many of them
    (`sessions.turn.cycles`); 0: never for this reason."""
    recovery_seconds: float = 60.0
    """If the engine dies, a running reply waits this long for another engine; then it fails."""
    loading_seconds: float = 60.0
    """While the engine loads, an HTTP request that needs it waits this long for it; then it is refused."""
    handshake_seconds: float = 5.0
    """The same for the handshake of a WebSocket; less, as many clients give up after ten seconds, and all try
    again after a refusal."""
    traces_endpoint: str | None = None
    """Where spans of turns go, by OTLP over HTTP; None: none are made. Raises ``TracingUnavailable``."""
    max_queue_seconds: float | None = 300.0
    """A turn that would wait longer for the engine is refused, with the time after which to try again; None:
    every turn waits."""
    metrics_compat: MetricsCompat = "none"
    """Whether ``/metrics`` also has its numbers under the names of another server: ``vllm``, or ``none``."""
    drain_seconds: float = 10.0
    """At SIGTERM the server waits this long for running replies to end; then sockets close with 1012."""

    def __post_init__(self) -> None:
        if self.traces_endpoint is not None and not ENDPOINT.fullmatch(self.traces_endpoint):
            raise TracingUnavailable(
                f"--otlp-traces-endpoint {self.traces_endpoint!r} is no URL such as http://localhost:4318"
            )
        for name in self.served_names:
            if not MODEL_NAME.fullmatch(name):
                raise NameUnusable(
                    f"--served-model-name {name[:300]!r} is not 1 to 256 characters without blanks"
                )
