"""The Chat Completions face: transport only, over `gateway.transcripts`. Also the older Completions."""
