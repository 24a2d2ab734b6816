"""The events of a run: `RunEvent`. Each run ends with exactly one `RunDone`, unless it raises or is left
before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..connection.responses import Finished
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
    """More of the model's text, in the order in which it comes."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool was started; the model's response may still go on. ``arguments``: the call's JSON text.
    ``expected``: seconds that the call is expected to take; None: not known."""

    call_id: str
    name: str
    arguments: str
    expected: float | None


@dataclass(frozen=True, slots=True)
class CallProgress:
    """A tool reports progress. ``note``: a text for people; ``fraction``: how much is done, 0 to 1; None: not
    known."""

    call_id: str
    name: str
    note: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A tool has written a piece of its output, and still runs. The whole output begins with all pieces, unless
    it gets too long: then an error replaces it."""

    call_id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A call is over. ``output``: the text that the model reads; ``outcome``: `completed`, or why it is not;
    ``seconds``: how long the tool ran, 0 if it was not run; ``expected``: the seconds that it was expected to
    take; None: not known. ``error``: what the tool raised; the model reads its text, not its class."""

    call_id: str
    name: str
    output: str
    outcome: CallOutcome
    seconds: float
    expected: float | None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A response of the model is over; its tools may still run. ``step``: its number in the run, from 1;
    ``finished``: the response."""

    step: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class WaitFinished:
    """All tools that the response number ``step`` called are done. ``seconds``: how long the run waited for
    them after the response. ``expected``: the seconds that the server was told the wait would take; None: it
    was not told."""

    step: int
    expected: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Tokens of all responses of a run together. ``input_tokens``: of their prompts; ``cached_tokens``: those
    of them that had KV; ``new_tokens``: those of them that the session did not have before; ``output_tokens``:
    of the replies."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RunDone:
    """The end of a run. ``text``: that of all responses, joined; ``stop``: why it ended; ``usage``: tokens;
    ``rounds``: the responses; ``calls``: how many tools were run; ``seconds``: how long the run took."""

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
    """The tokens of all these responses together; one without usage adds none."""
    usages = [finished.usage for finished in rounds if finished.usage is not None]
    return RunUsage(
        input_tokens=sum(usage.input_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        cached_tokens=sum(usage.input_token_details.cached_tokens for usage in usages),
        new_tokens=sum(finished.kv.new for finished in rounds if finished.kv is not None),
    )
