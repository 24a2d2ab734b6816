"""The code of the Responses protocol, over HTTP and WebSocket, and of Conversations: it translates requests and
replies, stores responses, and runs turns by `gateway.transcripts`."""
