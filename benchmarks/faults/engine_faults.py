"""Faults of the engine behind a server that stays: killed, stopped, killed while it loads, hung, poisoned.

One function per row of the table of `bench`. Each runs a server of its own in this process, its engine in a
child.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.errors import EngineGone
from holdfast.runtime.link.child import PROGRAM
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import connect
from holdfast.sessions.text.language import Language

from . import marked_child
from .crowd import STORY, WEDGED_SECONDS, Crowd, FaultTally, HeardReply, Talk, listen

POCKET = EngineSettings(model="pocket", dtype="float32", blocks=2048, max_context=2048, debug=True)
"""Engine settings in float32, in which tokens that are computed again must be the same."""

SERVED = GatewaySettings(port=0, recovery_seconds=WEDGED_SECONDS)
"""Gateway settings that wait long for another engine, because how long that takes to load depends on the
machine."""

SOON = (0.05,)
"""Seconds before each restart."""

MARK = "~"
"""A word that is one token, and that the pocket model never says by itself."""

Strike = Callable[[ChildEngine, random.Random], Awaitable[None]]


@asynccontextmanager
async def server(program: Sequence[str] = PROGRAM) -> AsyncIterator[Serving]:
    engine = ChildEngine(POCKET, delays=SOON, program=program)
    async with serving(SERVED, POCKET, engine=engine) as running:
        yield running


async def killed(engine: ChildEngine, rng: random.Random) -> None:
    """Kill the engine (``kill -9``). ``rng`` is not used."""
    engine.kill()


async def stopped(engine: ChildEngine, rng: random.Random) -> None:
    """Stop the engine (SIGSTOP): the process lives and answers nothing. ``rng`` is not used."""
    if engine.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGSTOP)


async def killed_twice(engine: ChildEngine, rng: random.Random) -> None:
    """Kill the engine (``kill -9``), and the next one while it loads."""
    engine.kill()
    await asyncio.sleep(rng.uniform(0.2, 1.5))
    if not engine.link.ready:
        engine.kill()


async def disturbed(fault: str, strike: Strike, tries: int, seed: int) -> FaultTally:
    """Run a server, and let clients talk, ``tries`` times, each time with a fault at the engine at a random
    moment. ``fault``: its name in the table. ``strike``: causes it."""
    async with server() as running:
        return await struck(running, fault, strike, tries, seed)


async def struck(running: Serving, fault: str, strike: Strike, tries: int, seed: int) -> FaultTally:
    """Let clients talk to this server, ``tries`` times, each time with a fault at a random moment. ``fault``:
    its name in the table. ``strike``: causes it."""
    tally, rng = FaultTally(fault), random.Random(seed)
    async with connect(running.url) as client:
        crowd = Crowd(client)
        await crowd.rehearse()
        for _ in range(tries):
            talking = asyncio.create_task(crowd.talk(tally))
            await asyncio.sleep(rng.uniform(0.0, crowd.seconds))
            await strike(running.engine, rng)
            await talking
            await running.engine.link.wait_ready()
            tally.tries += 1
    return tally


async def hung(tries: int, seed: int) -> FaultTally:
    """Let a step of the engine hang, from a random moment on, so many times: the stacks must be saved, and the
    replies go on with the next engine."""
    tally, rng = FaultTally("engine hangs in a step"), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder) / "met"
        flag.touch()
        async with server(marked_child.program("hang", flag=flag)) as running:
            async with connect(running.url) as client:
                crowd = Crowd(client)
                await crowd.rehearse()
                for _ in range(tries):
                    talking = asyncio.create_task(crowd.talk(tally))
                    await asyncio.sleep(rng.uniform(0.0, 0.8 * crowd.seconds))
                    flag.unlink()
                    await talking
                    while not flag.exists():  # all replies had ended before: the next ones meet it
                        await crowd.talk(tally)
                    tally.tries += 1
            saved = [death for death in running.engine.link.deaths if "hang_for_ever" in death.stacks]
            if len(saved) != tries:
                tally.wrong += 1
                tally.notes.append(f"{len(saved)} stacks of {tries} name the line that hangs")
    return tally


async def poisoned(tries: int, others: int = 15) -> FaultTally:
    """Let one sequence kill every engine that computes it, beside ``others`` sequences, so many times: it must
    fail by name, and the others go on."""
    tally = FaultTally(f"one of {others + 1} kills the engine on every try")
    async with server(marked_child.program("exit", marked())) as running, connect(running.url) as client:
        crowd = Crowd(client, [Talk((STORY,), {"seed": n, "temperature": n % 3 / 2}) for n in range(others)])
        await crowd.rehearse()
        for _ in range(tries):
            culprit = asyncio.create_task(listen(client, Talk((f"{MARK} {STORY}",))))
            await crowd.talk(tally)
            blamed: list[HeardReply] = await culprit
            tally.tries += 1
            if blamed[-1].error != "sequence_poisoned":
                tally.wrong += 1
                tally.notes.append(f"the culprit: {blamed[-1]}")
            with suppress(EngineGone):
                await running.engine.link.wait_ready()
    return tally


def marked() -> int:
    """The token id of `MARK`."""
    (token,) = Language.load(find_model("pocket")).tokenizer.encode(MARK, leads=False)
    return int(token)
