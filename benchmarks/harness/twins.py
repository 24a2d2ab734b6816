"""Two engines of ours in one process, one with little device KV and one with enough, as a worker; run with
``python -m``.

Both load the same toy model. The request `build` makes them, `speak` plays one turn on one of them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from holdfast.runtime.engine import Engine
from holdfast.runtime.settings import EngineSettings

from ..peers.worker import answer_all
from ..sessions import REAL
from .agents import TraceTurn
from .ours import Ours
from .talker import Talker, loaded, rest

Json = dict[str, Any]
VOCABULARY = 256  # of the smallest toy


class Twins(Ours):
    """The worker. Of the interface of `peers.worker.PeerEngine` only `load` is used."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path()
        self._dtype = ""
        self._talkers: dict[str, tuple[Engine, Talker]] = {}

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Remember the model's folder; `build` loads it."""
        torch.set_num_threads(threads)
        self._folder, self._dtype = folder, dtype
        return {"precision": {"weights": dtype, "kv": dtype}}

    def build(self, request: Json) -> Json:
        """Make the two engines: ``quarter`` with ``device`` blocks and a host tier for ``ample`` blocks,
        ``unlimited`` with ``ample`` blocks on the device. Gives their names."""
        sizes = {"quarter": (request["device"], request["ample"]), "unlimited": (request["ample"], 0)}
        for name, (blocks, below) in sizes.items():
            engine = self._loaded(blocks, below)
            talker = Talker(engine, REAL, VOCABULARY, request["seed"], lambda: time.sleep(0.0003))
            self._talkers[name] = engine, talker
        return {"engines": list(sizes)}

    def speak(self, request: Json) -> Json:
        """Play a turn on the engine that the request names. Gives the milliseconds to its first token, and how
        many tokens were prefilled."""
        engine, talker = self._talkers[request["engine"]]
        told = talker.turn(TraceTurn(**request["turn"]))
        rest(engine)
        return {"ttft_ms": 1e3 * told.seconds, "prefilled": told.work.prefilled + told.work.recomputed}

    def _loaded(self, blocks: int, below: int) -> Engine:
        settings = EngineSettings(
            model=str(self._folder),
            device="cpu",
            dtype=self._dtype,
            blocks=blocks,
            max_context=REAL.context,
            host_bytes=below * (1 << 18),
        )
        return loaded(settings)


if __name__ == "__main__":
    twins = Twins()
    answer_all(twins, {"build": twins.build, "speak": twins.speak})
