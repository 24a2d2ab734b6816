"""Requests and tokens per minute of each key: buckets, headers, events, and refusals before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from holdfast.gateway.access.admission import TURN_ROUTES
from holdfast.gateway.access.auth import MESSAGES, salt_of
from holdfast.gateway.access.rate_limits import KeyRates, RateLimiter, duration
from holdfast.gateway.access.tenants import Tenants
from holdfast.gateway.app import build_app
from holdfast.gateway.errors import RateLimited, error_details, http_answer
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.gateway.keyed_service import FILE, digest, keyed, said
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken

pytestmark = pytest.mark.anyio
ACME, OTHER = salt_of("acme"), salt_of("other")
ONE, TWO = b"key one", b"key two"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limiter(clock: Clock, **rates: int) -> RateLimiter:
    return RateLimiter({ACME: KeyRates(**rates)}, clock)


def left(of: RateLimiter, key: bytes = ONE) -> dict[str, int]:
    return {limit.name: limit.remaining for limit in of.left(key, ACME).limits}


def test_each_key_has_its_own_requests_and_they_come_back_one_by_one() -> None:
    clock = Clock()
    limits = limiter(clock, requests=3)
    for remaining in (2, 1, 0):
        assert [one.remaining for one in limits.admit(ONE, ACME).limits] == [remaining]
    with pytest.raises(RateLimited) as refused:
        limits.admit(ONE, ACME)
    assert refused.value.retry_after == pytest.approx(20.0)
    assert left(limits, TWO) == {"requests": 3}
    clock.now += 19.9
    with pytest.raises(RateLimited):
        limits.admit(ONE, ACME)
    clock.now += 0.2
    assert limits.admit(ONE, ACME).limits[0].reset_seconds == pytest.approx(59.9)
    clock.now += 1000.0
    assert left(limits) == {"requests": 3}


def test_tokens_are_taken_on_credit_and_paid_back() -> None:
    clock = Clock()
    limits = limiter(clock, tokens=600)
    limits.admit(ONE, ACME)
    limits.spent(ONE, ACME, 700)
    with pytest.raises(RateLimited) as refused:
        limits.admit(ONE, ACME)
    assert refused.value.retry_after == pytest.approx(10.1)
    assert "600 tokens per minute" in refused.value.message
    clock.now += 10.2
    limits.admit(ONE, ACME)


def test_a_refused_request_takes_nothing() -> None:
    limits = limiter(Clock(), requests=5, tokens=10)
    limits.spent(ONE, ACME, 10)
    with pytest.raises(RateLimited):
        limits.admit(ONE, ACME)
    limits.check(TWO, ACME)
    assert left(limits) == {"requests": 5, "tokens": 0} and left(limits, TWO) == {"requests": 5, "tokens": 10}


def test_without_limits_nothing_is_counted_or_told() -> None:
    limits = limiter(Clock())
    for salt in (ACME, OTHER, b""):
        for _ in range(10):
            assert limits.admit(ONE, salt).headers() == {}
        limits.spent(ONE, salt, 10**9)
    assert not limits.keys


def test_what_was_used_stays_used_when_the_limits_change() -> None:
    clock = Clock()
    limits = limiter(clock, requests=10)
    for _ in range(8):
        limits.admit(ONE, ACME)
    limits.change({ACME: KeyRates(requests=5)})
    with pytest.raises(RateLimited):
        limits.admit(ONE, ACME)
    limits.change({ACME: KeyRates(requests=20)})
    assert left(limits) == {"requests": 12} and limits.keys == 1
    clock.now += 60
    limits.change({ACME: KeyRates(requests=20)})
    assert not limits.keys, "a key that has used nothing is forgotten"


def test_the_headers_are_those_that_clients_read() -> None:
    limits = limiter(Clock(), requests=60, tokens=6000)
    limits.spent(ONE, ACME, 650)
    assert limits.admit(ONE, ACME).headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5350",
        "x-ratelimit-reset-tokens": "6.5s",
    }
    assert limits.left(ONE, ACME).messages_headers(1_700_000_000.0) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2023-11-14T22:13:21Z",
        "anthropic-ratelimit-tokens-limit": "6000",
        "anthropic-ratelimit-tokens-remaining": "5350",
        "anthropic-ratelimit-tokens-reset": "2023-11-14T22:13:27Z",
    }


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0ms"),
        (0.0171, "18ms"),
        (1.0, "1s"),
        (1.01, "1.1s"),
        (59.99, "60s"),
        (60.0, "1m0s"),
        (361, "6m1s"),
    ],
)
def test_times_are_rounded_up(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_refusal_says_when_to_come_back() -> None:
    error = RateLimited("Rate limit reached", 7.2)
    body, status, headers = http_answer(error)
    assert status == 429 and headers == {"Retry-After": "8"}
    assert body["error"]["code"] == "rate_limit_exceeded" and body["error"]["type"] == "rate_limit_error"
    assert error_details(error).retry_after == 7.2


def test_the_keys_file_sets_them_for_each_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    assert Tenants.read(path).rates() == {
        salt_of("acme"): KeyRates(requests=3, tokens=1000),
        salt_of("zenith"): KeyRates(requests=1000, tokens=None),
        salt_of("small"): KeyRates(requests=1000, tokens=20),
    }


async def test_turns_of_a_key_end_at_its_requests_on_all_its_sockets(tmp_path: Path) -> None:
    async with keyed(tmp_path) as served, served.wire("alpha") as one, served.wire("alpha") as two:
        for wire in (one, two, one):
            assert (await wire.say())["status"] == "completed"
        begun = served.begun
        refused = await two.say()
        assert (refused["code"], refused["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 0 < refused["retry_after"] <= 20.0
        assert served.begun == begun, "nothing was asked of the engine"
        async with served.wire("beta") as other_key, served.wire("gamma") as other_tenant:
            for wire in (other_key, other_tenant):
                assert (await wire.say())["status"] == "completed"


async def test_a_refused_turn_leaves_no_item_behind(tmp_path: Path) -> None:
    async with keyed(tmp_path) as served, served.wire("alpha") as wire:
        for _ in range(3):
            await wire.say()
        (live,) = served.service.sessions()
        items = len(live.session.history)
        assert (await wire.say())["code"] == "rate_limit_exceeded"
        assert len(live.session.history) == items


async def test_a_turn_costs_its_new_tokens_and_its_reply_but_not_what_the_session_had(tmp_path: Path) -> None:
    async with keyed(tmp_path) as served, served.wire("alpha") as wire:
        responses = [await wire.say("begin " * 20), await wire.say("go on")]
        cost = sum(one["kv"]["new"] + one["usage"]["output_tokens"] for one in responses)
        assert cost < sum(one["usage"]["total_tokens"] for one in responses) - 20
        left = served.service.turns.rates.left(digest("alpha"), ACME)
        assert 1000 - cost <= left.limits[1].remaining <= 1000 - cost + 20  # some came back meanwhile
    async with keyed(tmp_path) as served, served.wire("delta") as wire:
        assert (await wire.say("begin " * 30))["status"] == "completed"
        refused = await wire.say()
        assert refused["code"] == "rate_limit_exceeded" and "20 tokens per minute" in refused["message"]


async def test_realtime_clients_are_told_at_the_begin_and_the_end_of_a_response(tmp_path: Path) -> None:
    async with keyed(tmp_path) as served:
        async with served.wire("alpha") as wire:
            await wire.send("response.create", items=[said("begin")])
            events = await wire.until("response.done")
            events += await wire.until("rate_limits.updated")
            kinds = [event["type"] for event in events]
            assert kinds[kinds.index("response.created") + 1] == "rate_limits.updated"
            assert kinds.count("rate_limits.updated") == 2
            told = [event["rate_limits"] for event in events if event["type"] == "rate_limits.updated"]
            before, after = ({one["name"]: one["remaining"] for one in limits} for limits in told)
            assert before == {"requests": 2, "tokens": 1000}
            assert after["requests"] == 2 and after["tokens"] < 1000
        async with served.wire("free") as wire:
            await wire.say()
            await wire.send("conversation.item.retrieve", item_id="none")
            assert "rate_limits.updated" not in {event["type"] for event in await wire.until("error")}


async def test_a_steer_beyond_the_limit_leaves_the_reply_alone(tmp_path: Path) -> None:
    async with keyed(tmp_path) as served, served.wire("alpha") as wire:
        for _ in range(2):
            await wire.say()
        served.link.flowing = False
        await wire.send("response.create")
        await wire.until("response.created")
        await wire.send("response.steer", input=[said("stop")])
        refused = (await wire.until("error"))[-1]["error"]
        assert refused["code"] == "rate_limit_exceeded"
        served.link.flow()
        assert (await wire.until("response.done"))[-1]["response"]["status"] == "completed"


def test_answers_of_turn_making_routes_have_the_headers(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    settings = GatewaySettings(keys=path)
    service = Service(settings, "scripted", Scripted(spoken, END))
    client = TestClient(build_app(service))
    for route in TURN_ROUTES:
        told = client.post(route, headers={"Authorization": "Bearer alpha"}).headers
        assert told["x-ratelimit-limit-requests"] == "3" and told["x-ratelimit-remaining-tokens"] == "1000"
        assert "x-ratelimit-limit-requests" not in client.post(route).headers, "no key, no limits"
        named = {name for name in told if name.startswith("anthropic-ratelimit")}
        assert len(named) == (6 if route == MESSAGES else 0)
        free = client.post(route, headers={"Authorization": "Bearer free"}).headers
        assert not [name for name in free if "ratelimit" in name]
    models = client.get("/v1/models", headers={"Authorization": "Bearer alpha"}).headers
    assert "x-ratelimit-limit-requests" not in models


def test_a_reload_changes_the_rates(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    service = Service(GatewaySettings(keys=path), "scripted", Scripted(spoken, END))
    path.write_text(FILE.replace("requests_per_minute = 3", "requests_per_minute = 4"))
    service.change_tenants(Tenants.read(path))
    key = digest("alpha")
    assert service.turns.rates.left(key, ACME).limits[0].limit == 4
