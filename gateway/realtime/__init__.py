"""The Realtime protocol over sessions: client events in, server events out, on one WebSocket."""
