"""The error table: every leaf of every tree that can reach the gateway has its answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.gateway import errors as gateway
from holdfast.gateway.errors import (
    INTERNAL,
    TABLE,
    GatewayError,
    error_details,
    messages_answer,
    wire_error,
)
from holdfast.kvstore.errors import KVStoreError
from holdfast.runtime import errors as runtime
from holdfast.sdk.errors import FieldMissing, FrameError
from holdfast.sessions import errors as sessions

TYPES = {"invalid_request_error", "server_error", "rate_limit_error", "authentication_error"}
OURS = {runtime.VerbRefused, runtime.SequenceUnknown, runtime.SequenceExists, runtime.SequenceBusy}
OURS |= {runtime.EpochStale, runtime.LengthInvalid}


def leaves(root: type[Exception]) -> Iterator[type[Exception]]:
    if not root.__subclasses__():
        yield root
    for kind in root.__subclasses__():
        yield from leaves(kind)


def blank(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)


@pytest.mark.parametrize("root", [FrameError, sessions.SessionError, runtime.RuntimeFault, GatewayError])
def test_every_leaf_has_an_answer_of_its_own_kind(root: type[Exception]) -> None:
    for kind in leaves(root):
        row = wire_error(blank(kind))
        assert row.type in TYPES and 400 <= row.status < 600, kind
        assert row.close is None or 1000 < row.close < 5000, kind
        assert kind in OURS or row is not INTERNAL, f"{kind} would be told as our own mistake"


def test_the_table_names_only_classes_of_the_trees() -> None:
    roots = (FrameError, sessions.SessionError, runtime.RuntimeFault, GatewayError)
    assert all(issubclass(kind, roots) for kind in TABLE)


def test_errors_that_a_client_can_fix_are_invalid_requests() -> None:
    for kind in (*leaves(FrameError), *leaves(sessions.RequestInvalid)):
        assert wire_error(blank(kind)).type == "invalid_request_error"
        assert wire_error(blank(kind)).status < 500
    for kind in leaves(runtime.EngineGone):
        assert wire_error(blank(kind)).type == "server_error"


def test_a_frame_error_is_told_with_its_field_and_event() -> None:
    told = error_details(FieldMissing("Missing required parameter: 'item'", "item", "event_7"))
    assert (told.type, told.code) == ("invalid_request_error", "missing_required_parameter")
    assert (told.param, told.event_id) == ("item", "event_7")


@pytest.mark.parametrize("error", [ZeroDivisionError("secret"), *map(blank, leaves(KVStoreError))], ids=repr)
def test_a_mistake_of_the_server_hides_its_text(error: Exception) -> None:
    told = error_details(error, "event_1")
    assert told.code == "internal_error" and told.event_id == "event_1"
    assert "secret" not in told.message


def test_only_errors_that_end_a_session_close_sockets() -> None:
    closing = {row.code for row in TABLE.values() if row.close is not None}
    assert {"storage_unavailable", "slow_reader", "session_limit_reached"} <= closing
    assert not closing & {
        "invalid_json",
        "frame_too_large",
        "engine_unavailable",
        "context_length_exceeded",
        "invalid_value",
    }


def test_every_gateway_error_is_in_its_plate() -> None:
    assert all(kind.__name__ in (gateway.__doc__ or "") for kind in leaves(GatewayError))


def test_each_error_has_a_form_for_messages() -> None:
    """Types and statuses are those of Anthropic's API."""
    kinds = {
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    }
    by_status = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    by_status |= {429: "rate_limit_error", 529: "overloaded_error"}
    for kind, row in TABLE.items():
        body, status, headers = messages_answer(blank(kind), "req_1")
        error = body["error"]
        assert isinstance(error, dict) and error["type"] in kinds and error["message"], kind
        assert (body["type"], body["request_id"]) == ("error", "req_1")
        assert error["details"]["error_code"] == row.code
        assert error["type"] == by_status.get(status, error["type"])
        assert (error["type"] == "api_error") == (row.type == "server_error"), kind
        assert status == (529 if row.code == "engine_overloaded" else row.status)
        assert ("Retry-After" in (headers or {})) == (status in (429, 503, 529))
