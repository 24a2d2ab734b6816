"""The journal: what makes a session outlive its process. LMDB behind one thread; grouped sync commits.

Holds records (append-only operations on a session's history), the store file with its lock, checksums and
format version, the writer, and how a history is made again from its operations. Knows nothing of sockets or
frames, and nothing of KV: that is recomputed, or comes from the tiers.
"""
