"""What runs in sandboxes, by their own Python, 3.8 or newer: only the standard library, and each other's names.

`workers.sandbox.server_text` makes one program of these modules: their names share one space.
"""

from __future__ import annotations
