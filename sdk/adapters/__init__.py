"""Bridges to packages that agents are written with elsewhere; each file needs one of them, an extra of ours.

`mcp`: tools of MCP servers for `chat.run`. `openai_agents`: a model for the openai-agents package.
"""
