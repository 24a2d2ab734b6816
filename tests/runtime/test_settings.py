"""Engine settings: they cross the link whole, and resolve into the scheduler's numbers."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.runtime.errors import PoolTooSmall, SettingsInvalid
from holdfast.runtime.settings import EngineSettings


def test_they_cross_the_link() -> None:
    asked = EngineSettings(model="pocket", kv_bytes=1 << 20, depth=2, secret=b"0123456789abcdef")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=EngineSettings) == asked


@pytest.mark.parametrize(
    "wrong", [{"blocks": 1, "kv_bytes": 1}, {"blocks": 0}, {"kv_bytes": 0}, {"max_context": 0}]
)
def test_they_are_checked_at_birth(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingsInvalid):
        EngineSettings(model="pocket", **wrong)


def test_own_settings_go_before_defaults_and_the_model_limits_the_context() -> None:
    known = {"blocks": 100, "block_bytes": 64, "max_context": 512, "vocab_size": 1000, "depth": 2}
    usual = EngineSettings(model="pocket").resolved(**known)
    assert (usual.depth, usual.max_context, usual.watermark_blocks) == (2, 512, 1)
    own = EngineSettings(model="pocket", depth=1, max_context=64, max_sequences=3, watermark=0.25)
    assert (own.resolved(**known).depth, own.resolved(**known).max_context) == (1, 64)
    assert (own.resolved(**known).max_sequences, own.resolved(**known).watermark_blocks) == (3, 25)
    assert EngineSettings(model="pocket", max_context=4096).resolved(**known).max_context == 512


def test_a_context_that_does_not_fit_the_pool_is_refused() -> None:
    with pytest.raises(PoolTooSmall, match="max_context = 512 tokens takes 32 blocks"):
        EngineSettings(model="pocket").resolved(
            blocks=31, block_bytes=64, max_context=512, vocab_size=10, depth=1
        )
