"""The error table: every leaf of every tree that can reach the gateway has its answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.gateway import errors as gateway
from holdfast.gateway.errors import INTERNAL, TABLE, GatewayError, error_details, wire_error
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


def test_what_the_client_can_mend_is_told_as_its_own() -> None:
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
def test_our_own_mistakes_keep_their_text(error: Exception) -> None:
    told = error_details(error, "event_1")
    assert told.code == "internal_error" and told.event_id == "event_1"
    assert "secret" not in told.message


def test_codes_close_sockets_only_where_nothing_can_go_on() -> None:
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
