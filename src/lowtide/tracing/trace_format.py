"""What a saved trace consists of: the parts that it must have, and the columns of its tables."""

from __future__ import annotations

FORMAT = "lowtide.step_trace"

SCALARS = ("model", "origin", "num_parameters", "start_allocated_bytes", "start_reserved_bytes")
TARGET = ("card", "torch_version", "context_bytes", "capacity_bytes")
TABLES = {
    "ops": ("name", "module", "source", "phase", "seconds"),
    "allocations": (
        *("requested_bytes", "bytes", "category", "module", "op", "source", "shape", "dtype"),
        *("phase", "born", "died", "num_uses"),
    ),
    "events": ("allocation", "is_free", "op", "phase", "allocated_change", "reserved_change"),
}
KEYS = ("format", "schema_version", *SCALARS, "target", "settings", "notes", *TABLES, "uses", "strings", "shapes")
ABOUT = "about"
"""The part that older files do not have."""
AGAIN = "save the trace again, or take it from an undamaged copy"
