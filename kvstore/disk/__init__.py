"""The disk tier: a process of its own around an LMDB environment, which may die.

``keeper`` starts it, kills it and reaps it, beside the engine; ``client`` is the engine's end, ``rising`` what
is on its way up there, ``patience`` how long it waits, ``messages`` what crosses between them; ``serve`` is the
process, ``store`` its file, ``lock`` who has that, ``record`` what stands in it, ``order`` which record goes
first, ``places`` where payloads lie, so that they are read ahead; ``shortcut`` reads what lies in memory from
there, past the process, ``pagecache`` has it there; ``holes`` gives the file's free pages back to the disk;
``upkeep`` is for the operator.
Knows keys, slots and bytes; no sequences, no tensors. Nothing here waits for a disk but the process itself.
"""
