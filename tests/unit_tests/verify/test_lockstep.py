"""`mega-rl verify rl`: the independent trainer agrees with the real one on every layout, and names what is wrong."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import pytest

from mega_rl.algorithms.advantages import OPO
from mega_rl.config.choices import ADVANTAGE, ALGORITHM_CHOICES, Choice, chosen
from mega_rl.config.keys import FIELDS, flat, with_settings
from mega_rl.config.schema import Config
from mega_rl.config.setting import setting
from mega_rl.errors import UserErrors
from mega_rl.verify.layouts import REFERENCE, REWARDS, TOLERANCES, Layout, fsdp, parse
from mega_rl.verify.rl import independent
from mega_rl.verify.rl.compare import off, sampler_errors, version_logits
from mega_rl.verify.rl.faults import ALGORITHMS, FAULTS, SHARED, Fault, algorithm_run, first_off
from mega_rl.verify.rl.independent.networks import PolicyNetwork
from mega_rl.verify.rl.inputs import with_layout
from mega_rl.verify.rl.rewards import FORMULAS, lockstep_settings
from mega_rl.verify.rl.run import follow_config, problem_of, write_inputs
from mega_rl.verify.rl.trace import read_batch, read_figures
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.verify.cases import ROUTED, bare_config
from tests.unit_tests.verify.lockstep_on_ranks import record_runs

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches of all

LAYOUTS = {layout.name: layout for layout in (REFERENCE, *map(parse, ("tp2", "pp2", "dp2")), fsdp(2))}
# What else a run may do, on one rank.
GRPO, KL_LOSS, PPO, TIS = (ALGORITHMS[name] for name in ("grpo", "grpo_kl", "ppo", "tis"))
ADAPTIVE = {"algorithm.kl.control": "adaptive", "algorithm.kl.target": 0.01, "algorithm.kl.horizon": 64}
EQUAL = {"reward.weights": {"correct": 0.0, "format": 1.0}, "rollout.n": 2, "trainer.steps": 3}
# Two tokens a round and few groups a step: up to five steps in flight, tokens of all ages.
AHEAD = {
    **TIS,
    "optim.lr": 1e-3,
    "rollout.max_new_tokens": 10,
    "trainer.prompts_per_step": 4,
    "trainer.minibatch_size": 2,
}
# Some groups have equal rewards, some become too old.
DRAWN = {
    **{"reward.weights": EQUAL["reward.weights"], "rollout.n": 3},
    **{"rollout.dynamic_sampling.max_generations": 4, "rollout.dynamic_sampling.prompts": 8},
}
SETS = {"algorithm.advantage.k": 2, "algorithm.advantage.right_above": 0.1, "algorithm.advantage.std": "none"}
VARIANTS: dict[str, dict[str, object]] = {
    "one update": {**GRPO, "trainer.minibatch_size": 8},
    "two epochs": {**KL_LOSS, "algorithm.epochs": 2, "algorithm.loss_aggregation": "seq-mean-token-sum"},
    "critic warm-up": {**PPO, "algorithm.critic_warmup_steps": 1},
    "adaptive KL": {**PPO, **ADAPTIVE},
    "padded": {
        **{**KL_LOSS, "algorithm.kl.estimator": "k2"},
        **{"optim.schedule": "cosine", "trainer.microbatch.packing": False},
    },
    "importance of whole responses": {**TIS, "algorithm.correction": {"name": "tis", "level": "sequence", "cap": 1.5}},
    "ratio to what sampled": {**GRPO, "algorithm.old_logprobs": "rollout"},
    "leave one out": {"algorithm.advantage": "rloo"},
    "deviation of the batch": {"algorithm.advantage": {"name": "grpo", "std": "batch"}},
    "lambda of the policy": {"algorithm.advantage": {"name": "gae", "gae_lambda": 0.95, "policy_lambda": 0.8}},
    "lambda by length": {"algorithm.advantage": {"name": "gae", "length_alpha": 0.5, "gamma": 0.9}},
    "gspo": {**GRPO, "algorithm.loss": "gspo"},
    "cispo": {
        **{**GRPO, "algorithm.loss": {"name": "cispo", "cap": 1.5, "drift_coef": 0.5}},
        "algorithm.loss_aggregation": "prompt-mean",
    },
    "truncated weights of tokens": {**TIS, "algorithm.loss_aggregation": "seq-mean-token-sum"},
    "sets without a deviation": {**ALGORITHMS["pass_at_k"], **SETS},
    "teacher of single tokens": {"algorithm.advantage": "distillation", "reward.source": "none"},
    "teacher of one update": {**ALGORITHMS["teacher_reverse_kl"], "trainer.minibatch_size": 8},
    "filter with a critic": {**PPO, "reward.overlong.filter": True},
    "copies of the reference": {**KL_LOSS, **ADAPTIVE, "algorithm.kl.reference_interval": 2, "trainer.steps": 3},
    "step filled with equal rewards": {**GRPO, **EQUAL, "rollout.dynamic_sampling.max_generations": 2},
    "mixture": PPO,
    "four steps ahead": {**AHEAD, "trainer.async_steps": 4, "trainer.steps": 14},
    "sampling ahead": {**AHEAD, **DRAWN, "trainer.async_steps": 1, "trainer.steps": 8},
    # A temperature that is 10 % off moves the first sum by 7 deviations; in shorter runs by 2 or 3.
    "many tokens": {**GRPO, "rollout.n": 32, "rollout.temperature": 0.3},
}
STEPS = {} if FULL else {"trainer.steps": 2}
# With others no prompt of two steps has parts that differ and sums that do not; or two float32 trainers are 1.4e-5 nats
# apart before the last update, whose sums over a response multiply that.
SEEDS = {"gdpo_sampling": {"trainer.seed": 2}, "importance of whole responses": {"trainer.seed": 3}}
ALL_RUNS = ALGORITHMS | VARIANTS
# `make test` has these; the others are those of `make test-full`.
FEW = (
    *((name, "1") for name in ("grpo", "ppo", "remax", "gdpo_sampling", "teacher_jensen_shannon")),
    *(("grpo", "dp2"), ("many tokens", "1"), ("four steps ahead", "1"), ("sampling ahead", "1")),
)
ALL = [*((name, layout) for name in ALGORITHMS for layout in LAYOUTS), *((name, "1") for name in VARIANTS),
       *((name, one) for name in ("four steps ahead", "sampling ahead") for one in LAYOUTS if one != "1")]  # fmt: skip
CASES = ALL if FULL else list(FEW)
FEW_FAULTS = (
    *("population instead of sample deviation", "temperature 1", "no gradient clipping", "no value clip"),
    *("sums of parts compared", "beta of the other model", "rewards of the next sample", "stop token in the text"),
)
# Fault in the real trainer -> (run, phase).
FEW_REAL_FAULTS = {"advantages one token early": ("ppo", "advantages")}
REAL_FAULTS = FEW_REAL_FAULTS | {
    "rewards of the row before": ("remax", "rewards"),
    "rate of the next step": ("ppo", "weights"),
    "groups of equal rewards kept": ("dapo_sampling", "sampling"),
    "last groups instead of the first": ("dapo_sampling", "sampling"),
    "weights of parts left out": ("gdpo", "rewards"),
    "newest version on all tokens": ("four steps ahead", "log-probs"),
    "newest groups first": ("four steps ahead", "sampling"),
    "groups of equal rewards kept ahead": ("sampling ahead", "sampling"),
    "groups dropped a step early": ("sampling ahead", "sampling"),
    "divergence of one temperature": ("teacher_reverse_kl", "loss"),
}

Runs = dict[tuple[str, str], tuple[Config, Path]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Record the real run of every case: (config, trace) by (algorithm, layout)."""
    root = tmp_path_factory.mktemp("lockstep")
    recorded: Runs = {}
    for name in dict.fromkeys(name for name, _ in CASES):
        inputs = root / name
        inputs.mkdir()
        source = bare_config(inputs / "bare", TINY[ROUTED]) if name == "mixture" else None
        run = algorithm_run({**SHARED, **STEPS, **SEEDS.get(name, {}), **ALL_RUNS[name]}, source=source)
        config, _ = write_inputs(run, inputs, multiple=2)
        for layout in (layout for one, layout in CASES if one == name):
            trace = root / f"{name}_{layout}"
            recorded[name, layout] = with_layout(config, LAYOUTS[layout], run_dir=trace / "run"), trace
    for layout in dict.fromkeys(layout for _, layout in CASES):
        launch([run for (_, one), run in recorded.items() if one == layout], LAYOUTS[layout])
    return recorded


