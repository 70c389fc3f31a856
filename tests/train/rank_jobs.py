"""What the tests of `lowtide train` run on several ranks in processes of their own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from lowtide.distributed.ranks import Ranks
from lowtide.errors import LowtideError
from lowtide.train.folder import OutputFolder
from lowtide.train.run import _run
from lowtide.train.stopping import StopRequests
from lowtide.train.team import Team
from tests.train.runs import Heard, refuse_to_leave, small_recipe


def resume_where_one_sees_nothing(rank: int, folder: str) -> tuple[str, str]:
    """What each rank is told where the second one's folder does not show its checkpoints, as a network's may for a while."""
    own = Path(folder) / str(rank)
    own.mkdir()
    os.chdir(own)
    recipe = small_recipe(own, "model_settings.dropout=0.0", "device_memory=1500KiB", "checkpoints.every=2", "steps=2")
    team = Team(dist.group.WORLD, Ranks(dist.group.WORLD, torch.device("cpu")))  # type: ignore[arg-type]
    out = OutputFolder(Path("run"))
    _run(recipe, out, team, resume=False, watcher=Heard(), stop=StopRequests(recipe.faults.grace_s, refuse_to_leave))
    if rank:
        shutil.copytree("../0/run", "run", ignore=shutil.ignore_patterns("step-*"))
    try:
        _run(recipe, out, team, resume=True, watcher=Heard(), stop=StopRequests(recipe.faults.grace_s, refuse_to_leave))
    except LowtideError as error:
        return type(error).__name__, str(error)
    return "", ""
