"""A real server with `scripted_engine` instead of its engine; run it with ``python -m``, end it with SIGTERM.

The gateway is that of ``holdfast serve``, with the journal in the folder ``--store`` and the same use of the
garbage collector.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from holdfast.gateway.cli.collector import Collector
from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings

MODEL = "pocket"


async def run(pace: Path, store: Path) -> None:
    """Serve until SIGTERM. The server's address is printed on stderr, as by ``holdfast serve``. ``pace``: the
    socket at which steps of the engine are asked for. ``store``: the journal's folder."""
    left = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, left.set)
    settings = EngineSettings(model=MODEL, device="cpu", host_bytes=0)
    program = (sys.executable, "-m", f"{__package__}.scripted_engine", "--pace", str(pace))
    engine = ChildEngine(settings, program=program)
    async with serving(GatewaySettings(port=0, store=store), settings, engine=engine) as running:
        collecting = asyncio.create_task(Collector(lambda: running.service.turns.running > 0).run())
        print(f"serving at {running.url}", file=sys.stderr, flush=True)
        await left.wait()
        collecting.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace", type=Path, required=True, help="the engine's socket for `lockstep`")
    parser.add_argument("--store", type=Path, required=True)
    chosen = parser.parse_args()
    asyncio.run(run(chosen.pace, chosen.store))
