"""The Realtime face: one WebSocket protocol over sessions."""
