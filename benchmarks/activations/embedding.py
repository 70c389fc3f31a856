"""One row: a tagger whose embedding is 128k x 4096, trained with the table on the host, or as plain torch does it.

python -m benchmarks.activations.embedding '{"name": "on the host", "kind": "managed", "batch": "8x1024"}'
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from benchmarks.suite import Row, answer

ROWS, WIDTH, CLASSES = 131_072, 4096, 64


class Tagger(nn.Module):
    """A table, one layer, and a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss: the class of a token is a function of its id."""
        logits = self.head(torch.tanh(self.table(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten() % CLASSES)


def run(row: Row) -> Row:
    """Train some steps on one batch, and report what the device held."""
    import lowtide

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
    model = Tagger().to(torch.bfloat16)
    table_bytes = model.table.weight.nbytes
    is_managed = row["kind"] == "managed"
    if not is_managed:
        model = model.to(device)
    # Steps large enough that bf16 weights move: the row shows that the table learns.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = None
    if is_managed:
        plan = lowtide.make_plan(
            model, weights={"*": "resident", "table": "host"}, update={"*": "device", "table": "host"}
        )
        session = lowtide.manage(model, optimizer, plan)
    rows, length = (int(part) for part in row["batch"].split("x"))
    ids = torch.randint(0, ROWS, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)
    times, losses = [], []
    for step in range(row.get("warm_up", 2) + row.get("steps", 5)):
        begun = time.perf_counter()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step >= row.get("warm_up", 2):
            times.append(time.perf_counter() - begun)
    result: Row = {
        **row,
        "table_bytes": table_bytes,
        "batch_rows_bytes": ids.numel() * WIDTH * 2,
        "step_s": times,
        "median_s": statistics.median(times),
        "losses": losses,
    }
    if device == "cuda":
        result["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if session is not None:
        result["stats"] = {key: value for key, value in session.stats().to_dict().items() if key != "chunks"}
        session.close()
    return result


if __name__ == "__main__":
    answer(run)
