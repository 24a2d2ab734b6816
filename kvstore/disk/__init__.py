"""The disk tier: records in an LMDB file, kept by a process of its own. Only that process ever waits for the
disk."""
