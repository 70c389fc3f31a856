"""The caller of a prediction never loads what only the tracing subprocess needs: ghosts, and scipy with them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_TRACED = """
import torch
from torch import nn
import lowtide
lowtide.trace(nn.Linear(4, 4), torch.ones(2, 4), loss=lambda model, batch: model(batch).sum())
"""


@pytest.mark.parametrize("code", ["import lowtide.cli.main", _TRACED], ids=["cli", "trace"])
def test_the_caller_loads_no_ghosts(code: str) -> None:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in loaded if name == "scipy" or name.startswith("lowtide.tracing.ghost")] == []
