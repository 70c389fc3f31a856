"""The example for Ray Train, on two local workers: the losses of one process, also after a worker was killed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ray_train.py"
NEWEST = 10
"""The step of the checkpoint that the example goes on from."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is missing, whose half a GiB the development environment does without; pip install 'ray[train]'",
    ),
]

KILLED_ONCE = """
import os, signal, sys
import ray.train
import ray_train

def train(settings):
    batch_of, marker = ray_train.batch_of, settings["folder"] + "_was_killed"

    def or_die(step):
        if step == 12 and ray.train.get_context().get_world_rank() == 1 and not os.path.exists(marker):
            open(marker, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch_of(step)

    ray_train.batch_of = or_die
    return ray_train.train(settings)

losses = ray_train.trainer(train, sys.argv[1]).fit().return_value
assert os.path.exists(sys.argv[1] + "/checkpoints_was_killed")
for loss in losses:
    print(f"loss {loss:.7f}")
"""


@pytest.fixture
def short() -> Iterator[str]:
    """A folder for Ray's sockets, whose paths may have some hundred characters."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder


def losses_of(*command: str, home: Path, temporary: str) -> list[float]:
    # Ray keeps settings in the home folder, and its raylets hand this environment on to the workers.
    around = {"HOME": str(home), "RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0"}
    paths = os.pathsep.join([str(EXAMPLE.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=home, env={**os.environ, **around, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(found) for found in re.findall(r"^(?:step \d+: )?loss (\S+)$", done.stdout, flags=re.MULTILINE)]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of_plain_torch() -> list[float]:
    """One process on whole batches."""
    module = example()
    model, optimizer = module.build()
    losses = []
    for step in range(20):
        ids = module.batch_of(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_two_workers_train_as_one_process(tmp_path: Path, short: str) -> None:
    losses = losses_of(str(EXAMPLE), home=tmp_path, temporary=short)
    plain = losses_of_plain_torch()
    assert losses == pytest.approx(plain, rel=1e-5, abs=0)
    assert plain[-1] < 0.8 * plain[0]


def test_they_go_on_from_the_last_checkpoint(tmp_path: Path, short: str) -> None:
    losses = losses_of("-c", KILLED_ONCE, str(tmp_path), home=tmp_path, temporary=short)
    assert losses == pytest.approx(losses_of_plain_torch()[NEWEST:], rel=1e-5, abs=0)
