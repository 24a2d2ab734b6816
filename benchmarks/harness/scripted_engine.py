"""An engine that computes nothing and recites words, a step whenever its client asks for one: a process that
speaks the link.

Run it with ``python -m`` and ``--pace``, as the program of a `ChildEngine`: then only the server's own cost is
measured. A step gives every running turn one word of the model's vocabulary; a turn ends at its limit of
tokens. A client asks for a step by `lockstep` when all have read the last one, so that no two steps are handled
at once however busy the machine is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.runtime.errors import EpochStale, SequenceUnknown, VerbRefused
from holdfast.runtime.link.engine_end import LoadedEngine, receive_settings, serve
from holdfast.runtime.link.messages import Hello
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Generate,
    Open,
    Refusal,
    Row,
    SequenceState,
    Statistics,
    Step,
    Stop,
    Truncate,
    VerbReply,
    Work,
)

WORD = re.compile(r"Ġ[a-z]{2,}")
"""The form of a token that is a whole word, as the vocabulary writes it."""
WORDS = 997
"""After so many words the recital begins again. The number is larger than the longest cycle that makes a server
end a reply as repetition."""
CONTEXT = 1 << 20
LOOK_SECONDS = 0.002
"""How long a step waits for a client to ask for it, before verbs that have come meanwhile are applied."""


@dataclass(slots=True)
class _Recital:
    """One sequence: its ``length`` in tokens and its ``epoch``; of its running turn, the tokens that are
    ``left`` and that were ``said``."""

    length: int
    epoch: int = 0
    left: int = 0
    said: int = 0

    def state(self, seq: int) -> SequenceState:
        return SequenceState(seq, self.length, self.length, self.epoch)


class ScriptedEngine:
    """A `ServedEngine` that recites. ``words``: token ids, recited in this order. ``pace``: a datagram socket;
    each number that comes there asks for a step, which is made when so many turns run."""

    def __init__(self, words: list[int], pace: socket.socket) -> None:
        self._words = words
        self._pace = pace
        self._wanted: int | None = None
        self._steps = 0
        self._sequences: dict[int, _Recital] = {}
        self._running: dict[int, _Recital] = {}

    def apply(self, verb: AnyVerb) -> VerbReply | Refusal:
        """Apply a verb, or refuse it. It knows no forks, leases and tiers."""
        try:
            return self._applied(verb)
        except VerbRefused as fault:
            return Refusal(verb.request, fault.code, fault.message)

    def step(self) -> Step | None:
        """A step with one token for every running turn; without rows if no client has asked for a step yet;
        None if no turn runs."""
        if not self._running:
            return None
        if self._wanted is None:
            with contextlib.suppress(TimeoutError):
                self._wanted = int(self._pace.recv(16))
        if self._wanted is None or len(self._running) < self._wanted:
            if self._wanted is not None:
                time.sleep(LOOK_SECONDS)
            return Step(self._steps, [])
        self._wanted = None
        self._steps += 1
        rows = [self._row(seq, recital) for seq, recital in self._running.items()]
        for row in rows:
            if row.finish is not None:
                del self._running[row.seq]
        return Step(self._steps, rows)

    def _applied(self, verb: AnyVerb) -> VerbReply:
        match verb:
            case Statistics():
                return VerbReply(verb.request, statistics={"steps": self._steps})
            case Open(seq=seq, tokens=tokens):
                self._sequences[seq] = _Recital(len(tokens))
            case Generate(seq=seq, opening=opening) if opening is not None:
                if opening.parent is not None:
                    raise SequenceUnknown("this engine forks no sequence")
                self._sequences[seq] = _Recital(0)
                self._begin(verb)
            case Generate():
                self._begin(verb)
            case Extend(seq=seq, tokens=tokens):
                self._of(seq).length += len(tokens)
            case Truncate(seq=seq, length=length):
                self._end(seq).length = length
            case Stop(seq=seq, keep=keep):
                recital = self._end(seq)
                recital.length = recital.length if keep is None else min(keep, recital.length)
            case Close(seq=seq):
                self._end(seq)
                del self._sequences[seq]
                return VerbReply(verb.request)
            case _:
                raise SequenceUnknown("this engine does not know the verb")
        return VerbReply(verb.request, self._of(verb.seq).state(verb.seq))

    def _begin(self, verb: Generate) -> None:
        recital = self._of(verb.seq)
        recital.length += len(verb.tokens)
        if verb.expect_length not in (None, recital.length - len(verb.tokens)):
            raise EpochStale("the sequence has another length")
        recital.epoch += 1
        recital.left, recital.said = verb.limits.max_tokens - verb.generated_from, 0
        self._running[verb.seq] = recital

    def _row(self, seq: int, recital: _Recital) -> Row:
        token = self._words[(seq + recital.said) % len(self._words)]
        recital.left, recital.said, recital.length = recital.left - 1, recital.said + 1, recital.length + 1
        if recital.left > 0:
            return Row(seq, recital.epoch, [token], recital.length)
        work = Work(recital.length - recital.said, 0, 0, recital.said)
        return Row(seq, recital.epoch, [token], recital.length, Finish.LENGTH, work)

    def _end(self, seq: int) -> _Recital:
        recital = self._of(seq)
        self._running.pop(seq, None)
        recital.epoch += 1
        return recital

    def _of(self, seq: int) -> _Recital:
        if seq not in self._sequences:
            raise SequenceUnknown(f"no sequence {seq}")
        return self._sequences[seq]


def loaded(model: str, pace: socket.socket) -> LoadedEngine:
    """A scripted engine with words of the model's vocabulary, shuffled by a fixed seed. ``pace``: a datagram
    socket at which steps are asked for."""
    folder = find_model(model)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = [token for text, token in vocabulary.items() if WORD.fullmatch(text)]
    random.Random(0).shuffle(words)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    hello = Hello(model, "none", "none", len(vocabulary), tuple(ends), CONTEXT, 16, CONTEXT // 16, 16, 0)
    return LoadedEngine(ScriptedEngine(words[:WORDS], pace), hello)


def main() -> None:
    """Serve the gateway on the socket ``--fd`` until it closes that."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace", type=Path, required=True, help="the socket at which steps are asked for")
    parser.add_argument("--fd", type=int, required=True)
    given, _ = parser.parse_known_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the gateway decides when to end
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=given.fd)
    settings, _ = receive_settings(sock)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as pace:
        pace.bind(str(given.pace))
        pace.settimeout(LOOK_SECONDS)
        serve(sock, lambda progress, liveness: loaded(settings.model, pace))


if __name__ == "__main__":
    main()
