"""What a turn's KV cost, as the frame that all protocols put into their answers."""

from __future__ import annotations

from ...sdk.frames.response import KVReceipt
from ...sessions.turn.events import TurnUsage


def receipt_of(usage: TurnUsage) -> KVReceipt:
    """A turn's usage as the KV receipt that its answer has: how many prompt tokens were computed, how many had
    their KV on the device, in the host tier or on disk, how long the disk took, and why KV was missed."""
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