def launch(runs: Sequence[tuple[Config, Path]], layout: Layout, *, fault: str = "") -> None:
    """Record runs of one layout."""
    for _, trace in runs:
        trace.mkdir()
    run_ranks(layout.ranks, record_runs, [(flat(config), trace) for config, trace in runs], fault, timeout_s=300.0)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_independent_trainer_agrees_after_every_update(runs: Runs, name: str, layout: str) -> None:
    """Log-probs, advantages, loss, every parameter's gradient and the weights: see `phases.TOLERANCES`."""
    config, trace = runs[name, layout]
    updates = list(follow_config(config, trace))
    assert problem_of(updates, TOLERANCES) == ""
    assert all((REWARDS in update.errors) == (config.reward.source.name != "none") for update in updates)
    assert {update.step for update in updates} == set(range(config.trainer.steps))
    assert max(update.errors["gradient"] for update in updates) > 0.0  # sums in another order: two computations


@pytest.mark.parametrize("layout", [layout for name, layout in CASES if name == "four steps ahead"])
def test_tokens_of_versions_in_a_row_have_their_own_log_probs(runs: Runs, layout: str) -> None:
    """The real run's weights of each version, in float64, give its tokens the log-probs that it recorded."""
    config, trace = runs["four steps ahead", layout]
    steps, policies = config.trainer.steps, {}
    for version in range(1, steps + 1):
        policies[version] = PolicyNetwork(Path(config.model.path))
        policies[version]._model.double()
        if version > 1:  # two updates in each step
            figures = read_figures(trace, "actor", version - 2, 1)
            assert figures is not None
            policies[version]._model.load_state_dict(figures.weights)
    batches = [read_batch(trace, step).samples for step in range(steps)]
    assert max(len(set(sample.versions)) for samples in batches for sample in samples) == 4
    ages = {step + 1 - age for step, samples in enumerate(batches) for sample in samples for age in sample.versions}
    assert ages == {0, 1, 2, 3, 4}
    prompts = {tuple(one.rows[0].tokens[: one.rows[0].start]) for samples in batches for one in samples}
    assert len(prompts) == steps * config.trainer.prompts_per_step  # each once
    for samples in batches:
        assert max(sampler_errors(samples, partial(version_logits, policies), config.rollout.temperature)) < 1e-5


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if FULL or fault.name in FEW_FAULTS], ids=lambda f: f.name)
def test_independent_trainer_fault_is_named_by_phase(runs: Runs, fault: Fault) -> None:
    first = first_off(fault, *runs[fault.algorithm, "1"])
    assert first is not None
    assert first[1] == fault.phase, first


