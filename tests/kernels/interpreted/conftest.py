"""These run in a process of their own with triton's interpreter: see
``tests/kernels/gpu/test_interpreted.py``.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
