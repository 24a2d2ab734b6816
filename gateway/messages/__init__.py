"""Anthropic Messages, a face for clients that send the whole conversation with each request."""
