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
from .heartbeat import LOAD_STALL, STEP_FLOOR, Pulse
from .messages import AnyVerb, Hello, Phase, Refusal, Reply, Statistics, Step

Progress: TypeAlias = Callable[[float, str], None]
"""How much of loading is done, 0 to 1, and what is being done."""


class Serves(Protocol):
    """An engine, as the link sees it."""

    def apply(self, verb: AnyVerb) -> Reply | Refusal | None:
        """Let a verb take effect, or say why not; None: it takes a while, see ``Loaded.answers``."""
        ...

    def step(self) -> Step | None:
        """Advance; None where there is nothing to do until the next verb."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready, and how it introduces itself.

    ``due``: seconds after which it wants to step though no verb came, None for never. ``leave``: called when
    the other end has closed. ``answers``: replies to verbs that took a while, ready since it was last called.
    """

    engine: Serves
    hello: Hello
    due: Callable[[], float | None] = lambda: None
    leave: Callable[[], None] = lambda: None
    answers: Callable[[], list[Reply]] = list


Load: TypeAlias = Callable[[Progress, Pulse], Loaded]
"""Makes an engine; the pulse is for whatever in it knows how long a step will take."""


def serve(
    sock: socket.socket,
    load: Load,
    orphaned: Callable[[], None] = lambda: None,
    pulse: Pulse | None = None,
) -> None:
    """Load an engine and serve it on ``sock``, which it closes, until the other end closes.

    Raises what ``load`` or the engine raised, after a ``Fatal`` that names it. ``orphaned`` is called on the
    link thread when the other end closes; this returns after the step in flight, unless that hangs.
    """
    pulse = pulse or Pulse()
    uplink = EngineEnd(sock, pulse, orphaned)
    uplink.start()
    try:
        loaded = _load(load, uplink, pulse)
        pulse.enter(Phase.IDLE)
        _shorten(uplink, pulse)
        uplink.send(loaded.hello)
        try:
            _drive(loaded, uplink, pulse)
        except LinkClosed:
            loaded.leave()
    except LinkClosed:
        return
    except Exception as error:
        uplink.part(error if isinstance(error, RuntimeFault) else EngineDied(_text(error)))
        raise
    finally:
        uplink.close()


def _load(load: Load, uplink: EngineEnd, pulse: Pulse) -> Loaded:
    def progress(fraction: float, detail: str) -> None:
        uplink.check()  # nobody waits for it any more: stop loading
        pulse.enter(Phase.LOADING, LOAD_STALL, detail, fraction)

    progress(0.0, "starting")
    return load(progress, pulse)


def _drive(loaded: Loaded, uplink: EngineEnd, pulse: Pulse) -> None:
    engine, busy = loaded.engine, True
    while True:
        if not busy:
            pulse.enter(Phase.IDLE)
        verbs = uplink.take(wait=not busy, seconds=None if busy else loaded.due())
        pulse.enter(Phase.STEPPING, STEP_FLOOR)  # the runner knows better once there is a plan
        for verb in verbs:
            answer = _answer(engine, verb, uplink)
            if answer is not None:
                uplink.send(answer)
        step = engine.step()
        busy = step is not None
        for reply in loaded.answers():
            uplink.send(reply)
        if step is not None:
            pulse.enter(Phase.STEPPING, STEP_FLOOR)
            _shorten(uplink, pulse)
            if step.rows:  # a step that only prefilled is nothing to wake the gateway for
                pulse.release([row.seq for row in step.rows if row.finish is not None])
                uplink.send(step)


def _shorten(uplink: EngineEnd, pulse: Pulse) -> None:
    """Before what is sent next: a process that stops behind it must not look busy with what it has done."""
    beat = pulse.shortened()
    if beat is not None:
        uplink.send(beat)


def _answer(engine: Serves, verb: AnyVerb, uplink: EngineEnd) -> Reply | Refusal | None:
    answer = engine.apply(verb)
    if isinstance(verb, Statistics) and isinstance(answer, Reply):
        return msgspec.structs.replace(
            answer, statistics={**(answer.statistics or {}), **uplink.statistics()}
        )
    return answer


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
