"""Learning curves of GRPO, mega_rl against TRL: same weights, prompts, rewards, formulas; several seeds each.

A random Qwen3 of two layers has to repeat the two letters of its prompt: `ab` -> `ababab.`. Both trainers begin with
the same weights, take the same prompts in the same order, and make two clipped updates of Adam a step. What differs is
the random stream of the sampler, so curves are compared over seeds: as bands, and in the first steps, where curves
rise fastest, by the differences of pairs with one seed. Each run is a process of one thread.

    make bench-curves                                       # 5 seeds, 100 steps, some ten minutes on one core
    python benchmarks/learning.py --fault shift             # a wrong trainer: the curves must come apart
    python benchmarks/learning.py --run trl --seed 3 --json trl3.json      # one run
    python benchmarks/learning.py --join trl*.json mega_rl*.json           # runs that are there already
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from driver import parser_of, run

from mega_rl.verify.learn.tasks import band

LETTERS, STOP = "abcdefgh", "."
RESPONSE = 6  # letters of a right response
MAX_TOKENS = 8
PROMPTS = 16  # of a step
SAMPLES = 8  # of a prompt
UPDATES = 2  # optimizer steps of a step
LEARNING_RATE = 1e-3
CLIP = 0.2
BETA2 = 0.95
WINDOW = 10  # steps whose mean is one point of a curve
EARLY = 20  # first steps, in which curves are compared seed by seed
CURVES = ("rewards", "entropy")  # of a `Run`
TRAINERS = ("mega_rl", "trl")
DEADLINE_S = 1800  # of one run
# Settings of mega_rl that make it another trainer than TRL's; the README says which ones the comparison shows.
FAULTS: dict[str, dict[str, object]] = {
    "lr": {"optim.lr": 3 * LEARNING_RATE},
    "lr2": {"optim.lr": 2 * LEARNING_RATE},
    "shift": {"algorithm.advantage": "shifted"},
    "aggregation": {"algorithm.loss_aggregation": "seq-mean-token-sum"},
    "beta2": {"optim.beta2": 0.5},
    "eps": {"optim.eps": 1e-3},
}


@dataclass(frozen=True)
class Run:
    """Result of one run."""

    trainer: str
    seed: int
    rewards: list[float]  # mean of each step's samples
    step_s: list[float]  # time of each step but the first
    entropy: list[float]  # mean over each step's tokens, nats


@dataclass(frozen=True)
class Point:
    """Means over seeds of a window of steps, with the ends of their 95 % intervals."""

    steps: int  # done at the window's end
    bands: dict[str, tuple[float, float, float]]  # trainer -> mean, low, high

    @property
    def overlap(self) -> bool:
        """Whether the intervals of both trainers touch."""
        (_, low, high), (_, other_low, other_high) = (self.bands[name] for name in TRAINERS)
        return low <= other_high and other_low <= high


def repeats(prompt: str, response: str) -> float:
    """Share of letters in their places; letters beyond the last place lower it."""
    letters = response.split(STOP)[0]
    right = sum(letter == prompt[i % len(prompt)] for i, letter in enumerate(letters[:RESPONSE]))
    return right / max(RESPONSE, len(letters))


def write_inputs(folder: Path, *, seed: int, steps: int) -> None:
    """Write the seed's model and its prompts, each step's after the last one's."""
    from mega_rl.verify.learn.run import write_model

    write_model(folder / "model", LETTERS + STOP, stop=STOP, seed=seed)
    generator = random.Random(seed)
    prompts = ("".join(generator.choices(LETTERS, k=2)) for _ in range(steps * PROMPTS))
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in prompts))


def run_mega_rl(folder: Path, *, seed: int, steps: int, fault: str | None) -> Run:
    """Train with mega_rl in this process."""
    import mega_rl

    mega_rl.register_advantage("shifted")(shifted)
    settings: dict[str, object] = {
        "model.path": str(folder / "model"),
        "model.dtype": "fp32",
        "data.train_files": [str(folder / "train.jsonl")],
        "data.shuffle": False,
        "data.max_prompt_tokens": 2,
        "rollout.n": SAMPLES,
        "rollout.max_new_tokens": MAX_TOKENS,
        "algorithm.advantage": "grpo",
        "algorithm.loss.clip_low": CLIP,
        "algorithm.loss.clip_high": CLIP,
        "algorithm.loss_aggregation": "seq-mean-token-mean",
        "optim.lr": LEARNING_RATE,
        "optim.beta2": BETA2,
        "trainer.device": "cpu",
        "trainer.seed": seed,
        "trainer.steps": steps,
        "trainer.prompts_per_step": PROMPTS,
        "trainer.minibatch_size": PROMPTS // UPDATES,
        "trainer.run_dir": str(folder / "run"),
        "checkpoint.save_final": False,
        "metrics.tensorboard": False,
        "metrics.progress_bar": False,
        "metrics.rollout_interval": 0,
    } | FAULTS.get(fault or "", {})
    with mega_rl.Trainer(mega_rl.load_config(None, settings), reward=repeats) as trainer:
        history = trainer.fit().history()
    records = [record.metrics for record in history if "reward/mean" in record.metrics]
    rewards = [record["reward/mean"] for record in records]
    entropy = [record["actor/entropy"] for record in records]
    return Run("mega_rl", seed, rewards, [record["time/step_s"] for record in records[1:]], entropy)


