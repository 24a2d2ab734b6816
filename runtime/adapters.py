"""Adapters as the scheduler knows them: which are loaded, under which names, and which has a slot of the model.

More adapters can be loaded than there are slots. In each step slots are given to the adapters of running
turns, in the order of turns; a turn that gets none has no row in the step. So the first turn always has a
slot. A slot keeps its adapter until another adapter needs it; then the adapter that was used longest ago
loses its slot. No tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .errors import AdapterExists, AdapterLimit, AdapterUnknown


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter that is loaded, or that turns still use. ``number``: stands for it in plans; ``digest``: of
    its weights; ``namespace``: of its block keys. ``names``: those under which it is loaded; none: it was
    unloaded. ``slot_number``: of the slot where its weights are, or will be before the next rows; None: in host
    memory alone."""

    number: int
    digest: bytes
    namespace: bytes
    names: set[str] = field(default_factory=set)
    slot_number: int | None = None


@dataclass(frozen=True, slots=True)
class SlotFill:
    """Copy the adapter with this ``number`` into a slot, before a step's rows."""

    slot: int
    number: int


class AdapterTable:
    """The adapters of one engine. ``slots``: how many of them rows of one step can have; ``most``: how many can
    be loaded."""

    def __init__(self, slots: int = 0, most: int = 0) -> None:
        self._slots = slots
        self._most = most
        self._names: dict[str, Adapter] = {}
        self._adapters: dict[bytes, Adapter] = {}
        self._held: OrderedDict[int, Adapter] = OrderedDict()  # by slot; the longest without a row first
        self._served: dict[Adapter, None] = {}  # those of running turns that have slots
        self._lent: dict[Adapter, None] = {}  # of idle sequences, with slots in the step that is planned
        self._fills: dict[int, Adapter] = {}
        self._numbers = 0
        self._swaps = 0

    @property
    def in_use(self) -> bool:
        """Whether a sequence may have an adapter."""
        return bool(self._adapters)

    # --- what is loaded -------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> Adapter | None:
        """The adapter with these weights; None for the empty digest. Raises ``AdapterUnknown``."""
        if not digest:
            return None
        adapter = self._adapters.get(digest)
        if adapter is None or not adapter.names:
            raise AdapterUnknown(f"no adapter with the digest {digest.hex()[:16]} is loaded")
        return adapter

    def check_new(self, name: str) -> None:
        """Raise ``AdapterExists`` or ``AdapterLimit`` if no adapter can be loaded under this name."""
        if not self._slots:
            raise AdapterLimit("the engine has no room for adapters: start it with --enable-lora")
        if name in self._names:
            raise AdapterExists(f"adapter {name!r} is loaded already: unload it first")
        if len(self._names) >= self._most:
            raise AdapterLimit(f"{len(self._names)} adapters are loaded, as many as --max-cpu-loras allows")

    def add(self, name: str, digest: bytes, namespace: bytes) -> Adapter:
        """Note that an adapter was loaded. One with the same weights may be there, under another name. Raises
        what `check_new` does."""
        self.check_new(name)
        adapter = self._adapters.get(digest)
        if adapter is None:
            self._numbers += 1
            adapter = self._adapters[digest] = Adapter(self._numbers, digest, namespace)
        adapter.names.add(name)
        self._names[name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Unload an adapter: no turn begins with it any more. Its weights stay until `sweep` finds that no turn
        uses them. Raises ``AdapterUnknown``."""
        adapter = self._names.pop(name, None)
        if adapter is None:
            raise AdapterUnknown(f"no adapter {name!r} is loaded")
        adapter.names.discard(name)

    def sweep(self, used: Iterable[Adapter | None]) -> list[int]:
        """Forget the adapters that were unloaded, but those that turns use. Returns their numbers. ``used`` is
        not looked at if none was unloaded."""
        unloaded = {one for one in self._adapters.values() if not one.names}
        gone = unloaded.difference(used) if unloaded else ()
        for adapter in gone:
            del self._adapters[adapter.digest]
            self._served.pop(adapter, None)
            if adapter.slot_number is not None:
                self._leave(adapter.slot_number)
        return [adapter.number for adapter in gone]

    # --- slots ----------------------------------------------------------------------------------------------

    def serve(self, wanted: Iterable[Adapter | None]) -> None:
        """Give slots to the adapters of the turns that run, ``wanted``, in their order, as far as the slots go.
        They keep them until this is called again."""
        found = dict.fromkeys(one for one in wanted if one is not None)
        self._served = dict.fromkeys(list(found)[: self._slots])
        for adapter in self._served:
            self._enter(adapter)

    def serves(self, adapter: Adapter | None) -> bool:
        """Whether a row with this adapter can be in the step that is planned."""
        return adapter is None or adapter in self._served

    def lend(self, adapter: Adapter | None) -> bool:
        """Give a slot for this step to the adapter of a sequence without a turn, if no turn needs it. Returns
        whether it has one."""
        if adapter is None or adapter in self._served or adapter in self._lent:
            return True
        if not adapter.names or len(self._served) + len(self._lent) >= self._slots:
            return False
        self._lent[adapter] = None
        self._enter(adapter)
        return True

    def fills(self) -> tuple[SlotFill, ...]:
        """What is to be copied into slots before the rows of the plan that goes out now."""
        made = tuple(SlotFill(slot, adapter.number) for slot, adapter in self._fills.items())
        self._fills.clear()
        self.take_back()
        return made

    def take_back(self) -> None:
        """Note that the step is planned, with rows or without: what was lent to idle sequences may be taken."""
        self._lent.clear()

    def forget(self) -> None:
        """Note that a step has failed: the slots may hold anything, and are filled again when they are used."""
        self._fills = dict(self._held)

    def _enter(self, adapter: Adapter) -> None:
        if adapter.slot_number is not None:
            self._held.move_to_end(adapter.slot_number)
            return
        adapter.slot_number = slot = self._free_slot()
        self._held[slot] = self._fills[slot] = adapter
        self._swaps += 1

    def _free_slot(self) -> int:
        """A slot without an adapter. If there is none, the adapter that had no row for longest, of those that
        no running turn has, loses its own."""
        if len(self._held) == self._slots:
            pinned = self._served.keys() | self._lent.keys()
            self._leave(next(slot for slot, holder in self._held.items() if holder not in pinned))
        return next(slot for slot in range(self._slots) if slot not in self._held)

    def _leave(self, slot: int) -> None:
        self._held.pop(slot).slot_number = None
        self._fills.pop(slot, None)

    def statistics(self) -> dict[str, float]:
        """How many adapters are loaded, how many slots there are and have one, and how often one was filled."""
        return {
            "adapters": len(self._names),
            "adapter_slots": self._slots,
            "adapter_slots_held": len(self._held),
            "adapter_swaps": self._swaps,
        }
