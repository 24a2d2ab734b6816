"""The protocol reference is as the frames, the errors and the quotas are now."""

from __future__ import annotations

from holdfast.gateway.cli.protocol import PATH, document


def test_the_reference_is_not_stale() -> None:
    stale = "gateway/PROTOCOL.md is stale: run python -m holdfast.gateway.cli.protocol"
    assert PATH.read_text() == document(), stale
