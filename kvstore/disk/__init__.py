"""The disk tier: a process of its own around an LMDB environment. Only it ever waits for the disk."""
