"""The code of Anthropic's Messages protocol, for clients that send the whole conversation with each request."""
