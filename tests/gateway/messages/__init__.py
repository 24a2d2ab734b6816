"""Tests of `gateway/messages`."""
