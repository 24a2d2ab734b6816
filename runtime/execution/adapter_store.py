"""The adapters that are loaded, in host memory: reads them from their folders in a thread, and copies them into
the slots of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ...kvstore.options import expanded
from ..adapters import AdapterTable
from ..errors import AdapterInvalid, RuntimeFault
from ..model.adapter import AdapterMaps, AdapterWeights, fill_slot, read_adapter
from ..model.decoder import Decoder
from ..verbs import LoadAdapter, LoadedAdapter


class AdapterStore:
    """Adapters by the numbers that plans name. ``decoder``: has the slots; ``maps``: its maps; ``most_rank``:
    the highest rank that is served. ``namespace_of``: the namespace of the block keys, by an adapter's
    digest."""

    def __init__(
        self, decoder: Decoder, maps: AdapterMaps, most_rank: int, namespace_of: Callable[[bytes], bytes]
    ) -> None:
        self._weights = decoder.weights
        self._maps = maps
        self._most_rank = most_rank
        self._namespace_of = namespace_of
        self._adapters: dict[int, AdapterWeights] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._reading: list[tuple[LoadAdapter, Future[AdapterWeights]]] = []

    def read(self, path: str) -> AdapterWeights:
        """Read the adapter in the folder ``path``. Raises ``AdapterInvalid``."""
        return read_adapter(expanded(path), self._maps, self._most_rank)

    def begin(self, verb: LoadAdapter) -> None:
        """Begin to read an adapter beside the steps; `done` returns it."""
        self._reading.append((verb, self._reader.submit(self.read, verb.path)))

    @property
    def busy(self) -> bool:
        """Whether an adapter is being read, or was and waits for `done`."""
        return bool(self._reading)

    def done(self) -> list[tuple[LoadAdapter, AdapterWeights | RuntimeFault]]:
        """The adapters that have been read since the last call, or why they cannot be."""
        done = [(verb, job) for verb, job in self._reading if job.done()]
        self._reading = [one for one in self._reading if one not in done]
        return [(verb, _result(verb, job)) for verb, job in done]

    def add(self, table: AdapterTable, name: str, path: str, read: AdapterWeights) -> LoadedAdapter:
        """Hold an adapter that was read, by the number that ``table`` gives it. Returns what the gateway is
        told of it. Raises what `AdapterTable.add` does."""
        number = table.add(name, read.digest, self._namespace_of(read.digest)).number
        self._adapters[number] = read
        return LoadedAdapter(name, path, read.digest, read.rank, read.bytes)

    def drop(self, number: int) -> None:
        """Let an adapter go."""
        del self._adapters[number]

    def fill(self, slot: int, number: int) -> None:
        """Copy an adapter into a slot of the decoder."""
        fill_slot(self._weights, slot, self._adapters[number])

    def close(self) -> None:
        """End the thread that reads."""
        self._reader.shutdown(wait=False, cancel_futures=True)


def _result(verb: LoadAdapter, job: Future[AdapterWeights]) -> AdapterWeights | RuntimeFault:
    try:
        return job.result()
    except RuntimeFault as fault:
        return fault
    except Exception as error:  # of a library, or for want of memory
        told = " ".join(str(error).split())[:160]
        return AdapterInvalid(f"{verb.path}: {type(error).__name__}: {told}")
