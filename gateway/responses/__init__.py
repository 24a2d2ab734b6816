"""The Responses face: transport only, over `gateway.transcripts`. Also Conversations."""
