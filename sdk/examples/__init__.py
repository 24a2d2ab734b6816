"""Example agents to read and to run against a server such as `holdfast serve pocket`.

python -m holdfast.sdk.examples.tool_agent --url ws://127.0.0.1:8040
"""

from __future__ import annotations

import argparse


def asked_url(about: str | None) -> str | None:
    """The address that follows `--url` on the command line; None without it. `about`: what `--help` shows."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of the server; by default HOLDFAST_URL, or ws://127.0.0.1:8040")
    url: str | None = parser.parse_args().url
    return url
