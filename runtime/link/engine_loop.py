"""The engine's loop behind a socket: take the verbs, step, tell; one for both forms.

The calling thread is the device thread. Verbs take effect between two steps, in the order they came, and each
has its one answer before the rows of the step after it, but for one that asked to wait. What may fail inside
a sequence is the engine's business; what it raises here is its end. Knows nothing of models: ``load`` brings
the engine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from ..errors import EngineDied, LinkClosed, RuntimeFault
from .engine_end import EngineEnd
from .heartbeat import LOAD_STALL, STEP_FLOOR, Liveness
from .messages import AnyVerb, Hello, Phase, Refusal, Statistics, Step, VerbReply

Progress: TypeAlias = Callable[[float, str], None]
"""How much of loading is done, 0 to 1, and what is being done."""


class Serves(Protocol):
    """An engine, as the link sees it."""

    def apply(self, verb: AnyVerb) -> VerbReply | Refusal | None:
        """Let a verb take effect, or say why not; None: it takes a while, see ``LoadedEngine.answers``."""
        ...

    def step(self) -> Step | None:
        """Advance; None where there is nothing to do until the next verb."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready, and how it introduces itself.

    ``due``: seconds after which it wants to step though no verb came, None for never. ``leave``: called when
    the other end has closed. ``answers``: replies to verbs that took a while, ready since it was last called.
    """

    engine: Serves
    hello: Hello
    due: Callable[[], float | None] = lambda: None
    leave: Callable[[], None] = lambda: None
    answers: Callable[[], list[VerbReply]] = list


Load: TypeAlias = Callable[[Progress, Liveness], LoadedEngine]
"""Makes an engine; the liveness is for whatever in it knows how long a step will take."""


def serve(
    sock: socket.socket,
    load: Load,
    orphaned: Callable[[], None] = lambda: None,
    liveness: Liveness | None = None,
) -> None:
    """Load an engine and serve it on ``sock``, which it closes, until the other end closes.

    Raises what ``load`` or the engine raised, after a ``Fatal`` that names it. ``orphaned`` is called on the
    link thread when the other end closes; this returns after the step in flight, unless that hangs.
    """
    liveness = liveness or Liveness()
    uplink = EngineEnd(sock, liveness, orphaned)
    uplink.start()
    try:
        loaded = _load(load, uplink, liveness)
        liveness.enter(Phase.IDLE)
        _shorten(uplink, liveness)
        uplink.send(loaded.hello)
        try:
            _drive(loaded, uplink, liveness)
        except LinkClosed:
            loaded.leave()
    except LinkClosed:
        return
    except Exception as error:
        uplink.part(error if isinstance(error, RuntimeFault) else EngineDied(_text(error)))
        raise
    finally:
        uplink.close()


def _load(load: Load, uplink: EngineEnd, liveness: Liveness) -> LoadedEngine:
    def progress(fraction: float, detail: str) -> None:
        uplink.check()  # nobody waits for it any more: stop loading
        liveness.enter(Phase.LOADING, LOAD_STALL, detail, fraction)

    progress(0.0, "starting")
    return load(progress, liveness)


def _drive(loaded: LoadedEngine, uplink: EngineEnd, liveness: Liveness) -> None:
    engine, busy = loaded.engine, True
    while True:
        if not busy:
            liveness.enter(Phase.IDLE)
        verbs = uplink.take(wait=not busy, seconds=None if busy else loaded.due())
        liveness.enter(Phase.STEPPING, STEP_FLOOR)  # the runner knows better once there is a plan
        for verb in verbs:
            answer = _answer(engine, verb, uplink)
            if answer is not None:
                uplink.send(answer)
        step = engine.step()
        busy = step is not None
        for reply in loaded.answers():
            uplink.send(reply)
        if step is not None:
            liveness.enter(Phase.STEPPING, STEP_FLOOR)
            _shorten(uplink, liveness)
            if step.rows:  # a step that only prefilled is nothing to wake the gateway for
                liveness.release([row.seq for row in step.rows if row.finish is not None])
                uplink.send(step)


def _shorten(uplink: EngineEnd, liveness: Liveness) -> None:
    """Before what is sent next: a process that stops behind it must not look busy with what it has done."""
    beat = liveness.shortened()
    if beat is not None:
        uplink.send(beat)


def _answer(engine: Serves, verb: AnyVerb, uplink: EngineEnd) -> VerbReply | Refusal | None:
    answer = engine.apply(verb)
    if isinstance(verb, Statistics) and isinstance(answer, VerbReply):
        return msgspec.structs.replace(
            answer, statistics={**(answer.statistics or {}), **uplink.statistics()}
        )
    return answer


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
