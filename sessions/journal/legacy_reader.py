"""Reads a journal of formats 1 and 2 for `legacy`, in its own process, as LMDB ends its process on damage.

``python -I legacy_reader.py FOLDER`` reads lines ``TABLE KEY all|first`` from stdin. KEY is hexadecimal, or
``-`` for the first. For each line it writes the table's records from that key on, or only the next one, to
stdout: length of key and of value, 4 bytes each, key, value; then ``END``, and 0 if all could be read.
"""

from __future__ import annotations

import os
import struct
import sys

import lmdb

END = 0xFFFFFFFF
TABLES = 8


def answer(environment: lmdb.Environment, table: str, first: bytes, how: str) -> int:
    """Write the records of ``table`` from the key ``first`` on to stdout: all, or only the next one if
    ``how`` is "first". Returns 0, or 1 if not all could be read."""
    before = b""
    try:
        named = environment.open_db(table.encode(), create=False)
        with environment.begin(db=named) as transaction:
            cursor = transaction.cursor()
            found = cursor.set_range(first) if first else cursor.first()
            while found:
                key, value = cursor.item()
                if before and key <= before:  # a damaged tree that leads back to itself
                    return 1
                before = key
                send(struct.pack("<II", len(key), len(value)) + key + value)
                found = how != "first" and cursor.next()
    except lmdb.NotFoundError:
        return 0
    except lmdb.Error:
        return 1
    return 0


def send(record: bytes) -> None:
    """Write the bytes to stdout at once, without a buffer, as LMDB may end this process at the next page."""
    data = memoryview(record)
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Open the journal in the folder ``argv[1]``, and answer the lines on stdin until it ends."""
    environment = lmdb.open(sys.argv[1], readonly=True, lock=False, max_dbs=TABLES)
    for line in sys.stdin:
        table, first, how = line.split()
        whole = answer(environment, table, b"" if first == "-" else bytes.fromhex(first), how)
        send(struct.pack("<II", END, whole))


if __name__ == "__main__":
    main()
