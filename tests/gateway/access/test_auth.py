"""The guard: with a key every route but the probes asks for it; without one foreign pages may not connect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from starlette.websockets import WebSocket

from holdfast.gateway.access.auth import (
    KEY,
    OPERATOR,
    TENANT,
    Guard,
    Hosts,
    Keys,
    caller_of,
    identity_of,
    owners_of,
    salt_of,
    written_digest,
)
from holdfast.gateway.errors import KeysUnusable, OptionInvalid
from holdfast.gateway.settings import GatewaySettings, Network

pytestmark = pytest.mark.anyio
ROUTES = ["/v1/realtime", "/v1/models", "/v1/models/pocket", "/metrics", "/version", "/anything"]


async def answered(guard: Guard, kind: str, path: str, headers: Iterable[tuple[str, str]] = ()) -> int:
    """The status that the guard answers, or 200 where it lets the request through."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def receive() -> dict:
        raise AssertionError("the guard reads nothing")

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    await guard({"type": kind, "path": path, "headers": raw}, receive, send)
    return sent[0]["status"]


async def let_in(scope: dict, receive: object, send) -> None:
    await send({"type": "http.response.start", "status": 200})


KEYED = Guard(let_in, lambda: Keys.one("s3cret"))
OPEN = Guard(let_in, lambda: None)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_key_guards_every_route(kind: str, path: str) -> None:
    assert await answered(KEYED, kind, path) == 401
    assert await answered(KEYED, kind, path, [("Authorization", "Bearer wrong")]) == 401
    assert await answered(KEYED, kind, path, [("Authorization", "Basic s3cret")]) == 401
    assert await answered(KEYED, kind, path, [("Authorization", "Bearer s3cret")]) == 200
    assert await answered(KEYED, kind, path, [("authorization", "bearer  s3cret")]) == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(path: str) -> None:
    assert await answered(KEYED, "http", path) == 200


@pytest.mark.parametrize(
    ("headers", "cause"), [([], "No API key"), ([(b"authorization", b"Bearer other")], "not valid here")]
)
async def test_a_missing_or_wrong_key_is_told_how_keys_are_given(
    headers: list[tuple[bytes, bytes]], cause: str
) -> None:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    await KEYED({"type": "http", "path": "/v1/models", "headers": headers}, None, send)
    told = json.loads(sent[1]["body"])["error"]["message"]
    assert cause in told and "other" not in told
    for word in ("--api-key", "HOLDFAST_API_KEY", "--keys", "Authorization: Bearer", "x-api-key"):
        assert word in told


async def test_a_key_in_letters_beyond_ascii_is_compared_too() -> None:
    guard = Guard(let_in, lambda: Keys.one("schlüssel"))
    assert await answered(guard, "http", "/version", [("Authorization", "Bearer schluessel")]) == 401


@pytest.mark.parametrize("key", ["", " ", "s3cret\n", "\ts3cret"])
async def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(KeysUnusable, match="--api-key is empty, or begins or ends with a blank"):
        Keys.one(key)


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 403), ("http://127.0.0.1:8040", 200), ("null", 403)]
)
async def test_without_a_key_only_its_own_pages_may_connect(origin: str, status: int) -> None:
    headers = [("Host", "127.0.0.1:8040"), ("Origin", origin)]
    assert await answered(OPEN, "websocket", "/v1/realtime", headers) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example:8040", 403), ("localhost:8040", 200), ("[::1]:8040", 200), ("10.0.0.7", 200)],
)
async def test_a_page_that_points_its_own_name_here_may_not_connect(host: str, status: int) -> None:
    headers = [("Host", host), ("Origin", f"http://{host}")]
    assert await answered(OPEN, "websocket", "/v1/realtime", headers) == status


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", [*ROUTES, "/health", "/ready"])
async def test_without_keys_a_name_that_is_not_the_servers_is_refused_on_every_route(
    kind: str, path: str
) -> None:
    for host in (
        "evil.com",
        "evil.com:8040",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "[::1].evil.com",
        "",
    ):
        assert await answered(OPEN, kind, path, [("Host", host)]) == 403, host
    for host in (
        "localhost",
        "localhost.:8040",
        "LOCALHOST:8040",
        "chat.localhost",
        "127.0.0.1:8040",
        "[::1]:8040",
        "10.0.0.7",
    ):
        assert await answered(OPEN, kind, path, [("Host", host)]) == 200, host


