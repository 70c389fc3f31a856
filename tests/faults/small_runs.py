"""Training runs of a few thousand parameters that save as they go, and write down what they were told.

The journal has a line for each start, loss and checkpoint that was reported as saved. Its lines are written at once, so that a
killed run has all that it had come to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.models.gpt import GPT, GPTConfig
from lowtide.runtime.checkpoints.folder import RunFolder

CONFIG = GPTConfig(vocab_size=32, context_length=8, num_layers=2, hidden_size=16, num_heads=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """How a run is trained, through a session of the user's own loop."""

    name: str
    steps: int = 20
    every: int = 3
    """Steps between two saves."""
    place: str = "host"
    """Where updates run; weights are streamed, but for `resident` and `device`."""
    schedule: str = "deferred"
    precision: str | None = None
    moments: str = "fp32"
    allowance: str | None = "64KiB"
    device_memory: str = "1MiB"
    host_memory: str = "64MiB"
    seed: int = 5


RUNS = {
    run.name: run
    for run in (
        SmallRun(name="updates on the host"),
        SmallRun(name="in backward", schedule="in_backward", precision="bf16 stochastic", moments="8bit"),
        SmallRun(name="a tight allowance", schedule="in_backward", allowance="8KiB"),
        SmallRun(name="spread", place="spread", precision="bf16 exact", allowance="auto"),
        SmallRun(name="a save that is waited for", place="resident", allowance=None),
    )
}


class Journal:
    """Lines of JSON, appended one system call each."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def add(self, kind: str, step: int, value: Any = None) -> None:
        """Write a line."""
        self._file.write((json.dumps([kind, step, value]) + "\n").encode())

    def close(self) -> None:
        """End."""
        self._file.close()

    @staticmethod
    def lines(path: Path) -> list[tuple[str, int, Any]]:
        """What was written."""
        if not path.exists():
            return []
        return [(kind, step, value) for kind, step, value in map(json.loads, path.read_text().splitlines())]


class Training:
    """The objects of a run in one process.

    Args:
        run: How it is trained.
        folder: Gets the checkpoints, and beside them the journal.
    """

    def __init__(self, run: SmallRun, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.journal = Journal(journal_of(folder))
        torch.manual_seed(run.seed)
        dtype = torch.float32 if run.precision is None else torch.bfloat16
        self.model = GPT(CONFIG).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * run.steps)
        self.generator = torch.Generator().manual_seed(run.seed)
        settings: dict[str, Any] = {}
        if run.precision is not None:
            settings = {"precision": run.precision, "moments": run.moments, "seed": run.seed}
        self.session = lowtide.manage(self.model, self.optimizer, self._plan(), device="cpu", **settings)
        self.pending: int | None = None
        """The step of a save that is not reported yet."""

    def _plan(self) -> Any:
        places: dict[str, dict[str, Any]] = {
            "host": {"weights": "streamed", "update": "host"},
            "spread": {"weights": "streamed", "update": 0.5},
            "device": {"weights": "resident", "update": "device"},
            "resident": {"weights": "resident", "update": "host"},
        }
        budgets = {"device_memory": self.run.device_memory, "host_memory": self.run.host_memory}
        return lowtide.make_plan(self.model, schedule=self.run.schedule, **budgets, **places[self.run.place])

    @property
    def state(self) -> dict[str, object]:
        """What belongs to the run beside the session."""
        return {"scheduler": self.scheduler, "data": self.generator}

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        step = 0
        if RunFolder(self.folder).checkpoints():
            step = lowtide.load(self.folder, self.session, state=self.state).step
            assert step == self.session.num_steps
        self.journal.add("start", step)

    def batch(self) -> torch.Tensor:
        """The next tokens."""
        return torch.randint(CONFIG.vocab_size, (2, CONFIG.context_length), generator=self.generator)

    def step(self) -> None:
        """One update; its loss goes to the journal when the optimizer was told."""
        ids = self.batch()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.journal.add("loss", self.session.num_steps, float(loss.detach()))

    def save(self) -> None:
        """Begin a checkpoint; the one before it is whole then."""
        step = self.session.num_steps
        self.session.save(self.folder, state=self.state, allowance=self.run.allowance)
        self.report()
        self.pending = step
        if self.run.allowance is None:
            self.report()

    def close(self) -> None:
        """Close the session, which waits for its save."""
        self.session.close()
        self.report()
        self.journal.close()

    def report(self) -> None:
        """The save under way is over, and it went well."""
        if self.pending is not None:
            self.journal.add("saved", self.pending)
            self.pending = None

    def to_the_end(self, beside: Callable[[Training], None] = lambda _: None) -> None:
        """Train to the last step, saving now and then.

        Args:
            beside: Called before each step.
        """
        while self.session.num_steps < self.run.steps:
            beside(self)
            self.step()
            if self.session.num_steps % self.run.every == 0:
                self.save()
            elif self.session.num_steps % 7 == 0:
                self.session.wait_for_save()
                self.report()
        self.session.close()
        self.report()
        self.journal.add("end", self.run.steps, self.digest())
        self.journal.close()

    def digest(self) -> str:
        """A hash of all that the model and the optimizer keep."""
        found = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            found.update(name.encode() + value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for parameter in self.model.parameters():
            for name, value in sorted(self.optimizer.state[parameter].items()):
                found.update(f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}".encode())
        return found.hexdigest()[:16]


def journal_of(folder: Path) -> Path:
    """Beside the run's folder, which has nothing but checkpoints."""
    return folder.with_name(f"{folder.name}.journal")


def described(run: SmallRun) -> dict[str, Any]:
    """For a job."""
    return asdict(run)
