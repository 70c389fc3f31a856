"""The benchmark of ranks: what its figures are of, its rows with a tiny model, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ranks import row as rows
from benchmarks.ranks.run import SCHEMA, SUITES
from benchmarks.ranks.tables import beside_peers, largest_difference
from lowtide.distributed.launch import run_on_ranks
from lowtide.errors import BadRecordError

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_covered_bytes_are_counted_once(found: list[tuple[int, int]]) -> None:
    ranges = [(begin, begin + size) for begin, size in found]
    assert rows.covered_bytes(ranges) == len({byte for begin, end in ranges for byte in range(begin, end)})


def test_bytes_of_tensors_are_those_of_their_storages() -> None:
    before = rows.tensor_bytes()
    whole = torch.empty(1 << 20)
    views = [whole[:7], whole.view(1 << 10, 1 << 10), torch.from_numpy(whole.numpy()[100:200])]
    assert rows.tensor_bytes() - before == 4 * MIB
    del whole, views
    assert rows.tensor_bytes() == before


def test_the_highest_resident_size_can_be_forgotten() -> None:
    block = torch.ones(64 * MIB)
    del block
    high = rows.highest_resident_bytes()
    rows.forget_highest()
    assert rows.highest_resident_bytes() < high - 100 * MIB
    before = rows.resident_bytes()
    block = torch.ones(64 * MIB)
    assert rows.resident_bytes() - before == pytest.approx(block.nbytes, rel=0.05)
    assert rows.highest_resident_bytes() - before == pytest.approx(block.nbytes, rel=0.05)


def test_ranks_have_the_rows_of_one_batch() -> None:
    job = {"model": "tiny", "rows": 6}
    whole = rows.rows_of(job, 3, 0, 1)
    assert whole.shape == (6, 16)
    assert torch.equal(torch.cat([rows.rows_of(job, 3, rank, 3) for rank in range(3)]), whole)
    assert not torch.equal(whole, rows.rows_of(job, 4, 0, 1))


def test_a_row_has_the_means_of_losses_and_the_most_of_bytes_and_times() -> None:
    one = {"losses": [1.0, 2.0], "step_s": [3.0, 1.0], "cpu_s": [1.0, 1.0], "peak_bytes": 5, "deepspeed": "1"}
    other = {"losses": [2.0, 4.0], "step_s": [1.0, 2.0], "cpu_s": [2.0, 4.0], "peak_bytes": 7, "deepspeed": "1"}
    assert rows.together([one, other]) == {
        "losses": [1.5, 3.0],
        "step_s": [3.0, 2.0],
        "median_s": 2.5,
        "cpu_s": [1.5, 2.5],
        "median_cpu_s": 2.0,
        "peak_bytes": 7,
        "deepspeed": "1",
    }


def test_a_model_that_is_not_spread_is_no_result() -> None:
    job = {"model": "36m", "collective": "gather"}
    whole = 12 * rows.num_parameters(job)
    rows._require_spread(job, whole - 1)
    with pytest.raises(
        RuntimeError, match=r"weights and moments of the whole model take 435,812,352: they are not spread"
    ):
        rows._require_spread(job, whole)


def losses_of_plain_torch(precision: str, num_steps: int) -> list[float]:
    """One process on whole batches; in bf16 with torch's autocast."""
    job = {"model": "tiny", "rows": 4}
    torch.manual_seed(0)
    model = rows.Llama(rows.SIZES["tiny"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(num_steps):
        ids = rows.rows_of(job, number, 0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_a_tiny_row(precision: str, tolerance: float) -> None:
    (entry,) = [row for row in SUITES[precision] if row["name"] == "Lowtide, streamed and sharded"]
    found = rows.run({**entry, "model": "tiny", "rows": 4, "steps": 3})
    assert found["losses"] == pytest.approx(losses_of_plain_torch(precision, 5), rel=tolerance)
    assert len(found["step_s"]) == 3
    # Half of the weights and the moments: of 12 bytes a parameter in both precisions.
    assert found["tensor_bytes"] >= 6 * found["parameters"]
    assert json.loads(json.dumps(found)) == found


def one(rank: int, entry: dict[str, Any]) -> dict[str, Any]:
    return rows.train(rank, entry, for_bytes=True)


@pytest.mark.slow
def test_bytes_of_a_spread_model_are_half_of_its_state() -> None:
    """What fully_shard holds between steps is arithmetic: weights and two moments, and the steps that AdamW counts."""
    entry = {"peer": "fsdp2", "precision": "fp32", "model": "tiny", "rows": 4, "steps": 1}
    for found in run_on_ranks(one, 2, entry):
        # Each rank has as many of the tensors' rows; all numbers of rows here are even.
        assert found["tensor_bytes"] == pytest.approx(6 * rows.num_parameters(entry), rel=0.02)


# The table


def written(folder: Path, *results: dict[str, Any]) -> None:
    (folder / "ranks").mkdir(exist_ok=True)
    record = {"schema": SCHEMA, "commit": "abc", "hardware": "cpu", "torch": "2.13", "date": "2026-01-01"}
    (folder / "ranks" / "fp32_a.json").write_text(json.dumps({**record, "rows": results}))


def measured(name: str, **more: Any) -> dict[str, Any]:
    figures = {"tensor_bytes": 12 * MIB, "peak_bytes": 34 * MIB, "parameters": MIB, "cpu_s": [0.1, 0.3, 0.2]}
    return {"name": name, **figures, "median_cpu_s": 0.2, "losses": [2.0, 4.0], **more}


def test_the_table(tmp_path: Path) -> None:
    names = [str(row["name"]) for row in SUITES["fp32"]]
    results = [measured(name) for name in names]
    results[1]["losses"] = [2.0, 4.0004]
    results[3] = {"name": names[3], "failed": "RankFailedError", "message": "no module named deepspeed"}
    results[8] |= {"device_peak_bytes": 5 * MIB, "host_peak_bytes": 6 * MIB}
    written(tmp_path, *results)
    lines = beside_peers(tmp_path, "fp32").split("\n")
    assert "| DDP | 12 | 12.0 | 34 | - | - | 200 (100 to 300) | 0 |" in lines
    assert "| FSDP2 | 12 | 12.0 | 34 | - | - | 200 (100 to 300) | 1e-04 |" in lines
    assert "| DeepSpeed ZeRO-3 | RankFailedError | - | - | - | - | - | - |" in lines
    assert f"| {names[8]} | 12 | 12.0 | 34 | 5 | 6 | 200 (100 to 300) | 0 |" in lines
    assert "DeepSpeed ZeRO-3: no module named deepspeed." in " ".join(lines)


def test_a_table_without_its_rows(tmp_path: Path) -> None:
    written(tmp_path, measured("DDP"))
    with pytest.raises(BadRecordError, match=r"no record has the row 'FSDP2' of fp32; run the suite again"):
        beside_peers(tmp_path, "fp32")
    names = [str(row["name"]) for row in SUITES["fp32"]]
    written(tmp_path, *({"name": name, "failed": "x"} if "DDP" in name else measured(name) for name in names))
    with pytest.raises(BadRecordError, match=r"no row DDP to compare with; run the suite again"):
        beside_peers(tmp_path, "fp32")


def test_losses_of_other_steps_are_not_compared() -> None:
    assert largest_difference([1.0, 2.0], [1.0, 4.0]) == 0.5
    with pytest.raises(BadRecordError, match="2 losses are compared with 1; run both rows with the same steps"):
        largest_difference([1.0, 2.0], [1.0])
