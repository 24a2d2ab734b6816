"""The events of a run: `RunEvent`, from the first piece of text to exactly one `RunDone`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..responses import Finished
from ..tools.tool import ResultKind

CallOutcome: TypeAlias = ResultKind | Literal["unknown_tool", "not_run", "cancelled"]
StopReason: TypeAlias = Literal[
    "completed",  # the model called no more tools
    "caller",  # it called a tool without a callable: the caller answers, and may run again
    "steps",
    "calls",
    "seconds",
    "tokens",
    "incomplete",  # a response ended before its end: `rounds[-1].response.status_details` says why
    "cancelled",
]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the model's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool runs; the model's response may still run. ``expected``: seconds it usually takes, if known."""

    call_id: str
    name: str
    arguments: str
    expected: float | None


@dataclass(frozen=True, slots=True)
class CallProgress:
    """Progress that a tool reports: a note, and a ``fraction`` in 0 to 1 where it is known."""

    call_id: str
    name: str
    note: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool's output while it runs. The whole output begins with all pieces."""

    call_id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call is over. ``output``: the text that the model reads; ``seconds``: how long the tool ran."""

    call_id: str
    name: str
    output: str
    outcome: CallOutcome
    seconds: float
    expected: float | None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A response of the model is over; its tools may still run. ``step`` counts from 1."""

    step: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class WaitFinished:
    """All tools of a step are done. ``expected``: seconds in the hint to the server; None: no hint was sent."""

    step: int
    expected: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Tokens of all responses of a run. ``new_tokens``: prompt tokens that the session had not had before."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunDone:
    """The end of a run. ``text``: of all responses; ``rounds``: the responses; ``calls``: tools run."""

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
    """The sum over the responses that have usage."""
    usages = [finished.usage for finished in rounds if finished.usage is not None]
    return RunUsage(
        input_tokens=sum(usage.input_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        cached_tokens=sum(usage.input_token_details.cached_tokens for usage in usages),
        new_tokens=sum(finished.kv.new for finished in rounds if finished.kv is not None),
    )
