"""Streamed text for the parsers of tool calls: cut anywhere, and what was read of it joined again."""

from __future__ import annotations

from itertools import pairwise

from holdfast.sessions.tools.scanner import CallArguments, CallParser, Piece, PlainText, ReasoningText


def read_all(parser: CallParser, pieces: list[str], *, cut: bool = False) -> list[Piece]:
    """All events, neighbouring texts and arguments joined: how fine they come is the stream's affair."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(cut=cut)
    joined: list[Piece] = []
    for event in events:
        match (joined[-1] if joined else None), event:
            case (PlainText(before), PlainText(after)):
                joined[-1] = PlainText(before + after)
            case (ReasoningText(before), ReasoningText(after)):
                joined[-1] = ReasoningText(before + after)
            case (CallArguments(before), CallArguments(after)):
                joined[-1] = CallArguments(before + after)
            case _:
                joined.append(event)
    return joined


def split(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces, cut at these offsets, each taken modulo its length."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def reasoned(parser: CallParser, pieces: list[str]) -> tuple[str, str]:
    """The reasoning and the text that a parser makes of a reply without calls."""
    told = [piece for text in pieces for piece in parser.feed(text)] + list(parser.finish(cut=False))
    assert all(isinstance(piece, PlainText | ReasoningText) for piece in told)
    thoughts = [piece.text for piece in told if isinstance(piece, ReasoningText)]
    return "".join(thoughts), "".join(piece.text for piece in told if isinstance(piece, PlainText))
