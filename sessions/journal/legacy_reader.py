"""Reads a journal of formats 1 and 2 for `legacy`, in a process of its own: LMDB ends its process on damage.

``python -I legacy_reader.py FOLDER``: for each line ``TABLE KEY all|each|first`` on stdin it writes the table's
records from that key on (in hexadecimal, ``-``: from the first), or the next one, to stdout: length of key
and value, 4 bytes each, key, value; at the end ``END``, and 0 if all of them could be read.
"""

from __future__ import annotations

import os
import struct
import sys

import lmdb

END = 0xFFFFFFFF
BATCH = 64
TABLES = 8


def answer(environment: lmdb.Environment, table: str, first: bytes, how: str) -> int:
    """Write the records; 1 where not all of them could be read."""
    batch: list[bytes] = []
    whole, before = 0, b""
    try:
        named = environment.open_db(table.encode(), create=False)
        with environment.begin(db=named) as transaction:
            cursor = transaction.cursor()
            found = cursor.set_range(first) if first else cursor.first()
            while found:
                key, value = cursor.item()
                if before and key <= before:  # a tree that leads back to itself
                    whole = 1
                    break
                before = key
                batch.append(struct.pack("<II", len(key), len(value)) + key + value)
                if len(batch) == BATCH or how == "each":
                    send(batch)
                found = how != "first" and cursor.next()
    except lmdb.NotFoundError:
        pass
    except lmdb.Error:
        whole = 1
    send(batch)
    return whole


def send(batch: list[bytes]) -> None:
    """Write it all now: this process may end at the next page."""
    data = memoryview(b"".join(batch))
    batch.clear()
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Answer until stdin ends."""
    environment = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=TABLES)
    for line in sys.stdin:
        table, first, how = line.split()
        whole = answer(environment, table, b"" if first == "-" else bytes.fromhex(first), how)
        send([struct.pack("<II", END, whole)])


if __name__ == "__main__":
    main()
