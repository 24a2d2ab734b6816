"""Other projects' load generators, unmodified, against a real server."""
