"""What a run tells: `RunEvent`, from the first piece of text to exactly one `RunDone`.

Knows nothing of how a run goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..reply import Finished
from ..tools.tool import OutcomeKind

CallOutcome: TypeAlias = OutcomeKind | Literal["unknown_tool", "not_run", "cancelled"]
StopReason: TypeAlias = Literal[
    "completed",  # the model said its last word
    "caller",  # it calls a tool that has no callable: the caller answers, and may run again
    "steps",
    "calls",
    "seconds",
    "tokens",
    "incomplete",  # a response ended before its end: `rounds[-1].response.status_details` says why
    "cancelled",
]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool runs, while the model may still speak. ``expected``: seconds it usually takes, where known."""

    call_id: str
    name: str
    arguments: str
    expected: float | None


@dataclass(frozen=True, slots=True)
class CallProgress:
    """A tool tells how far it is; ``fraction`` in 0 to 1, where it knows."""

    call_id: str
    name: str
    note: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of what a tool answers, while it runs; its output begins with all of them."""

    call_id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """What a call came to; ``output`` is what the model reads, whatever happened."""

    call_id: str
    name: str
    output: str
    outcome: CallOutcome
    seconds: float
    expected: float | None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """One response of the model is over; its tools may still run. ``step`` counts from 1."""

    step: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class WaitFinished:
    """All tools of a step have answered. ``expected``: what the server was told; None: it was told nothing."""

    step: int
    expected: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class RunUsage:
    """What a run cost, in tokens over all its responses. ``new``: truly new ones of the prompts."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunDone:
    """The end. ``text``: all that was said; ``rounds``: its responses; ``calls``: tools that were run."""

    text: str
    stop: StopReason
    usage: RunUsage
    rounds: tuple[Finished, ...]
    calls: int
    seconds: float


RunEvent: TypeAlias = (
    TextPiece | CallStarted | CallProgress | CallPiece | CallFinished | StepFinished | WaitFinished | RunDone
)


def usage_of(rounds: tuple[Finished, ...]) -> RunUsage:
    """The sum over the responses that told theirs."""
    told = [finished.usage for finished in rounds if finished.usage is not None]
    return RunUsage(
        input_tokens=sum(usage.input_tokens for usage in told),
        output_tokens=sum(usage.output_tokens for usage in told),
        cached_tokens=sum(usage.input_token_details.cached_tokens for usage in told),
        new_tokens=sum(finished.kv.new for finished in rounds if finished.kv is not None),
    )