@pytest.mark.parametrize("fault", REAL_FAULTS if FULL else FEW_REAL_FAULTS)
def test_real_trainer_fault_is_named_by_phase(runs: Runs, fault: str, tmp_path: Path) -> None:
    name, phase = REAL_FAULTS[fault]
    config, _ = runs[name, "1"]
    config = with_layout(config, REFERENCE, run_dir=tmp_path / "run")
    launch([(config, tmp_path / "trace")], REFERENCE, fault=fault)
    first = off(follow_config(config, tmp_path / "trace"))
    assert first is not None
    assert first[1] == phase


@pytest.mark.skipif(not FULL, reason="make test-full has this run")
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("dapo_sampling", "rollout/dropped_groups"),
        ("step filled with equal rewards", "rollout/filled_groups"),
        ("sampling ahead", "rollout/expired_groups"),
    ],
)
def test_dynamic_sampling_runs_drop_groups(runs: Runs, name: str, metric: str) -> None:
    config, trace = runs[name, "1"]
    lines = (Path(config.trainer.run_dir) / "metrics.jsonl").read_text("utf-8").splitlines()
    assert sum(json.loads(line).get(metric, 0.0) for line in lines) > 0
    drawn = [len(read_batch(trace, step).generations) for step in range(config.trainer.steps)]
    assert config.trainer.async_steps or drawn == [json.loads(line)["rollout/generations"] for line in lines]


