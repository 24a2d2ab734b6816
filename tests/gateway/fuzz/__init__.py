"""Frames and bodies made from the server's own documents, sent to a real server."""
