"""Which sequences there are, in which status, and the order in which their turns run."""
