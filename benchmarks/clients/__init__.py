"""Load generators of others, unmodified, against a real server."""
