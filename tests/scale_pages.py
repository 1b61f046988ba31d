"""Writes the numbers of docs/scale.md from plans of whole runs: `python -m tests.scale_pages`, part of `make docs`.

The page holds `<!-- scale: NAME -->`, the plan of `RUNS[NAME]` as Markdown, and `<!-- end of scale -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mega_rl.config import packaged
from mega_rl.config.loader import load
from mega_rl.config.needs import updates_of_a_batch
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.activations import num_microbatches
from mega_rl.plan.cost import HARDWARE, Hardware, StepTime, step_time
from mega_rl.plan.memory import FitVerdict, judge, memory_of_stages
from mega_rl.plan.report import seconds
from mega_rl.plan.search import is_legal
from mega_rl.plan.setup import Machine, RunSetup
from tests.unit_tests.converters.hub_configs import DEEPSEEK_V3
from tests.unit_tests.plan.models import QWEN3_8B, QWEN3_32B, QWEN3_235B

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BLOCK = re.compile(r"(<!-- scale: ([\w-]+) -->\n)(.*?)(<!-- end of scale -->)", flags=re.DOTALL)
MEGATRON = "engine.megatron"
NUM_PARTS = 4  # longest parts of a step that the page lists


@dataclass(frozen=True)
class ScaleRun:
    """A run that the page plans: a packaged recipe and what replaces some of its settings."""

    recipe: str
    model: HFConfig
    gpus: int  # of the trainer
    gpu: str
    settings: dict[str, Any] = field(default_factory=dict)
    servers: int = 0  # that are joined
    server_gpus: int = 0  # of each of them

    @property
    def command(self) -> str:
        """Return the command line that prints the plan."""
        settings = [f"{key}={_written(value)}" for key, value in self.settings.items()]
        if self.servers:
            settings.append(f'"rollout.sglang.urls=[$(seq -s, -f http://server%g:30000 {self.servers})]"')
        options = [f"--gpus {self.gpus}", f"--gpu {self.gpu}", "--layers te"]
        options += [f"--server-gpus {self.server_gpus}"] if self.servers else []
        return " \\\n  ".join([f"mega-rl plan {self.recipe}", *settings, " ".join(options)])

    @property
    def setup(self) -> RunSetup:
        """Return the run, whose settings are legal."""
        overrides = [f"{key}={value}" for key, value in self.settings.items()]
        if self.servers:
            urls = ",".join(f"http://server{number}:30000" for number in range(1, self.servers + 1))
            overrides.append(f"rollout.sglang.urls=[{urls}]")
        config = load(packaged.file_of(self.recipe), overrides)
        hardware = HARDWARE[self.gpu]
        machine = Machine(self.gpus, gpu_memory=round(hardware.memory), has_te=True)
        setup = RunSetup(config, {"model.path": self.model}, machine)
        assert is_legal(setup)
        return setup


RUNS = {
    "8b": ScaleRun("gsm8k_qwen3_8b_8gpu", QWEN3_8B, 8, "h100"),
    "32b": ScaleRun("gsm8k_qwen3_32b_64gpu", QWEN3_32B, 64, "h100"),
    "235b": ScaleRun(
        "gsm8k_qwen3_32b_64gpu",
        QWEN3_235B,
        256,
        "h200",
        {
            "model.path": "Qwen/Qwen3-235B-A22B",
            f"{MEGATRON}.tp": 4,
            f"{MEGATRON}.pipeline": "Et*23|t*24|t*24|t*23L",
            f"{MEGATRON}.vpp": 1,
            f"{MEGATRON}.ep": 16,
            f"{MEGATRON}.etp": 1,
            "rollout.sglang.server.tp": 8,
            "trainer.prompts_per_step": 512,
            "trainer.minibatch_size": 128,
        },
    ),
    "deepseek-v3": ScaleRun(
        "gsm8k_qwen3_32b_64gpu",
        parse_hf_config(DEEPSEEK_V3, where="config.json"),
        512,
        "h200",
        {
            "model.path": "DeepSeek-V3-bf16",
            f"{MEGATRON}.tp": 1,
            f"{MEGATRON}.sequence_parallel": "false",
            f"{MEGATRON}.pp": 16,
            f"{MEGATRON}.pipeline": "Et*3|(t*4|)*14t*2L",
            f"{MEGATRON}.vpp": 1,
            f"{MEGATRON}.ep": 32,
            f"{MEGATRON}.etp": 1,
            "algorithm.correction": "tis",
            "rollout.sglang.server.tp": "null",
            "rollout.sglang.keys_file": "keys.json",
            "trainer.async_steps": 1,
            "trainer.prompts_per_step": 512,
            "trainer.minibatch_size": 256,
            "trainer.microbatch.max_tokens": 5120,
        },
        servers=32,
        server_gpus=16,
    ),
}


def block(run: ScaleRun) -> str:
    """Return the plan of a run as Markdown: command, layout, memory, time and what takes longest."""
    setup = run.setup
    memory = memory_of_stages(setup)
    verdict = judge(setup, memory)
    time = step_time(setup, HARDWARE[run.gpu], server_ranks=run.server_gpus, memory=memory)
    return "\n".join([*_head(run, setup, verdict), "", *_time(time)]) + "\n"


def coefficients() -> str:
    """Return a table of the cost model's coefficients, with those that all GPUs share below it."""
    rates = [one.name for one in fields(Hardware)]
    values = {name: [f"{getattr(each, name):g}" for each in HARDWARE.values()] for name in rates}
    rows = [[f"`{name}`", *row] for name, row in values.items() if len(set(row)) > 1]
    shared = ", ".join(f"`{name}` {row[0]}" for name, row in values.items() if len(set(row)) == 1)
    return "\n".join([*_rows(["", *HARDWARE], rows), "", f"On all: {shared}."]) + "\n"


def rendered(page: str) -> str:
    """Return the text of the page with every block as the plans have it. Raises KeyError for an unknown block."""

    def text(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}{coefficients() if name == 'coefficients' else block(RUNS[name])}{match[4]}"

    return BLOCK.sub(text, page)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _head(run: ScaleRun, setup: RunSetup, verdict: FitVerdict) -> Iterator[str]:
    yield "```"
    yield run.command
    yield "```"
    yield ""
    steps, micros, rollout = updates_of_a_batch(setup.config), num_microbatches(setup), setup.config.rollout
    rows = setup.config.trainer.prompts_per_step * rollout.n
    yield f"Layout {setup.layout}; {rows:,} responses of {rollout.max_new_tokens:,} tokens, {steps} optimizer steps of"
    yield f"{micros} micro-batches. {verdict.sentence[:1].upper()}{verdict.sentence[1:]}."


def _time(time: StepTime) -> Iterator[str]:
    together = ", with training and generation side by side" if time.ahead else ""
    yield f"Expected step: {seconds(time.total)}{together}; training at {time.mfu:.0%} of the peak. Longest parts:"
    parts = [(spent, phase, part) for phase, its in time.phases.items() for part, spent in its.items()]
    longest = sorted(parts, reverse=True)[:NUM_PARTS]
    yield "; ".join(f"{phase}, {part} {seconds(spent)}" for spent, phase, part in longest) + "."


def _rows(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _written(value: Any) -> str:
    text = str(value)
    return f"'{text}'" if set(text) & set("|*()[]") else text


if __name__ == "__main__":
    main()
