"""All settings of the gateway, in one frozen object. It carries the journal's settings, too.

The engine's are in ``runtime.settings``, a session's in ``sessions.settings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from ..kvstore.options import Option, invalid
from ..sessions.settings import JournalSettings
from ..sessions.tools.forms import CallForm, ReasoningForm
from .errors import KeysUnusable, OptionInvalid
from .net.rates import Rate

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8040
CYCLE_TOKENS = 512
ALLOWED_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
ORIGIN = re.compile(r"\*|[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/?#@]+")
ENDPOINT = re.compile(r"https?://[^\s/?#@]+[^\s]*")
ROOT_PATH = re.compile(r"(/[\w.~-]+)*", re.ASCII)
MODEL_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,256}")


def _check(option: str, values: Iterable[str], form: re.Pattern[str], wrong: str) -> None:
    """Raise ``OptionInvalid``, which says what is ``wrong``, for a value of an option without this form."""
    for value in values:
        if not form.fullmatch(value):
            raise OptionInvalid(f"{option} {value[:300]!r} {wrong}")


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
    """How the server is reached from elsewhere: host names, proxies, TLS. Raises ``OptionInvalid`` if a value
    is not valid."""

    allowed_hosts: Annotated[tuple[str, ...], Option(name="allowed_host")] = ()
    """A name of the server in the Host header: NAME, *.NAME or *; may be repeated. Addresses and localhost are
    always answered."""
    allowed_origins: Annotated[tuple[str, ...], Option(name="allow_origin")] = ()
    """An origin of pages that may connect without a key: SCHEME://HOST[:PORT] or *; may be repeated."""
    trusted_proxies: Annotated[tuple[str, ...], Option()] = ()
    """Addresses or networks, separated by commas: their X-Forwarded-For, -Proto and -Host count."""
    root_path: Annotated[str, Option()] = ""
    """The prefix below which a proxy serves this server, such as /holdfast."""
    certificate: Annotated[Path | None, Option(name="ssl_certfile")] = None
    """TLS certificate chain in PEM."""
    private_key: Annotated[Path | None, Option(name="ssl_keyfile")] = None
    """Its private key, if not in the same file."""
    private_key_password: Annotated[str | None, Option(name="ssl_keyfile_password")] = field(
        default=None, repr=False
    )
    """Password of the private key."""

    def __post_init__(self) -> None:
        proxies = tuple(one.strip() for word in self.trusted_proxies for one in word.split(","))
        object.__setattr__(self, "trusted_proxies", proxies)
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))
        _check("--allowed-host", self.allowed_hosts, ALLOWED_HOST, "is not a host name, *.NAME or *")
        _check(
            "--allow-origin", self.allowed_origins, ORIGIN, "is not an origin such as https://app.example.com"
        )
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy, strict=False)
            except ValueError as error:
                raise OptionInvalid(f"--trusted-proxies: {error}") from None
        _check("--root-path", [self.root_path], ROOT_PATH, "is not a path such as /holdfast")
        if self.certificate is None and self.private_key is not None:
            raise OptionInvalid("--ssl-keyfile needs --ssl-certfile")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All settings of a server's gateway. ``store``: None keeps sessions in memory. ``cycle_tokens``: for how
    many tokens a reply may repeat a cycle (`sessions.turn.cycles`); 0: for any.

    Raises ``OptionInvalid`` for a value that is not allowed, ``KeysUnusable`` if both ``keys`` and ``api_key``
    are given.
    """

    host: Annotated[str, Option()] = DEFAULT_HOST
    """Address to listen on."""
    port: Annotated[int, Option(least=0, most=65535)] = DEFAULT_PORT
    """0 takes a free one."""
    api_key: Annotated[str | None, Option()] = field(default=None, repr=False)
    """Bearer key of the server; without it and --keys none is needed."""
    keys: Annotated[Path | None, Option()] = None
    """Keys and tenants: `KEY TENANT` on each line, or TOML with limits (gateway/README.md)."""
    operator_key: Annotated[str | None, Option()] = field(default=None, repr=False)
    """Bearer key that sees all of /metrics, and all sessions."""
    network: Network = Network()
    limits: ClientLimits = ClientLimits()
    store: Annotated[Path | None, Option()] = None
    """Folder of the journal, in which sessions outlive the server; by default one per model under the user's
    state folder."""
    journal: JournalSettings = JournalSettings()
    calls: Annotated[CallForm | None, Option(name="tool_call_parser", words={"auto": None})] = None
    """How the model writes tool calls. auto: as its templates tell."""
    reasoning: Annotated[ReasoningForm | None, Option(name="reasoning_parser", words={"auto": None})] = None
    """How the model writes its reasoning, which is sent separately. auto: as its templates tell."""
    tool_fallback: Annotated[bool, Option()] = False
    """If the model's template does not show tools, write them into the instructions."""
    served_names: Annotated[tuple[str, ...], Option(name="served_model_name")] = ()
    """A name that clients may ask for, instead of MODEL's; may be repeated. A client that asks for none gets
    the first."""
    lora_folder: Annotated[Path | None, Option()] = None
    """Folder below which an operator may load adapters while the server runs; by default none may be."""
    default_max_tokens: Annotated[int | None, Option(least=0, most=2**31 - 1, words={0: None})] = 4096
    """Most tokens of a reply that sets no `max_output_tokens`; 0: as many as the context holds."""
    cycle_tokens: Annotated[int, Option(name="end_cycles", words={True: CYCLE_TOKENS, False: 0})] = (
        CYCLE_TOKENS
    )
    """End a reply that has repeated one cycle of at most 128 tokens for 512 tokens."""
    traces_endpoint: Annotated[str | None, Option(name="otlp_traces_endpoint")] = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of each turn; needs the extra
    otel."""
    max_queue_seconds: Annotated[float | None, Option(least=0, words={0: None})] = 300.0
    """A turn that would wait longer for the engine is refused with Retry-After; 0: every turn waits."""
    drain_seconds: Annotated[float, Option(least=0)] = 10.0
    """At SIGTERM running replies may end within this time; then sockets close."""
    metrics_compat: Annotated[Literal["none", "vllm"], Option()] = "none"
    """vllm: /metrics has vLLM's names, too, for routers and dashboards."""
    page: Annotated[bool, Option()] = True
    """Serve the playground at / and the documents of the API at /docs."""
    recovery_seconds: float = 60.0
    """If the engine dies, a running reply waits this long for another engine; then it fails."""
    loading_seconds: float = 60.0
    """While the engine loads, an HTTP request that needs it waits this long for it; then it is refused."""
    handshake_seconds: float = 5.0
    """The same for the handshake of a WebSocket; less, as many clients give up after ten seconds, and all try
    again after a refusal."""

    def __post_init__(self) -> None:
        if wrong := invalid(self):
            raise OptionInvalid(wrong)
        if self.keys is not None and self.api_key is not None:
            raise KeysUnusable("--keys and --api-key both set the valid keys: give one of them")
        # Else it would be made in the working directory, and another start would not find its sessions.
        if str(self.store or "").startswith("~"):
            raise OptionInvalid(f"--store {self.store}: there is no user of this name")
        traces = [] if self.traces_endpoint is None else [self.traces_endpoint]
        _check("--otlp-traces-endpoint", traces, ENDPOINT, "is no URL such as http://localhost:4318")
        _check(
            "--served-model-name", self.served_names, MODEL_NAME, "is not 1 to 256 characters without blanks"
        )
