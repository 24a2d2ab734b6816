"""What leaves a server with a session, and what one begins with that came from another server: its items, and
the token ids of its replies.

A prompt is made of these again: a reply keeps the tokens that the model sampled, and the items between replies
are written by the template, as they were the first time. Knows nothing of files or frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from .adapters import SessionAdapter
from .conversation.history import ContextGap, History
from .conversation.items import Item, Preamble
from .conversation.tree import Segment, TurnReply
from .errors import ItemInvalid, RequestInvalid
from .journal.records import SessionSnapshot
from .journal.replay import Replayed, snapshot_of
from .token_ids import ids_of


@dataclass(frozen=True, slots=True)
class ExportedEntry:
    """An item, or the items of one reply. ``tokens``: the ids of a reply, with its reasoning; empty for other
    items. ``ended``: the last of them is an end token that the model sampled.

    ``left_after``: set if it is out of the context: the id of the item behind which it left; "" if that item is
    gone.
    """

    items: tuple[Item, ...]
    tokens: tuple[int, ...] = ()
    ended: bool = False
    left_after: str | None = None


def at_rest(replayed: Replayed) -> History:
    """The history of a session as the journal has it, without the reply that was interrupted, if one was."""
    last = replayed.last
    if last is not None and last.ended is None and last.prepared.turn is not None:
        replayed.history.abort_turn(last.prepared.turn)
    return replayed.history


def exported(history: History) -> list[ExportedEntry]:
    """All entries of a history in which no turn runs, in order. Those out of the context have no tokens."""
    left: dict[int, str] = {}
    for gap in history.gaps:
        since = (gap.since.items if isinstance(gap.since, TurnReply) else (gap.since,)) if gap.since else ()
        since_id = getattr(since[-1], "id", "") if since else ""
        left.update((id(entry), since_id) for entry in gap.entries)
    found: list[ExportedEntry] = []
    for entry in history.entries:
        out = left.get(id(entry))
        if not isinstance(entry, TurnReply):
            found.append(ExportedEntry((entry,), left_after=out))
        elif entry.items:
            tokens = () if out is not None else tuple(entry.ids.tolist())
            found.append(ExportedEntry(entry.items, tokens, entry.ended, out))
    return found


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What a new session begins with: its ``history``, the ``snapshot`` by which the journal makes that again,
    its ``clock``, the date that the chat template shows (ISO 8601), and its ``adapter``; None: none."""

    history: History
    snapshot: SessionSnapshot
    clock: str
    adapter: SessionAdapter | None = None


def imported(
    preamble: Preamble,
    entries: Sequence[ExportedEntry],
    clock: str,
    *,
    vocabulary: int,
    max_items: int,
    adapter: SessionAdapter | None = None,
) -> SessionStart:
    """What a new session begins with that continues from these ``entries``. ``clock``, ``adapter``: as in
    `SessionStart`.
    ``vocabulary``: how many token ids the model has. ``max_items``: the most items that a session holds.

    Raises ``ItemInvalid``, also for a token id that the model does not have, ``ItemExists``, ``ToolInvalid``,
    and ``RequestInvalid`` for a clock that is no date.
    """
    checked = History(preamble, max_items=max_items)
    segments: list[Segment] = []
    ends: dict[str, Segment] = {}
    left: dict[str, list[Segment]] = {}
    for number, entry in enumerate(entries):
        for item in entry.items:
            checked.insert(item)
        if entry.tokens and not 0 <= min(entry.tokens) <= max(entry.tokens) < vocabulary:
            raise ItemInvalid(f"The tokens of entry {number} are not all the model's", param="tokens")
        reply = TurnReply(entry.items, ids_of(entry.tokens), entry.ended)
        added = [reply] if entry.tokens else entry.items
        segments += added
        ends[entry.items[-1].id] = added[-1]
        if entry.left_after is not None:
            left.setdefault(entry.left_after, []).extend(added)
    order = {id(segment): index for index, segment in enumerate(segments)}
    gaps = [ContextGap(ends.get(after), tuple(gone)) for after, gone in left.items()]
    gaps.sort(key=lambda gap: order.get(id(gap.since), -1))
    history = History(max_items=max_items)
    history.restore(preamble, preamble, segments, None, gaps)
    return SessionStart(history, snapshot_of(Replayed(history, deque())), _checked(clock), adapter)


def _checked(clock: str) -> str:
    try:
        datetime.fromisoformat(clock)
    except ValueError:
        raise RequestInvalid(f"{clock[:64]!r} is no date and time", param="clock") from None
    return clock
