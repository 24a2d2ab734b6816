"""What can go wrong in the runtime: one tree, each leaf with a stable code that crosses the link.

RuntimeFault
├── ModelUnreadable           the model folder cannot be served
│   ├── ConfigInvalid         config.json: missing, broken, or a field out of bounds
│   ├── ShardMissing          no weights file, or not one that the index names
│   ├── TensorInvalid         a header, shape, dtype or range in a weights file is wrong
│   ├── AdapterInvalid        an adapter's folder cannot be served with this model
│   └── UnsupportedArchitecture
├── SettingsInvalid           engine settings that contradict themselves or the model
│   └── PoolTooSmall          the longest allowed sequence does not fit the block pool
├── VerbRefused               a verb that changed nothing
│   ├── SequenceUnknown
│   ├── SequenceExists
│   ├── SequenceBusy          extend or generate while the sequence generates
│   ├── EpochStale            the caller's epoch, or length, is not the sequence's
│   ├── LengthInvalid         a length or token id out of range
│   ├── ContextExceeded       more tokens than the model's context holds
│   ├── SamplingInvalid       sampling values or limits out of bounds
│   ├── GrammarUnavailable    the library that grammars need is not installed
│   ├── AdapterUnknown        no adapter of this name, or with these weights, is loaded
│   ├── AdapterExists         an adapter of this name is loaded
│   ├── AdapterLimit          as many adapters are loaded as may be, or none may
│   └── EngineOverloaded      too many sequences; come back later
├── GrammarFault              a reply cannot follow its grammar
│   ├── GrammarInvalid        it cannot be compiled, or not within the limits
│   └── GrammarStuck          with all else that is asked, it leaves no token
└── EngineGone                the engine cannot answer any more
    ├── EngineDied            it ended or raised; its sequences are lost with it
    ├── EngineStarved         a limit of process or machine keeps it from starting; it may start later
    ├── FrameInvalid          what came over the link is no message of it; the link is given up
    └── LinkClosed            this end closed the link

Knows nothing of wire errors or close codes: the gateway has that table.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self


class RuntimeFault(Exception):
    """Any failure of the runtime; ``code`` names its class on the link, such as ``pool_too_small``."""

    code: ClassVar[str] = "runtime_fault"

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def message(self) -> str:
        """What went wrong, in one line."""
        return str(self.args[0]) if self.args else self.code

    def copy(self) -> Self:
        """A new exception of the same class and text, for each raise: a shared one would collect the traceback
        of each caller."""
        return type(self)(self.message)


class ModelUnreadable(RuntimeFault):
    """The model folder cannot be served; the message names file and cause."""


class ConfigInvalid(ModelUnreadable):
    """A configuration file is missing, broken, or holds a field out of bounds."""


class ShardMissing(ModelUnreadable):
    """The weights are not there: neither a weights file nor an index, or not a file that the index names."""


class TensorInvalid(ModelUnreadable):
    """A weights file's header, or a tensor's shape, dtype or byte range, is wrong."""


class AdapterInvalid(ModelUnreadable):
    """An adapter's folder cannot be served with this model; the message names file, tensor or field, and cause.

    Also raised in the gateway by the call that loads an adapter while the engine serves.
    """


class UnsupportedArchitecture(ModelUnreadable):
    """The configuration names an architecture this engine does not compute."""


class SettingsInvalid(RuntimeFault):
    """Engine settings that contradict themselves or the model."""


class PoolTooSmall(SettingsInvalid):
    """The longest allowed sequence does not fit the block pool."""


class VerbRefused(RuntimeFault):
    """A verb was refused and changed nothing.

    Raised in the engine, which refuses it, and in the gateway by the call that sent it.
    """


class SequenceUnknown(VerbRefused):
    """No sequence has this id.

    The engine refuses a verb that names one; also raised in the gateway for a sequence of an engine that is
    dead.
    """


class SequenceExists(VerbRefused):
    """A sequence with this id is already open.

    The engine refuses to open another.
    """


class SequenceBusy(VerbRefused):
    """The sequence is generating: stop it first.

    The engine refuses to extend, generate, stage or settle meanwhile.
    """


class EpochStale(VerbRefused):
    """The caller's epoch, or length, is not the sequence's: what it knows of it is out of date.

    The caller is the gateway; the engine refuses its verb.
    """


class LengthInvalid(VerbRefused):
    """A length, a token count or a token id is out of range.

    The engine refuses the verb; also raised in the gateway for a verb that is too large to be sent.
    """


class ContextExceeded(VerbRefused):
    """The sequence would hold more tokens than the model's context.

    The engine refuses the verb that would bring them.
    """


class SamplingInvalid(VerbRefused):
    """Sampling values or limits are out of bounds.

    The engine refuses to generate.
    """


class GrammarUnavailable(VerbRefused):
    """The engine was installed without what grammars need; the message names the extra.

    It refuses to generate with a grammar.
    """


class AdapterUnknown(VerbRefused):
    """No adapter of this name, or with these weights, is loaded.

    The engine refuses to begin a sequence or a turn with it, or to unload it.
    """


class AdapterExists(VerbRefused):
    """An adapter of this name is loaded already.

    The engine refuses to load another one under it.
    """


class AdapterLimit(VerbRefused):
    """As many adapters are loaded as the engine may hold, or it was started without room for any.

    It refuses to load another one.
    """


class EngineOverloaded(VerbRefused):
    """The engine holds as many sequences as it may.

    It refuses to open another one; later it may have room.
    """


class GrammarFault(RuntimeFault):
    """A reply cannot follow its grammar: the turn ends, the sequence stays.

    The engine finds that after it has taken the verb, so this is the end of a generation and no refusal.
    """


class GrammarInvalid(GrammarFault):
    """The grammar cannot be compiled, or not within the limits of size and time."""


class GrammarStuck(GrammarFault):
    """The grammar, with bad words, biases and limits, leaves no token that may come next."""


class EngineGone(RuntimeFault):
    """The engine cannot answer any more.

    Raised in the gateway for pending and later verbs.
    """


class EngineDied(EngineGone):
    """The engine process ended or raised; its sequences are lost with it.

    Raised in the gateway for verbs that wait, or come before the next engine is loaded; in the engine, when the
    device is lost.
    """


class EngineStarved(EngineGone):
    """A limit of process or machine keeps the engine from starting, now; the message names the limit."""


class FrameInvalid(EngineGone):
    """What came over the link is no message of it: too large, cut or malformed. The link is given up.

    Raised by the end that received it, engine or gateway.
    """


class LinkClosed(EngineGone):
    """The link has ended.

    In the gateway: this end closed it, so pending and later verbs fail. In the engine: the gateway is gone, so
    nothing can be taken or sent.
    """


def fault_of(code: str, message: str) -> RuntimeFault:
    """The exception, with ``message``, of the class with the code ``code``; a plain ``RuntimeFault`` that
    names the code if no class has it."""
    kinds = [RuntimeFault]
    for kind in kinds:  # it grows: all classes of the tree follow
        if kind.code == code:
            return kind(message)
        kinds += kind.__subclasses__()
    return RuntimeFault(f"{code}: {message}")
