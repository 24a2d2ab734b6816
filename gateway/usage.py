"""What a turn cost, as frames that all faces share."""

from __future__ import annotations

from ..sdk.frames.response import KVReceipt
from ..sessions.turn.events import TurnUsage


def receipt_of(usage: TurnUsage) -> KVReceipt:
    """A turn's KV receipt: how many tokens it computed, and on which tier the KV of the others was."""
    return KVReceipt(
        new=usage.new_tokens,
        prefilled=usage.prefilled_tokens,
        resident=usage.cached_tokens - usage.host_tokens - usage.disk_tokens,
        recomputed=usage.recomputed_tokens,
        host=usage.host_tokens,
        disk=usage.disk_tokens,
        restore_ms=usage.restore_ms,
        miss_reason=None if usage.miss_reason is None else usage.miss_reason.value,
    )
