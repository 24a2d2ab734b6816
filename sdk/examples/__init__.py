"""Agents to read and to run against a server, `holdfast serve pocket` say: each file is whole.

python -m holdfast.sdk.examples.tool_agent ws://127.0.0.1:8040
"""
