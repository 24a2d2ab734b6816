"""Example agents to read and to run against a server such as `holdfast serve pocket`.

python -m holdfast.sdk.examples.tool_agent ws://127.0.0.1:8040
"""
