"""Adapters to other agent packages. Each file needs one of them, which is an extra of ours.

`mcp`: tools of MCP servers for `chat.run`. `openai_agents`: a model for the openai-agents package.
"""
