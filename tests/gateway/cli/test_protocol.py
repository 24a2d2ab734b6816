"""The protocol reference is as the frames, errors and quotas are now, and the README's table of fields."""

from __future__ import annotations

from holdfast.gateway.cli.protocol import PATH, README, document, readme


def test_the_reference_is_not_stale() -> None:
    stale = "gateway/PROTOCOL.md is stale: run python -m holdfast.gateway.cli.protocol"
    assert PATH.read_text() == document(), stale


def test_the_readme_has_the_fields_without_effect() -> None:
    stale = "gateway/README.md is stale: run python -m holdfast.gateway.cli.protocol"
    assert README.read_text() == readme(README.read_text()), stale
