"""The rows of each suite, as plain data."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

LLAMA = {"model": "3.14b", "batch": "8x2048", "steps": 8, "warm_up": 3}
STREAMED = {"kind": "managed", "weights": "streamed"}
FILE = "/tmp/lowtide-llama-3.14b.safetensors"

SUITES: dict[str, list[Row]] = {
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
