"""Tests of everything together: client, server, engine."""
