"""One row: one training configuration in a process of its own. Prints one JSON object on its last line.

python -m benchmarks.session.row '{"model": "3.14b", "batch": "8x2048", "kind": "streamed", ...}'
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite import answer

SIZES: dict[str, dict[str, int]] = {
    # hidden, layers, ffn, heads, key-value heads, vocabulary
    "1b": {"h": 2048, "l": 16, "f": 8192, "a": 32, "k": 8, "v": 32000},
    "3.14b": {"h": 3072, "l": 26, "f": 8192, "a": 24, "k": 24, "v": 32000},
    "4.4b": {"h": 3072, "l": 37, "f": 8192, "a": 24, "k": 24, "v": 32000},
    "5.1b": {"h": 3072, "l": 43, "f": 8192, "a": 24, "k": 24, "v": 32000},
    "8b": {"h": 4096, "l": 32, "f": 14336, "a": 32, "k": 8, "v": 128256},
    "10b": {"h": 5120, "l": 30, "f": 13824, "a": 40, "k": 40, "v": 32000},
    "13b": {"h": 5120, "l": 40, "f": 13824, "a": 40, "k": 40, "v": 32000},
    "20b": {"h": 6144, "l": 51, "f": 16384, "a": 48, "k": 8, "v": 32000},
    "40b": {"h": 8192, "l": 57, "f": 22016, "a": 64, "k": 8, "v": 32000},
    "gpt2-xl": {"h": 1600, "l": 48, "f": 6400, "a": 25, "k": 25, "v": 50257},
    "many launches": {"h": 256, "l": 24, "f": 1024, "a": 4, "k": 4, "v": 1024},
    "launch-bound": {"h": 256, "l": 6, "f": 1024, "a": 4, "k": 4, "v": 1024},
    "tiny": {"h": 64, "l": 4, "f": 128, "a": 4, "k": 4, "v": 128},
}


def load() -> None:
    """Import what every row needs."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401

    import lowtide  # noqa: F401


def build(name: str, *, on: str, recompute: bool = True, positions: int = 4096) -> Any:
    """A Hugging Face Llama or GPT-2 in bf16; with `recompute` it runs each layer again, as its own switch does it."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    s = SIZES[name]
    is_gpt2 = name.startswith("gpt2")
    config = (
        GPT2Config(n_embd=s["h"], n_layer=s["l"], n_head=s["a"], use_cache=False)
        if is_gpt2
        else LlamaConfig(
            hidden_size=s["h"],
            num_hidden_layers=s["l"],
            intermediate_size=s["f"],
            num_attention_heads=s["a"],
            num_key_value_heads=s["k"],
            vocab_size=s["v"],
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(on):
            model = GPT2LMHeadModel(config) if is_gpt2 else LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if recompute:
        model.gradient_checkpointing_enable()
    return model.train()


def by_layers(model: Any, num_resident: int) -> dict[str, dict[str, str]]:
    """Weights and update sites: the first layers, embedding and head on the device, the other layers on the host.

    The last layers' gradients come first in a backward: their updates on the host hide behind the rest of it.
    """
    on_host = [f"model.layers.{number}" for number in range(num_resident, model.config.num_hidden_layers)]
    return {
        "weights": {"*": "resident", **dict.fromkeys(on_host, "streamed")},
        "update": {"*": "device", **dict.fromkeys(on_host, "host")},
    }


def plan_of(row: dict[str, Any], model: Any) -> Any:
    """The row's plan, or how one is to be made."""
    import lowtide

    if "plan" in row:
        from lowtide.planning.plan import plan_from_json

        return plan_from_json(row["plan"])
    if "partition_share" in row:
        size = None if torch.cuda.is_available() else "1MiB"
        return lowtide.StaticPartition(share=row["partition_share"], schedule=row["schedule"], device_memory=size)
    words = {"weights": row.get("weights", "streamed"), "update": row.get("update", "device")}
    return lowtide.make_plan(
        model,
        **(by_layers(model, row["resident_layers"]) if "resident_layers" in row else words),
        schedule=row.get("schedule", "deferred"),
        prefetch_depth=row.get("prefetch_depth", 1),
        device_memory=row.get("device_memory"),
        staging_memory=row.get("staging_memory"),
        activations=row.get("activations"),
    )


