"""The `lowtide` command."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.check import run_check_command, run_ranks_check_command
from lowtide.cli.console import Gpu, Json, friendly_errors, require_writable
from lowtide.cli.demo import run_demo
from lowtide.cli.hardware import run_hardware
from lowtide.cli.lab import lab_app
from lowtide.cli.plan import PlanRequest, Shown, make_plan_request, plan_settable, run_plan
from lowtide.cli.plan_ranks import run_plan_ranks
from lowtide.cli.trace import make_request, run_explain, run_trace, settable
from lowtide.hardware.machine import lowtide_version
from lowtide.runtime.rank_ways import RankSettings

app = typer.Typer(
    name="lowtide",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(lab_app)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"lowtide {lowtide_version()}, torch {importlib.metadata.version('torch')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="the versions of lowtide and torch")
    ] = False,
) -> None:
    """See the peak memory of a PyTorch training step before it runs, and why it is there."""


Model = Annotated[
    str, typer.Argument(help="a built-in name (llama-8b), hf:FOLDER_OR_CONFIG, or package.module:factory")
]
Batch = Annotated[str | None, typer.Option(help="8x2048 (sequences x tokens) or 64x3x224x224 (images)")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="dtype=float32 (else a factory's own type, or bfloat16), optimizer=sgd, torch=2.11.0, step.activations=recompute, ...",
    ),
]
Full = Annotated[bool, typer.Option("--full", help="all rows and tables, beyond one screen")]
Report = Annotated[list[Path] | None, typer.Option(help="also write FILE.html, .png, .pdf or .json; may be repeated")]


@app.command(epilog=settable())
def trace(
    model: Model,
    batch: Batch = None,
    gpu: Gpu = "h200",
    set_: Set = None,
    full: Full = False,
    json_: Json = False,
    report: Report = None,
) -> None:
    """The predicted peak of a training step, by category and phase."""
    with friendly_errors():
        run_trace(make_request(model, batch, gpu, set_ or []), as_json=json_, reports=report or [], is_full=full)


@app.command(epilog=settable())
def explain(
    model: Model,
    batch: Batch = None,
    gpu: Gpu = "h200",
    set_: Set = None,
    full: Full = False,
    json_: Json = False,
    report: Report = None,
) -> None:
    """Why the peak is there, and what each technique would really save given the others."""
    with friendly_errors():
        run_explain(make_request(model, batch, gpu, set_ or []), as_json=json_, reports=report or [], is_full=full)


@app.command(epilog=plan_settable())
def plan(
    model: Model,
    batch: Batch = None,
    gpu: Annotated[str, typer.Option(help="as for `lowtide trace`; `any` ranks all known hardware")] = "h200",
    device_memory: Annotated[str | None, typer.Option(help="what may be reserved of the device, such as 24GiB")] = None,
    host_memory: Annotated[str | None, typer.Option(help="what may be used of the host")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="the ways to train on so many devices, each with a batch of this size")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help='precision="bf16 exact", schedule=in_backward, optimizer=sgd, max_grad_norm=1.0, ...'
        ),
    ] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="also the fastest step at each device budget")] = False,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="the largest batch that fits, and its plan")] = False,
    full: Full = False,
    json_: Json = False,
    report: Report = None,
) -> None:
    """The fastest plan that fits, with its predicted peak and step time."""
    with friendly_errors():
        request = PlanRequest(
            model=model,
            batch=batch,
            gpu=gpu,
            device_memory=device_memory,
            host_memory=host_memory,
            ranks=RankSettings(count=ranks),
        )
        shown = Shown(pareto=pareto, max_batch=max_batch, is_full=full)
        request = make_plan_request(request, set_ or [])
        run = run_plan if request.ranks.count is None else run_plan_ranks
        run(request, as_json=json_, reports=report or [], shown=shown)


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(help="a recipe: a name such as gpt_streamed, FILE.yaml or FILE.json")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="steps=5, plan.weights=resident, optimizer.settings.lr=1e-4, ...")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="train it managed in so many processes, each on its part of the batch")
    ] = None,
    json_: Json = False,
) -> None:
    """Train a recipe managed and plainly from the same weights; fails on a difference beyond its tolerance."""
    with friendly_errors():
        if ranks is None:
            run_check_command(recipe, set_ or [], as_json=json_)
        else:
            run_ranks_check_command(recipe, set_ or [], ranks, as_json=json_)


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(help="a recipe: a name such as finetune, or FILE.yaml; or the folder of a run, with --resume"),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="model=hf:FOLDER, data.text=FILE, device_memory=24GiB, steps=100, ..."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; without: lowtide-train/RECIPE")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the last checkpoint of the run's folder")
    ] = False,
    json_: Json = False,
) -> None:
    """Train a model from a recipe, with checkpoints to go on from; Ctrl-C saves and ends."""
    with friendly_errors():
        from lowtide.cli.train import run_train  # what trains is not loaded for what predicts

        run_train(recipe, set_ or [], out, resume=resume, as_json=json_)


@app.command()
def hardware(
    again: Annotated[bool, typer.Option("--again", help="measure even where that was done before")] = False,
    json_: Json = False,
) -> None:
    """Measure this machine once, in under a minute; `--gpu this` then plans with what it reaches."""
    with friendly_errors():
        run_hardware(again=again, as_json=json_)


@app.command()
def demo(report: Annotated[Path, typer.Option(help="where the report goes")] = Path("lowtide-demo.html")) -> None:
    """Predict a model for hardware this machine does not have, then train a small GPT here and watch it."""
    with friendly_errors():
        require_writable("--report", [report])
        run_demo(report)


if __name__ == "__main__":
    app()