async def test_a_refused_host_is_told_the_option_that_allows_it() -> None:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/metrics", "headers": [(b"host", b"evil.com")]}
    await OPEN(scope, None, send)
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]


def hosts(keys: bool = False, host: str = "127.0.0.1", *allowed: str) -> Hosts:
    return Hosts.of(GatewaySettings(host=host, network=Network(allowed_hosts=allowed)), keys=keys)


def test_a_server_on_a_network_answers_to_its_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Gpu-7")
    assert "gpu-7:8040" in hosts(host="0.0.0.0") and "evil.com" not in hosts(host="0.0.0.0")
    assert "gpu-7.lan" in hosts(host="gpu-7.lan")
    assert "gpu-7" not in hosts(), "on loopback only this machine asks"


def test_with_keys_any_host_is_accepted_unless_some_are_named() -> None:
    assert "anything.example" in hosts(keys=True)
    named = hosts(True, "127.0.0.1", "chat.example.com", "*.example.org")
    own = ("chat.example.com", "a.example.org:443", "a.b.example.org", "10.0.0.7", "localhost")
    assert all(name in named for name in own)
    assert not any(name in named for name in ("example.com", "example.org", "xchat.example.com", "evil.com"))
    assert "evil.com" in hosts(False, "127.0.0.1", "*")


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_hosts": ("http://a.b",)},
        {"allowed_hosts": ("a.b:80",)},
        {"allowed_hosts": ("",)},
        {"trusted_proxies": ("10.0.0.0/33",)},
        {"trusted_proxies": ("proxy",)},
        {"root_path": "holdfast"},
        {"root_path": "/a//b"},
        {"private_key": Path("key.pem")},
    ],
)
def test_invalid_network_options_are_refused(fields: dict) -> None:
    with pytest.raises(OptionInvalid, match="--"):
        Network(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"port": 65536}, {"drain_seconds": -1.0}, {"default_max_tokens": 2**31}, {"served_names": ("a b",)}],
)
def test_invalid_settings_of_the_gateway_are_refused(fields: dict) -> None:
    with pytest.raises(OptionInvalid):
        GatewaySettings(**fields)


def test_a_key_and_a_file_of_keys_are_not_given_together() -> None:
    with pytest.raises(KeysUnusable, match="--keys and --api-key"):
        GatewaySettings(keys=Path("keys"), api_key="k")


async def test_an_operators_key_sees_all_and_opens_no_session() -> None:
    seen: list[tuple[bytes, bool]] = []

    async def noted(scope: dict, receive: object, send) -> None:
        seen.append((scope[TENANT], scope[OPERATOR]))
        await let_in(scope, receive, send)

    tenants = dict.fromkeys(Keys.one("alpha").tenants, "acme")
    guard = Guard(noted, lambda: Keys(tenants).with_operators(["root"], "here"))
    told = {key: [("Authorization", f"Bearer {key}")] for key in ("alpha", "root")}
    assert await answered(guard, "http", "/metrics", told["alpha"]) == 200
    assert await answered(guard, "http", "/metrics", told["root"]) == 200
    assert seen == [(salt_of("acme"), False), (b"", True)]
    assert await answered(guard, "websocket", "/v1/realtime", told["root"]) == 401
    assert await answered(guard, "http", "/v1/models", told["root"]) == 401


async def test_without_a_key_programs_may_connect() -> None:
    assert await answered(OPEN, "websocket", "/v1/realtime", [("Host", "127.0.0.1:8040")]) == 200


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