def optimizer_of(name: str, model: Any) -> torch.optim.Optimizer | None:
    """The row's optimizer."""
    if name == "none":
        return None
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if name == "adamw as torch chooses":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    raise SystemExit(f"no optimizer {name}")


def group_of_one(backend: str) -> Any:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def host_rss_bytes() -> int:
    """What the process occupies now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def run(row: dict[str, Any]) -> dict[str, Any]:
    """Train the row's steps and report."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.backends.mkldnn.enabled = False  # some processors lack what its bf16 kernels use
    kind = row.get("kind", "plain")
    if row.get("memory_limit") and device == "cuda":
        from lowtide.units import parse_bytes

        limit = parse_bytes(row["memory_limit"])
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    started = time.perf_counter()
    # Weights are drawn on the device, which takes no time there, and moved to where the row wants them.
    session = None
    if row.get("from_file"):
        import lowtide

        with lowtide.empty_weights():
            model = build(row["model"], on="cpu")
    else:
        model = build(row["model"], on=device, recompute=row.get("recompute", True))
        if kind != "plain" and not row.get("stays_on_device"):
            model = model.to("cpu")
            torch.cuda.empty_cache() if device == "cuda" else None
    if row.get("loss") == "chunked":
        from lowtide.activations import chunked_head

        chunked_head(model)
    optimizer = optimizer_of(row.get("optimizer", "none"), model)
    built_s = time.perf_counter() - started
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if kind != "plain":
        import lowtide

        plan = plan_of(row, model)
        ranks = {"ranks": group_of_one(row["ranks"])} if "ranks" in row else {}
        begun = time.perf_counter()
        session = lowtide.manage(
            model,
            optimizer,
            plan,
            max_grad_norm=row.get("max_grad_norm"),
            precision=row.get("precision"),
            moments=row.get("moments", "fp32"),
            weights=row.get("from_file"),
            **ranks,
        )
        managed_s = time.perf_counter() - begun
    rows, length = (int(part) for part in row["batch"].split("x"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES[row["model"]]["v"], (rows, length), generator=generator).to(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for step in range(row.get("warm_up", 3) + row.get("steps", 8)):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.zero_grad()
        # The value is read at the end of each step, as loops do that print it, and so that steps do not run into each other.
        losses.append(loss.item())
        if row.get("synchronize", True) and device == "cuda":
            torch.cuda.synchronize()
        if step >= row.get("warm_up", 3):
            times.append(time.perf_counter() - begun)
    result: dict[str, Any] = {
        **{key: value for key, value in row.items() if key != "plan"},
        "parameters": parameters,
        "built_s": built_s,
        "step_s": times,
        "median_s": statistics.median(times),
        "losses": losses,
        "host_rss_bytes": host_rss_bytes(),
        "host_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if device == "cuda":
        result["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["max_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if session is not None:
        stats = session.stats()
        timeline = session.timeline()
        leads = [overlap.lead_s for overlap in timeline.overlaps()]
        result["managed_s"] = managed_s
        result["stats"] = {key: value for key, value in stats.to_dict().items() if key != "chunks"}
        result["num_chunks"] = len(stats.chunks)
        result["overlap"] = {
            "num_copies": len(leads),
            "num_late": sum(lead <= 0 for lead in leads),
            "least_lead_s": min(leads, default=None),
        }
        if row.get("trace_to"):
            from lowtide.report.perfetto import write_perfetto

            write_perfetto(timeline.last_steps(1), Path(row["trace_to"]))
        session.close()
    if "ranks" in row:
        torch.distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    answer(run, load)
