"""`mega-rl train`, `sft`, `dpo`, `rm`, `together`, `eval`: check settings without torch, then start ranks.

Exit codes of `eval`: 0 when every sample is scored, 1 when the evaluation cannot continue, 2 for mistakes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_rl.cli.launch import become
from mega_rl.cli.options import Overrides, with_options
from mega_rl.config import loader, render
from mega_rl.config.keys import pinned_overrides
from mega_rl.config.packaged import parse_value, read_recipe
from mega_rl.disk import replace_text
from mega_rl.errors import UserError, no_such
from mega_rl.operations.diagnosis import investigate
from mega_rl.operations.launcher.launch import Launch, key_of
from mega_rl.operations.launcher.supervisor import DEFAULT_RESTARTS
from mega_rl.operations.schedulers.slurm import become_rank
from mega_rl.tracking import progress
from mega_rl.tracking.health.guard import StoppedBySignal
from mega_rl.untrusted import decode_json

if TYPE_CHECKING:
    from mega_rl.types import JsonObject


@dataclass(frozen=True)
class LaunchOptions:
    """Ranks to start; every field is an option."""

    nproc_per_node: Annotated[int | None, typer.Option(min=1, help="Start this many ranks on this machine.")] = None
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Restarts from the newest checkpoint when a rank dies or is stuck; default: {DEFAULT_RESTARTS}.",
        ),
    ] = None
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes; start this command on each of them.")] = 1
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this node, from 0.")] = 0
    master_addr: Annotated[str, typer.Option(help="Name or address of node 0, by which the other nodes reach it.")] = ""
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port at which the launcher of node 0 listens.")
    ] = 29500

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks; None if another launcher has started them."""
        return None if self.nproc_per_node is None else self.nnodes * self.nproc_per_node

    @property
    def needs_launcher(self) -> bool:
        """Return whether ranks need a launcher: several ranks, or one that may be started again."""
        return self.world_size is not None and (self.world_size > 1 or bool(self.max_restarts))

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise UserError for options that have no effect, are missing or contradict one another."""
        if self.nproc_per_node is None:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    option = f"--{field.name.replace('_', '-')}"
                    raise UserError(f"{option}: is for ranks that this command starts; add --nproc-per-node")
            return
        if "RANK" in environment:
            raise UserError(
                f"--nproc-per-node={self.nproc_per_node} under a launcher that already started ranks; leave it out"
            )
        if self.node_rank >= self.nnodes:
            raise UserError(f"--node-rank={self.node_rank}: must be below --nnodes={self.nnodes}")
        if self.nnodes > 1:
            if not self.master_addr:
                raise UserError("--master-addr: is missing; give the name or address of node 0, the same on every node")
            key_of(environment)

    def launch(self, program: Sequence[str], *, run_dir: str, resume: str) -> Launch:
        """Return the launch of a program, a module and its arguments, on this node."""
        assert self.nproc_per_node is not None
        restarts = DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts
        launch = Launch(tuple(program), self.nproc_per_node, run_dir, restarts, resume)
        several = {name: getattr(self, name) for name in ("nnodes", "node_rank", "master_addr", "master_port")}
        return launch if self.nnodes == 1 else replace(launch, **several)


Config = Annotated[Path | None, typer.Option(help="Recipe: a YAML file, or the name of a packaged one, as quickstart.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved config, marking what differs from the defaults.")
]
KIND = "algorithm.kind"
# Command -> kinds of training, the first its own.
KINDS = {"sft": ("sft",), "dpo": ("dpo", "ipo", "simpo", "orpo", "kto"), "rm": ("rm",)}


def _command(name: str, summary: str) -> Callable[..., None]:
    """Return the command of a kind of training."""

    def command(
        launch: LaunchOptions, overrides: Overrides = None, config: Config = None, print_config: PrintConfig = False
    ) -> None:
        settings = overrides or []
        _run(launch, of_kind(name, config, settings) if name in KINDS else settings, config, print_config=print_config)

    command.__name__, command.__doc__ = name, summary
    return with_options(command)


train = _command("train", "Train a policy with the settings of a recipe and of the command line.")
sft = _command("sft", "Train a model on given answers by maximum likelihood: conversations, completions or text.")
dpo = _command("dpo", "Train a policy on preferences: DPO, IPO, SimPO and ORPO on pairs, KTO on labelled answers.")
rm = _command("rm", "Train a reward model on pairs of answers: a sequence-classification checkpoint with one label.")


@with_options
def together(
    launch: LaunchOptions,
    runs: Annotated[
        list[str], typer.Argument(metavar="RECIPE... [KEY=VALUE]...", help="Recipes, and settings that replace theirs.")
    ],
) -> None:
    """Train the adapters of several recipes on one base, a step of each in turn."""
    recipes, settings = ([one for one in runs if ("=" in one) == is_setting] for is_setting in (False, True))
    if len(recipes) < 2:
        raise UserError(f"{' '.join(recipes) or 'no recipe'}: name two recipes or more, or use mega-rl train")
    _run(launch, settings, *map(Path, recipes))


@with_options
def distill(
    launch: LaunchOptions,
    samples: Annotated[
        Path, typer.Option(metavar="FILE", help="samples.jsonl that mega-rl eval wrote of the teacher.")
    ],
    overrides: Overrides = None,
    config: Config = None,
    right: Annotated[bool, typer.Option("--right", help="Train on right answers only.")] = False,
    print_config: PrintConfig = False,
) -> None:
    """Train a student on answers that `mega-rl eval` has sampled of a teacher."""
    rows = samples.with_name("right_answers.jsonl" if right else "answers.jsonl")
    write_answers(samples, rows, only_right=right)
    files = f"data.train_files={json.dumps([str(rows)])}"
    _run(launch, [*of_kind("sft", config, overrides or []), files], config, print_config=print_config)


def write_answers(samples: Path, rows: Path, *, only_right: bool) -> None:
    """Write samples that a stop token ended as rows. Raises UserError without any."""
    if not samples.is_file():
        raise UserError(
            f"--samples={samples}: {no_such('file', samples)}; sample a teacher with mega-rl eval --out DIR"
        )
    kept = []
    for number, line in enumerate(samples.read_bytes().splitlines(), start=1):
        one = decode_json(line, f"{samples}:{number}")
        if one.get("given_tokens"):
            raise UserError(
                f"{samples}:{number}: tools wrote a part of this response, which a student would learn to write; "
                "sample a teacher without rollout.source"
            )
        if not {"prompt", "response", "finish"} <= one.keys():
            raise UserError(f"{samples}:{number}: is not a sample of mega-rl eval, with prompt, response and finish")
        if one["finish"] == "stop" and (one.get("right") or not only_right):
            kept.append({"prompt": one.get("messages") or one["prompt"], "completion": one["response"]})
    if not kept:
        raise UserError(f"--samples={samples}: no answer ended at a stop token" + " and is right" * only_right)
    replace_text(rows, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def of_kind(command: str, recipe: Path | None, settings: Sequence[str]) -> list[str]:
    """Return the settings with the command's kind; raises UserError for another command's."""
    section = read_recipe(recipe).get("algorithm") if recipe is not None else None
    given = [parse_value(text.partition("=")[2]) for text in settings if text.startswith((f"{KIND}=", f"{KIND}.name="))]
    kind = (given or [section.get("kind") if isinstance(section, Mapping) else None])[-1]
    kind = kind.get("name") if isinstance(kind, Mapping) else kind
    legal = KINDS[command]
    if kind is not None and kind not in legal:
        raise UserError(f"{KIND}={kind}: is not for mega-rl {command}; legal: {', '.join(legal)}")
    return [*settings] if given else [f"{KIND}={kind or legal[0]}", *settings]


def _run(launch: LaunchOptions, settings: list[str], *recipes: Path | None, print_config: bool = False) -> None:
    if launch.nproc_per_node is None:
        become_rank()
    progress.show_progress()
    if print_config:
        render.print_config(loader.load(recipes[0], settings))
        return

    if launch.nproc_per_node not in (None, 1):
        logging.getLogger("mega_rl.config").setLevel(logging.WARNING)  # the ranks read the settings again
    launch.check(os.environ)
    named = [str(recipe) for recipe in recipes if recipe is not None]
    with progress.phase(f"checking {', '.join(named) or 'the settings'}, models and data", announce=True):
        from mega_rl.plan.preflight import preflight

        configs = preflight(recipes, settings, world_size=launch.world_size, launchers=launch.nnodes)
    first = configs[0]
    if launch.needs_launcher:
        own = [*(["together"] if len(recipes) > 1 else ["train", "--config"][: 1 + len(named)]), *named]
        pinned = [one for one in pinned_overrides(first) if all(one in pinned_overrides(each) for each in configs)]
        program = ["mega_rl.cli", *own, *settings, *pinned]
        become(launch.launch(program, run_dir=first.trainer.run_dir, resume=first.checkpoint.resume))
    if not first.metrics.progress_bar:
        progress.show_progress(live=False)
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.api import prepared

        accelerator = prepared(first)
        from mega_rl.trainer.assemble import train as run

    raise typer.Exit(run(configs, accelerator, investigate))


@with_options
def evaluate(
    launch: LaunchOptions,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as model.path=HF_DIR validation.n=8.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Recipe whose model, layout, data and rewards are taken.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of samples and results.")] = Path("runs/eval"),
) -> None:
    """Sample a model's answers to prompts and report pass@k, avg@k and maj@k with 95 % intervals."""
    settings = overrides or []
    progress.show_progress()
    launch.check(os.environ)
    with progress.phase("checking the settings, model and data", announce=True):
        from mega_rl.plan.preflight import checked

        loaded = loader.load(config, settings)
        resolved = checked(loaded, world_size=launch.world_size, out=str(out), launchers=launch.nnodes)
    if launch.needs_launcher:
        recipe = [] if config is None else ["--config", str(config)]
        program = ["mega_rl.cli", "eval", *recipe, "--out", str(out), *settings]
        started = launch.launch(program, run_dir=str(out), resume="never")
        become(replace(started, max_restarts=launch.max_restarts or 0))
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.api import prepared

        accelerator = prepared(resolved)
        from mega_rl.trainer.assemble.evaluation_run import evaluate as run
    try:
        results = run(resolved, accelerator, investigate)
    except StoppedBySignal as stop:
        raise typer.Exit(stop.exit_code) from stop
    if os.environ.get("RANK", "0") == "0":
        progress.close()
        _print_evaluation(results)
        typer.echo(f"samples: {out / 'samples.jsonl'}, results: {out / 'results.json'}")


def _print_evaluation(results: JsonObject) -> None:
    """Print one line for each number of each set."""
    for name, one in results["sets"].items():
        typer.echo(f"{name or 'data'}: {one['prompts']} prompts")
        for metric, mean in one["means"].items():
            typer.echo(f"  {metric:<24} {mean:.4f}")
        for metric, of in one["estimates"].items():
            interval = f"[{of['low']:.4f}, {of['high']:.4f}]"
            typer.echo(f"  {metric:<24} {of['mean']:.4f}  {interval}  over {of['prompts']} prompts")