async def test_a_keys_file_tells_tenants_apart(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "# ours\nalpha acme\nbeta acme # another\n\ngamma  zenith\n")
    seen: list[bytes] = []

    async def noted(scope: dict, receive: object, send) -> None:
        seen.append(scope[TENANT])
        await let_in(scope, receive, send)

    guard = Guard(noted, lambda: Keys.read(path))
    for key in ("alpha", "beta", "gamma"):
        assert await answered(guard, "http", "/version", [("Authorization", f"Bearer {key}")]) == 200
    assert seen[0] == seen[1] == salt_of("acme") != seen[2] == salt_of("zenith")
    assert await answered(guard, "websocket", "/v1/realtime", [("Authorization", "Bearer acme")]) == 401
    assert await answered(guard, "websocket", "/v1/realtime") == 401


async def test_the_first_key_of_a_file_with_a_byte_order_mark_is_a_key(tmp_path: Path) -> None:
    keys = Keys.read(keys_file(tmp_path, "\ufeffalpha acme\n"))
    assert keys.tenant("alpha") == "acme"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no keys"),
        ("# no line\n", "no keys"),
        ("s3cret\n", "line 1"),
        ("a b\ns3cret ten/ant\n", "line 2"),
        ("s3cret one two\n", "line 1"),
        ("s3cret one\ns3cret two\n", "line 2: this key is another tenant's"),
    ],
)
def test_an_invalid_keys_file_is_refused_without_showing_its_keys(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(KeysUnusable, match=told) as refused:
        Keys.read(keys_file(tmp_path, text))
    assert "s3cret" not in refused.value.message


def test_a_keys_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysUnusable, match="nowhere"):
        Keys.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        ((), "https://app.example.com", 403),
        (("https://app.example.com",), "https://app.example.com", 200),
        (("https://app.example.com",), "https://APP.example.com", 200),
        (("https://app.example.com",), "http://app.example.com", 403),
        (("https://app.example.com",), "https://app.example.com.evil.org", 403),
        (("*",), "null", 200),
    ],
)
async def test_pages_of_other_origins_may_connect_if_allowed(
    origins: tuple[str, ...], origin: str, status: int
) -> None:
    guard = Guard(let_in, lambda: None, origins=Network(allowed_origins=origins).allowed_origins)
    headers = [("Host", "127.0.0.1:8040"), ("Origin", origin)]
    assert await answered(guard, "websocket", "/v1/realtime", headers) == status


@pytest.mark.parametrize("origin", ["app.example.com", "https://", "https://a/b", "https://a b", ""])
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(OptionInvalid, match="--allow-origin"):
        Network(allowed_origins=(origin,))


async def test_a_browser_gives_its_key_as_a_subprotocol() -> None:
    for offered, status in [
        ("realtime, openai-insecure-api-key.s3cret, openai-beta.realtime-v1", 200),
        ("openai-insecure-api-key.s3cret", 200),
        ("realtime, openai-insecure-api-key.wrong", 401),
        ("realtime, s3cret", 401),
        ("", 401),
    ]:
        headers = [("Sec-WebSocket-Protocol", offered)]
        assert await answered(KEYED, "websocket", "/v1/realtime", headers) == status
    headers = [
        ("Authorization", "Bearer wrong"),
        ("Sec-WebSocket-Protocol", "openai-insecure-api-key.s3cret"),
    ]
    assert await answered(KEYED, "websocket", "/v1/realtime", headers) == 401


HASHED = hashlib.sha256(b"s3cret").hexdigest()