def shifted(inputs: Any) -> Any:
    """Advantages of GRPO one token late: the fault that an alignment off by one is."""
    import torch

    from mega_rl.algorithms.advantages import GRPO

    advantages, returns = GRPO()(inputs)
    return torch.roll(advantages, 1, dims=1) * inputs.experience.loss_mask, returns


def run_trl(folder: Path, *, seed: int, steps: int) -> Run:
    """Train with TRL in this process."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rewards: list[float] = []
    times: list[float] = []
    entropies: list[float] = []  # of each update

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts = ["".join((LETTERS + STOP)[token] for token in ids) for ids in completion_ids]
        values = [repeats(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        rewards.append(statistics.fmean(values))
        return values

    class Clock(TrainerCallback):
        """Notes when a step's last update is done."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            entropies.append(trainer._metrics["train"]["entropy"][-1])  # for its log, which is off
            if state.global_step % UPDATES == 0:
                times.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.eos_token = tokenizer.pad_token = STOP
    arguments = GRPOConfig(
        output_dir=str(folder / "run"),
        seed=seed,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=PROMPTS * SAMPLES // UPDATES,
        gradient_accumulation_steps=1,
        steps_per_generation=UPDATES,
        num_generations=SAMPLES,
        max_completion_length=MAX_TOKENS,
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        epsilon=CLIP,
        loss_type="grpo",  # mean over sequences of the mean over tokens
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta2=BETA2,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=steps * UPDATES,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=load_dataset(
            "json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / "cache")
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    entropy = [statistics.fmean(entropies[i : i + UPDATES]) for i in range(0, len(entropies), UPDATES)]
    return Run("trl", seed, rewards, [end - start for start, end in pairwise(times)], entropy)


def run_one(trainer: str, *, seed: int, steps: int, fault: str | None) -> Run:
    """Write the inputs of a seed to a temporary folder and train there, on one thread."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="learning_") as name:
        folder = Path(name)
        write_inputs(folder, seed=seed, steps=steps)
        if trainer == "trl":
            return run_trl(folder, seed=seed, steps=steps)
        return run_mega_rl(folder, seed=seed, steps=steps, fault=fault)


def run_all(trainers: Sequence[str], *, seeds: Sequence[int], steps: int, fault: str | None) -> list[Run]:
    """Train every seed with every trainer, a process each; which one goes first alternates."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="learning_") as name:
        for seed in seeds:
            for trainer in trainers if seed % 2 == 0 else trainers[::-1]:
                result = Path(name, f"{trainer}{seed}.json")
                options = ["--run", trainer, "--seed", str(seed), "--steps", str(steps), "--json", str(result)]
                if fault:
                    options += ["--fault", fault]
                run([__file__, *options], deadline_s=DEADLINE_S)
                runs += read_runs([result])
                last = statistics.fmean(runs[-1].rewards[-WINDOW:])
                print(f"{trainer:8s} seed {seed}: reward {last:.3f} in the last {WINDOW} steps", flush=True)
    return runs


def read_runs(files: Sequence[Path]) -> list[Run]:
    """Return the runs that files of `--json` hold."""
    return [Run(**row) for file in files for row in json.loads(file.read_text())]


def compare(runs: Sequence[Run]) -> list[Point]:
    """Return the bands of both trainers, window after window."""
    steps = min(len(run.rewards) for run in runs)
    points = []
    for end in range(WINDOW, steps + 1, WINDOW):
        bands = {}
        for trainer in TRAINERS:
            own = [statistics.fmean(run.rewards[end - WINDOW : end]) for run in runs if run.trainer == trainer]
            interval = band(own)
            bands[trainer] = (interval.mean, interval.low, interval.high)
        points.append(Point(end, bands))
    return points


def pairs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return mega_rl's and TRL's run of each seed that has both, in order of the seeds."""
    of = {(run.trainer, run.seed): run for run in runs}
    seeds = sorted({run.seed for run in runs})
    return [(of["mega_rl", seed], of["trl", seed]) for seed in seeds if ("mega_rl", seed) in of and ("trl", seed) in of]


def early_difference(runs: Sequence[Run], curve: str) -> tuple[float, float, float]:
    """Return the mean over seeds of mega_rl's curve less TRL's in the first steps, with its 95 % interval.

    Both runs of a seed share weights and prompts, so what a seed makes harder cancels out.
    """
    early = [[statistics.fmean(vars(run)[curve][:EARLY]) for run in pair] for pair in pairs(runs)]
    interval = band([ours - trl for ours, trl in early])
    return interval.mean, interval.low, interval.high


def problems(runs: Sequence[Run], points: Sequence[Point]) -> list[str]:
    """Return what speaks against equal learning: curves that differ, seeds that differ, a task that was not learned."""
    seeds = {trainer: sorted(run.seed for run in runs if run.trainer == trainer) for trainer in TRAINERS}
    if seeds[TRAINERS[0]] != seeds[TRAINERS[1]]:
        return [f"the seeds of both trainers differ: {seeds}"]
    lines = []
    apart = [point.steps for point in points if not point.overlap]
    if apart:
        lines.append(f"the bands are apart in the windows that end with steps {', '.join(map(str, apart))}")
    for curve in CURVES:
        mean, low, high = early_difference(runs, curve)
        if not low <= 0.0 <= high:
            lines.append(f"{curve} of mega_rl less that of TRL is {mean:+.3f} in steps 1 to {EARLY}, not 0")
    for trainer in TRAINERS:
        first, last = points[0].bands[trainer], points[-1].bands[trainer]
        if last[1] <= first[2]:
            lines.append(f"{trainer} does not learn: {first[0]:.3f} at first, {last[0]:.3f} at last")
    return lines


def time_ratio(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Return the median over seeds of the ratio mega_rl / TRL of median step times, the least and the greatest one."""
    ratios = [statistics.median(ours.step_s) / statistics.median(trl.step_s) for ours, trl in pairs(runs)]
    return statistics.median(ratios), min(ratios), max(ratios)


def table(points: Sequence[Point]) -> str:
    """Return the bands as a Markdown table."""
    rows = ["| steps | mega_rl | TRL | |", "|---|---|---|---|"]
    for point in points:
        cells = ["{:.3f} ({:.3f} to {:.3f})".format(*point.bands[name]) for name in TRAINERS]
        verdict = "overlap" if point.overlap else "APART"
        rows.append(f"| {point.steps - WINDOW + 1}-{point.steps} | {cells[0]} | {cells[1]} | {verdict} |")
    return "\n".join(rows)


def plot(points: Sequence[Point], picture: Path) -> None:
    """Draw both bands; the same points give the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [point.steps for point in points]
    for name in TRAINERS:
        means, lows, highs = zip(*(point.bands[name] for point in points), strict=True)
        (line,) = axes.plot(steps, means, label={"trl": "TRL"}.get(name, name))
        axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="step", ylabel="reward, mean and 95 % band")
    axes.grid(alpha=0.3)
    axes.legend()
    with matplotlib.rc_context({"svg.hashsalt": "mega_rl", "svg.fonttype": "none"}):
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def judge(runs: Sequence[Run], picture: Path | None) -> int:
    """Print table, overlap, differences and ratio of times; exit code 1 if anything speaks against equal learning."""
    if len(pairs(runs)) < 2:
        raise SystemExit(f"there are runs by both trainers of {len(pairs(runs))} seeds: give those of at least 2")
    print(table(points := compare(runs)))
    print(f"overlapping windows: {sum(point.overlap for point in points)} of {len(points)}")
    for curve in CURVES:
        mean, low, high = early_difference(runs, curve)
        print(f"{curve} in steps 1 to {EARLY}, mega_rl less TRL, by seed: {mean:+.3f} ({low:+.3f} to {high:+.3f})")
    median, least, greatest = time_ratio(runs)
    print(f"time of a step, mega_rl / TRL: {median:.3f} (over seeds {least:.3f} to {greatest:.3f})")
    if picture:
        plot(points, picture)
    missed = problems(runs, points)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def main() -> int:
    """Run, join or judge as the arguments say."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="2 to 10")
    parser.add_argument("--first-seed", type=int, default=5, help="the comparison was made on seeds 0 to 4")
    parser.add_argument("--steps", type=int, default=100, help=f"a multiple of {WINDOW}")
    parser.add_argument("--run", choices=TRAINERS, help="train once with this one, with --seed, and write --json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--join", type=Path, nargs="+", help="judge the runs of these files of --json")
    parser.add_argument("--fault", choices=FAULTS, help="plant it into mega_rl")
    parser.add_argument("--plot", type=Path, help="draw the bands here: .svg, .png or .pdf")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.seeds, arguments.steps = 2, 2 * WINDOW
    if not 2 <= arguments.seeds <= 10:
        parser.error(f"--seeds {arguments.seeds}: give 2 to 10")
    if arguments.steps < 2 * WINDOW or arguments.steps % WINDOW:
        parser.error(f"--steps {arguments.steps}: give a multiple of {WINDOW}, at least {2 * WINDOW}")
    if arguments.join:
        runs = read_runs(arguments.join)
    elif arguments.run:
        runs = [run_one(arguments.run, seed=arguments.seed, steps=arguments.steps, fault=arguments.fault)]
    else:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        runs = run_all(TRAINERS, seeds=seeds, steps=arguments.steps, fault=arguments.fault)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    if arguments.run:
        return 0
    missed = judge(runs, arguments.plot)
    return 0 if arguments.tiny else missed


if __name__ == "__main__":
    sys.exit(main())
