"""The rows of each suite, as plain data."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

LLAMA = {"model": "3.14b", "batch": "8x2048", "steps": 8, "warm_up": 3}
STREAMED = {"kind": "managed", "weights": "streamed"}
FILE = "/tmp/lowtide-llama-3.14b.safetensors"

STOCHASTIC = {"precision": "bf16 stochastic"}
EXACT = {"optimizer": "adamw", "precision": "bf16 exact"}


def _optimizer_rows(batch: str, budget: str) -> list[Row]:
    """Exact bf16 AdamW with all state on the host, beside plain torch."""
    llama = {**LLAMA, "batch": batch}
    on_host = {**llama, **STREAMED, **EXACT, "update": "host", "device_memory": budget}
    in_backward = {**on_host, "schedule": "in_backward"}
    resident = {**llama, **EXACT, "kind": "managed", "weights": "resident", "update": "device"}
    return [
        {"name": "plain torch, forward and backward", **llama, "kind": "plain", "optimizer": "none"},
        {"name": "plain torch, fused AdamW, all bf16", **llama, "kind": "plain", "optimizer": "adamw"},
        {"name": "all on the device, torch's fused AdamW, managed", **resident, "precision": None},
        {"name": "all on the device, stochastic, bf16 moments", **resident, **STOCHASTIC, "moments": "bf16"},
        {"name": "all on the device, exact", **resident},
        {"name": "streamed, on the host in backward, exact", **in_backward},
        {"name": "streamed, on the host in backward, exact, 6 GiB of staging", **in_backward, "staging_memory": "6GiB"},
        {"name": "streamed, on the host deferred, exact, clipped", **on_host, "max_grad_norm": 1.0},
        {"name": "streamed, on the host in backward, 8-bit moments", **in_backward, "moments": "8bit"},
        {"name": "plain torch, forward and backward, again", **llama, "kind": "plain", "optimizer": "none"},
    ]


def _long_rows(batch: str, budget: str) -> list[Row]:
    """So many tokens that the logits alone outgrow the budget: the loss is made by chunks in the rows that must fit.

    A plain row has the chunked loss too, so that what it saves in time is nobody's merit.
    """
    llama = {**LLAMA, "batch": batch, "steps": 4, "warm_up": 2}
    chunked = {**llama, "loss": "chunked"}
    on_host = {**chunked, **STREAMED, **EXACT, "update": "host", "device_memory": budget}
    plain = {"kind": "plain", "optimizer": "none"}
    return [
        {"name": "plain torch, unchunked loss", **llama, **plain},
        {"name": "plain torch, forward and backward", **chunked, **plain},
        {"name": "streamed, on the host in backward, exact", **on_host, "schedule": "in_backward"},
        {"name": "streamed, on the host deferred, exact, not clipped", **on_host},
        {"name": "streamed, on the host deferred, exact, clipped", **on_host, "max_grad_norm": 1.0},
    ]


def _scale_rows() -> list[Row]:
    """Models whose state is larger than the device, layers by layers on device and host; the batch repeats."""
    scale = {"kind": "managed", "steps": 4, "warm_up": 2, "stays_on_device": True, **EXACT}
    in_backward = {**scale, "schedule": "in_backward", "steps": 8}
    thirteen = {"model": "13b", "batch": "8x2048"}
    return [
        {
            "name": "13b, forward and backward",
            **thirteen,
            "kind": "plain",
            "optimizer": "none",
            "steps": 4,
            "warm_up": 2,
        },
        {"name": "13b, exact, clipped", **scale, **thirteen, "resident_layers": 26, "max_grad_norm": 1.0},
        {"name": "20b, exact, in backward", **in_backward, "model": "20b", "batch": "2x2048", "resident_layers": 27},
        {
            "name": "40b, stochastic, 8-bit moments, in backward",
            **in_backward,
            **STOCHASTIC,
            "moments": "8bit",
            "model": "40b",
            "batch": "2x2048",
            "resident_layers": 42,
        },
    ]


def _share_rows(model: str, batch: str) -> list[Row]:
    """What each share of the host costs, with resident weights and updates in backward."""
    llama = {**LLAMA, "model": model, "batch": batch, "steps": 4, "warm_up": 2, "stays_on_device": True}
    row = {**llama, **EXACT, "kind": "managed", "weights": "resident", "schedule": "in_backward"}
    return [
        {"name": f"{model}, forward and backward", **llama, "kind": "plain", "optimizer": "none"},
        *({"name": f"{model}, {10 * tenth}% on the host", **row, "update": tenth / 10} for tenth in range(11)),
    ]


def _staging_rows(model: str, batch: str, staging: str) -> list[Row]:
    """Shares of the host again, with room for all gradients that wait for it instead of 2 GiB."""
    rows = {row["name"]: row for row in _share_rows(model, batch)}
    wanted = ("forward and backward", *(f"{percent}% on the host" for percent in (30, 50, 70)))
    plain, *shares = (rows[f"{model}, {name}"] for name in wanted)
    room = f"{staging.removesuffix('GiB')} GiB of staging"
    return [plain, *({**row, "name": f"{row['name']}, {room}", "staging_memory": staging} for row in shares)]


def _partition_rows(model: str, batch: str, shares: tuple[float, ...]) -> list[Row]:
    """A static partition of the device: what is outside its share is streamed, and updated on the host."""
    llama = {**LLAMA, "model": model, "batch": batch, "steps": 4, "warm_up": 2, "stays_on_device": True}
    row = {**llama, **EXACT, "kind": "managed", "schedule": "in_backward"}
    return [
        {"name": f"{model}, forward and backward", **llama, "kind": "plain", "optimizer": "none"},
        *(
            {"name": f"{model}, static partition, {share:.0%} of the card", **row, "partition_share": share}
            for share in shares
        ),
    ]


def _launch_rows() -> list[Row]:
    """So small a model that Python and the launching of kernels take all the time: what management itself costs."""
    small = {"model": "launch-bound", "batch": "2x64", "steps": 60, "warm_up": 20, "optimizer": "adamw"}
    resident = {**small, "kind": "managed", "weights": "resident", "update": "device"}
    streamed = {**small, **STREAMED}
    return [
        {"name": "plain torch", **small, "kind": "plain"},
        {"name": "all resident", **resident},
        {"name": "all resident, in backward", **resident, "schedule": "in_backward"},
        {"name": "all streamed, on the device in backward", **streamed, "update": "device", "schedule": "in_backward"},
        {"name": "all streamed, on the host deferred", **streamed, "update": "host"},
        {"name": "plain torch, again", **small, "kind": "plain"},
    ]


def _rank_rows() -> list[Row]:
    """What a process group of one costs over none, by turns."""
    llama = {**LLAMA, **EXACT, "steps": 6, "warm_up": 2}
    rows = {
        "all on the device, exact": {**llama, "kind": "managed", "weights": "resident", "update": "device"},
        "streamed, on the host in backward, exact": {
            **llama,
            **STREAMED,
            "update": "host",
            "schedule": "in_backward",
            "device_memory": "14GiB",
        },
    }
    return [
        {**row, "name": f"{name}{words}", **ranks}
        for name, row in rows.items()
        for words, ranks in (
            ("", {}),
            (", one rank", {"ranks": "nccl"}),
            (", one rank again", {"ranks": "nccl"}),
            (", again", {}),
        )
    ]


VERSIONS = [("before", "out/before"), ("now", ".")]
"""Another version of the repository, and this one."""


def _launch_versus_rows() -> list[Row]:
    """What management costs a small model, in this version of the package and in another one in out/before, by turns.

    A process in which Python is the bottleneck is faster or slower as a whole, so each turn has a plain row of its own.
    """
    rows = []
    for turn in range(2):
        order = VERSIONS if turn % 2 == 0 else VERSIONS[::-1]
        for row in [row for row in _launch_rows()[:-1] if not row["name"].endswith("resident, in backward")]:
            row = {**row, "steps": 60, "warm_up": 15, "turn": turn}
            if row["kind"] == "plain":
                rows.append(row)
            else:
                rows += [{**row, "name": f"{row['name']}: {version}", "folder": folder} for version, folder in order]
    return rows


def _versus_rows() -> list[Row]:
    """Managed rows of two suites by this version of the package and by another one in out/before, there and back."""
    found = {row["name"]: row for suite in ("streaming", "optimizer") for row in SUITES[suite]}
    names = [
        "streamed, on the host in backward, exact",
        "streamed, on the host deferred, exact, clipped",
        "managed, all streamed, SGD in backward on the device",
        "all on the device, torch's fused AdamW, managed",
        "managed, all streamed, SGD in backward on the host",
        "managed, all streamed, SGD deferred on the host",
        "managed, all resident, SGD",
    ]
    by_torch = {**found[names[0]], "precision": None, "optimizer": "adamw as torch chooses", "steps": 3, "warm_up": 1}
    once = [{**by_torch, "name": "streamed, on the host in backward, AdamW as torch chooses"}]
    rows = [
        {**row, "name": f"{row['name']}: {version}", "folder": folder} for row in once for version, folder in VERSIONS
    ]
    rows += [
        {**found[name], "name": f"{name}: {version}", "folder": folder, "steps": 5, "warm_up": 2, "turn": turn}
        for turn, order in enumerate((VERSIONS, VERSIONS[::-1]))
        for name in names
        for version, folder in order
    ]
    return rows


SUITES: dict[str, list[Row]] = {
    "launch_bound": _launch_rows(),
    "launch_versus": _launch_versus_rows(),
    "optimizer": _optimizer_rows("8x2048", "12GiB"),
    "optimizer_short": _optimizer_rows("4x2048", "12GiB"),
    "optimizer_long": _long_rows("32x2048", "32GiB"),
    "optimizer_long_tiny": [{**row, "model": "tiny"} for row in _long_rows("2x32", "1MiB")],
    "scale": _scale_rows(),
    "scale_tiny": [
        {**row, "model": "tiny", "batch": "2x32", "resident_layers": 2, "steps": 2, "warm_up": 1}
        for row in _scale_rows()
    ],
    "host_share_3b": _share_rows("3.14b", "8x2048"),
    "host_share_8b": _share_rows("8b", "4x2048"),
    "host_share_staging_8b": _staging_rows("8b", "4x2048", "12GiB"),
    "partition_3b": _partition_rows("3.14b", "8x2048", (0.05, 0.1, 0.15, 0.2, 0.3)),
    "partition_8b": _partition_rows("8b", "4x2048", (0.1, 0.2, 0.4, 0.6, 0.7)),
    "ranks": _rank_rows(),
    "partition_tiny": _partition_rows("tiny", "2x32", (0.5,)),
    "streaming": [
        {"name": "plain torch, forward and backward", **LLAMA, "kind": "plain", "optimizer": "none"},
        {"name": "plain torch, SGD", **LLAMA, "kind": "plain", "optimizer": "sgd"},
        {
            "name": "managed, all resident, SGD",
            **LLAMA,
            "kind": "managed",
            "weights": "resident",
            "update": "device",
            "optimizer": "sgd",
        },
        {
            "name": "managed, all streamed, SGD in backward on the device",
            **LLAMA,
            **STREAMED,
            "update": "device",
            "schedule": "in_backward",
            "optimizer": "sgd",
            "device_memory": "14GiB",
        },
        {
            "name": "managed, all streamed, SGD in backward on the host",
            **LLAMA,
            **STREAMED,
            "update": "host",
            "schedule": "in_backward",
            "optimizer": "sgd",
            "device_memory": "14GiB",
        },
        {
            "name": "managed, all streamed, SGD deferred on the host",
            **LLAMA,
            **STREAMED,
            "update": "host",
            "schedule": "deferred",
            "optimizer": "sgd",
            "device_memory": "14GiB",
        },
        {"name": "plain torch, SGD, again", **LLAMA, "kind": "plain", "optimizer": "sgd"},
    ],
    "start_up": [
        {
            "name": "managed from the meta device and a file",
            **LLAMA,
            **STREAMED,
            "update": "device",
            "schedule": "in_backward",
            "optimizer": "sgd",
            "device_memory": "14GiB",
            "steps": 2,
            "from_file": FILE,
        }
    ],
    "budgets": [
        {
            "name": f"{model} in {budget}",
            "model": model,
            "batch": batch,
            "steps": 3,
            "warm_up": 2,
            **STREAMED,
            "update": "device",
            "schedule": "in_backward",
            "optimizer": "sgd",
            "device_memory": budget,
        }
        for model, batch, budgets in (
            ("1b", "4x2048", ("5GiB", "6GiB", "8GiB")),
            ("3.14b", "4x2048", ("7GiB", "8GiB", "10GiB")),
            ("8b", "2x2048", ("12GiB", "14GiB", "18GiB")),
        )
        for budget in budgets
    ],
}
SUITES["versus"] = _versus_rows()