@pytest.mark.parametrize("line", [written_digest("s3cret"), f"sha256:{HASHED}", f"SHA256:{HASHED.upper()}"])
def test_a_file_may_hold_digests_instead_of_keys(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{line} acme\nplain zenith\n")
    keys = Keys.read(path)
    assert keys.tenant("s3cret") == "acme" and keys.tenant("plain") == "zenith"
    assert keys.tenant(line) is None, "the digest is no key"
    assert keys.opens(keys.digests_of("s3cret"), salt_of("acme"))
    assert keys.digests_of("other") == () and not keys.opens([b""], salt_of(""))
    operators = keys.with_operators([line], "--operator-key")
    assert operators.is_operator("s3cret") and not operators.is_operator("plain")
    assert Keys.one(line).tenant("s3cret") == "" and Keys.one(line).is_operator("s3cret")


def test_the_digest_of_a_key_counts_as_the_key(tmp_path: Path) -> None:
    """Sockets stay open when the file is changed from keys to digests."""
    plain, hashed = tmp_path / "plain", tmp_path / "hashed"
    plain.write_text("s3cret acme\n")
    hashed.write_text(f"{written_digest('s3cret')} acme\n")
    assert Keys.read(plain) == Keys.read(hashed)
    hashed.write_text(f"{written_digest('s3cret')} acme\ns3cret zenith\n")
    with pytest.raises(KeysUnusable, match="line 2: this key is another tenant's already"):
        Keys.read(hashed)


async def test_a_client_is_known_by_one_digest_however_the_file_names_its_key(tmp_path: Path) -> None:
    """So its socket stays open when the file changes from one form to another, and its limits stay one."""
    path, scopes = tmp_path / "keys", []

    async def keep(scope: dict, receive: object, send: object) -> None:
        scopes.append(scope)

    forms = ("s3cret", written_digest("s3cret"), f"sha256:{HASHED}")
    for form in forms:
        path.write_text(f"{form} acme\n")
        guard = Guard(keep, lambda: Keys.read(path))
        raw = [(b"authorization", b"Bearer s3cret")]
        await guard({"type": "http", "path": "/v1/models", "headers": raw}, None, None)
    assert len({caller_of(scope).key for scope in scopes}) == 1
    for form in forms:
        path.write_text(f"{form} acme\n")
        assert all(Keys.read(path).opens(scope[KEY], salt_of("acme")) for scope in scopes)
    path.write_text("other acme\n")
    assert not any(Keys.read(path).opens(scope[KEY], salt_of("acme")) for scope in scopes)


def test_an_owner_is_one_digest_however_its_key_is_sent() -> None:
    sent = (
        {"authorization": "Bearer s3cret"},
        {"authorization": "bearer  s3cret"},
        {"x-api-key": "s3cret"},
        {"sec-websocket-protocol": "realtime, openai-insecure-api-key.s3cret"},
    )
    owners = [owners_of(Headers(one)) for one in sent]
    anonymous, another = owners_of(Headers({})), owners_of(Headers({"x-api-key": "other"}))
    assert len({owner for owner, _ in owners}) == 1
    assert len({owners[0][0], anonymous[0], another[0]}) == 3
    former = hashlib.blake2b(b"Bearer s3cret", digest_size=16).digest()
    assert [one for _, one in owners].count(former) == 3, "as earlier versions made it, of the header as sent"
    scope = {"type": "websocket", "query_string": b"", "client": None, "headers": []}
    scope["headers"] = [(b"x-api-key", b"s3cret")]
    socket = identity_of(WebSocket(scope, None, None))
    assert socket.caller.owner == caller_of(scope).owner == owners[0][0]
    assert socket.former_owner == former
    assert anonymous[0] == anonymous[1] == hashlib.blake2b(b"", digest_size=16).digest()


@pytest.mark.parametrize("wrong", ["blake2b:", "sha256:12", f"sha256:{'g' * 64}", f"blake2b:{'0' * 128}"])
def test_a_digest_that_is_none_is_refused_without_being_shown(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{wrong} acme\n")
    with pytest.raises(KeysUnusable, match="line 1: this key is no digest of a key") as refused:
        Keys.read(path)
    assert "0000" not in refused.value.message and "gggg" not in refused.value.message


@pytest.mark.parametrize("digest", [f"sha256:{hashlib.sha256(b'').hexdigest()}", written_digest("")])
async def test_the_digest_of_nothing_lets_no_client_in(tmp_path: Path, digest: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{digest} acme\n")
    guard = Guard(let_in, lambda: Keys.read(path))
    assert await answered(guard, "http", "/version") == 401
    assert await answered(guard, "http", "/version", [("Authorization", "Bearer ")]) == 401