def coverage(choice: Choice) -> tuple[list[str], list[str]]:
    """Names of built-in choices that are followed, and of those that are refused."""
    followed = FORMULAS[choice.key]
    return [name for name in choice.builtin if name in followed], [
        name for name in choice.builtin if name not in followed and name != "auto"
    ]


@pytest.mark.parametrize("choice", ALGORITHM_CHOICES, ids=lambda choice: str(choice.key))
def test_every_independent_formula_has_a_run(choice: Choice) -> None:
    followed, _ = coverage(choice)
    assert {chosen(algorithm_run({**SHARED, **run}).config, choice) for run in ALL_RUNS.values()} == set(followed)
    assert set(FORMULAS[choice.key]) == set(followed)  # none of a choice that the package has not
    for name in followed:
        assert FORMULAS[choice.key][name] == {field.name for field in fields(choice.builtin[name])}


@pytest.mark.parametrize("choice", ALGORITHM_CHOICES, ids=lambda choice: str(choice.key))
def test_page_lists_followed_and_refused_choices(choice: Choice) -> None:
    followed, refused = (" ".join(f"`{name}`" for name in names) or "none" for names in coverage(choice))
    page = (Path(__file__).parents[3] / "docs" / "verify.md").read_text("utf-8")
    assert f"| `{choice.key}` | {followed} | {refused} |" in page


@dataclass(frozen=True)
class NewSettings(OPO):
    """Settings of an estimator that is not followed, or of OPO with a setting that is new."""

    sharpness: float = setting(1.0, "A number.")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("new", {}, "algorithm.advantage=new: the independent trainer has no formula of it; legal: grpo rloo "),
        ("opo", {"sharpness": 2.0}, "algorithm.advantage.sharpness=2.0: the independent trainer's opo has no"),
        ("opo", {}, ""),
        ("mine.py:Mine", {}, "algorithm.advantage=mine.py:Mine: the independent trainer has no formula"),
    ],
)
def test_choice_without_formula_is_refused_with_reason(
    name: str, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = {**ADVANTAGE.builtin, "new": type("New", (NewSettings,), {"name": "new"}), "opo": NewSettings}
    field = FIELDS[ADVANTAGE.key]
    monkeypatch.setattr(field, "metadata", {**field.metadata, "kinds": builtin})
    config = with_settings(Config(), {"algorithm.advantage": {"name": name, **settings}})
    if not message:
        assert lockstep_settings(config).advantage.name == name
        return
    with pytest.raises(UserErrors) as raised:
        lockstep_settings(config)
    assert message in str(raised.value)


def test_the_independent_trainer_imports_nothing_of_the_package() -> None:
    """It could not be a second opinion on code that it calls."""
    modules = sorted(Path(str(independent.__file__)).parent.glob("*.py"))
    assert len(modules) >= 7
    lines = 0
    for module in modules:
        text = module.read_text("utf-8")
        lines += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not isinstance(node, ast.ImportFrom) or node.level == 0
            for name in names:
                assert not name.startswith("mega_rl") or name.startswith(independent.__name__), f"{module.name}: {name}"
    assert lines < 1200
