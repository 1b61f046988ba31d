"""The cost model: its parts by hand, what it is made faster by, and the page of large runs."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace

import pytest

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.cost import BUBBLE, HARDWARE, Hardware, StepTime, step_time, sync_traffic
from mega_rl.plan.report import as_json, as_text, plan_of
from mega_rl.plan.search import changed
from mega_rl.rollout.sglang.weights.reshard import changes_pay_off
from mega_rl.tracking.metrics.flops import ModelWork
from tests import scale_pages
from tests.unit_tests.converters.hub_configs import DEEPSEEK_V3
from tests.unit_tests.plan.models import QWEN3_0_6B, QWEN3_8B, QWEN3_235B
from tests.unit_tests.plan.test_plan import MEGATRON, run

H100 = HARDWARE["h100"]
# Nothing but products takes time.
IDEAL = replace(H100, memory_rate=1e30, nvlink=1e30, network=1e30, host_copy=1e30)


def phase(time: StepTime, name: str) -> dict[str, float]:
    """The parts of a phase."""
    return dict(time.phases[name])


def test_ideal_training_reaches_the_matmul_share() -> None:
    """On any number of stages and tensor-parallel ranks every product counts once."""
    for settings in ({}, {f"{MEGATRON}.tp": 2}, {f"{MEGATRON}.pp": 4, f"{MEGATRON}.tp": 2}):
        setup = changed(run("8b"), {"model.recompute": "none", **settings})
        time = step_time(setup, IDEAL)
        idle = sum(phase(time, f"training the {role}").get(BUBBLE, 0.0) for role in ("actor", "critic"))
        training = sum(sum(phase(time, f"training the {role}").values()) for role in ("actor", "critic"))
        share = time.useful / (training - idle) / time.peak  # the head's stage has more to do
        assert H100.matmul_share * 0.85 <= share <= H100.matmul_share * (1 + 1e-9)
    one_stage = step_time(changed(run("8b"), {"model.recompute": "none"}), IDEAL)
    assert one_stage.mfu == pytest.approx(H100.matmul_share, rel=1e-9)


def test_layers_and_output_make_the_whole_model() -> None:
    for hf in (QWEN3_0_6B, QWEN3_8B, QWEN3_235B, parse_hf_config(DEEPSEEK_V3)):
        layers = [range(3), range(3, hf.num_layers)]
        parts = [ModelWork(hf, head="lm", layers=each, output=i == 1).forward([100]) for i, each in enumerate(layers)]
        assert sum(parts) == pytest.approx(ModelWork(hf, head="lm").forward([100]), rel=1e-12)


def test_messages_take_the_slowest_link() -> None:
    """Four tensor-parallel ranks are on one host; of eight, half are on another one where hosts have four GPUs."""
    setup = changed(run("8b"), {f"{MEGATRON}.tp": 8})
    one_host = phase(step_time(setup, H100), "training the actor")["tensor parallelism"]
    hosts_of_four = replace(setup, machine=replace(setup.machine, gpus_per_node=4))
    two_hosts = phase(step_time(hosts_of_four, H100), "training the actor")["tensor parallelism"]
    assert two_hosts / one_host == pytest.approx(H100.nvlink / (4 * H100.network))


@pytest.mark.parametrize("rate", sorted({one.name for one in fields(Hardware)} - {"memory", "embedded_layer_s"}))
def test_every_coefficient_has_an_effect(rate: str) -> None:
    """Twice a rate, or half a latency, makes one of the large runs faster, and none slower."""
    faster = False
    for name in ("32b", "235b"):
        scale = scale_pages.RUNS[name]
        setup, hardware = scale.setup, HARDWARE[scale.gpu]
        value = getattr(hardware, rate)
        better = replace(hardware, **{rate: value * 2})
        if rate == "served_layer_s":  # memory is the slower part there
            hardware, better = replace(hardware, served_layer_s=0.1), replace(hardware, served_layer_s=0.05)
        before, after = (step_time(setup, each).total for each in (hardware, better))
        assert after <= before * (1 + 1e-9)
        faster |= after < before
    assert faster


def test_generation_ahead_hides_the_shorter_half() -> None:
    scale = scale_pages.RUNS["deepseek-v3"]
    time = step_time(scale.setup, HARDWARE["h200"], server_ranks=16)
    seconds = {name: sum(parts.values()) for name, parts in time.phases.items()}
    training = sum(value for name, value in seconds.items() if name not in ("generating", "sending weights"))
    assert time.total == pytest.approx(seconds["sending weights"] + max(seconds["generating"], training))
    assert phase(step_time(scale.setup, HARDWARE["h200"]), "generating") == {}
    in_turns = changed(
        run("8b"), {"rollout.backend": "sglang", "trainer.async_steps": 2, "rollout.sglang.placement": "colocated"}
    )
    assert not step_time(in_turns, HARDWARE["h200"]).ahead


def test_plan_tells_the_time_for_a_gpu() -> None:
    setup = run("8b")
    plan = plan_of(setup, hardware=H100)
    lines = list(as_text(plan))
    assert any(line.startswith("Expected time of a step: ") for line in lines)
    assert as_json(plan)["time"]["seconds"] == plan.time.total  # type: ignore[index, union-attr]
    silent = plan_of(setup)
    assert as_json(silent)["time"] is None
    assert not any("Expected time" in line for line in as_text(silent))


def test_joined_servers_may_get_changes() -> None:
    joined = next(scale.setup for scale in scale_pages.RUNS.values() if scale.servers)
    sizes = sync_traffic(joined)
    assert sizes["or, over a slow link, changes"] == round(0.06 * sizes["sent to the servers"])
    assert "or, over a slow link, changes" not in sync_traffic(changed(joined, {"rollout.sglang.sync.delta": "off"}))
    assert "or, over a slow link, changes" not in sync_traffic(run("8b"))


@pytest.mark.parametrize(("gbit", "faster"), [(0.1, "changes"), (1, "changes"), (10, "all weights")])
def test_plan_says_what_a_link_takes(gbit: float, faster: str) -> None:
    """As the run chooses by the link that it measures; the step's time has the faster of both."""
    joined = next(scale.setup for scale in scale_pages.RUNS.values() if scale.servers)
    rate = gbit * 1e9 / 8
    linked = replace(joined, machine=replace(joined.machine, server_link=rate))
    plan, size = plan_of(linked, hardware=H100), sync_traffic(joined)["model"]
    whole, changes = size / rate, size / 160e6 + 0.06 * size / rate
    assert as_json(plan)["weight_sync_seconds"] == {"all weights": whole, "changes": pytest.approx(changes)}
    assert (changes < whole) == changes_pay_off(rate) == (faster == "changes")
    assert plan.time is not None
    assert plan.time.phases["sending weights"]["weights to the servers"] == pytest.approx(min(whole, changes))
    (line,) = (line for line in as_text(plan) if "are faster" in line)
    assert line == f"  {faster} are faster, if changes are 6% of the bytes"
    off = plan_of(changed(linked, {"rollout.sglang.sync.delta": "off"}))
    assert as_json(off)["weight_sync_seconds"] == {"all weights": whole}
    assert as_json(plan_of(joined))["weight_sync_seconds"] is None


def test_weights_within_a_step_are_sent_more_often() -> None:
    """Four optimizer steps, after every three and after the step: twice the seconds of one."""
    joined = next(scale.setup for scale in scale_pages.RUNS.values() if scale.servers)
    four = changed(joined, {"trainer.minibatch_size": joined.config.trainer.prompts_per_step // 4})
    twice = changed(four, {"rollout.sglang.sync.interval": 3})
    once, more = (plan_of(one, hardware=H100).time for one in (four, twice))
    assert once is not None
    assert more is not None
    sending = once.phases["sending weights"]
    assert more.phases["sending weights"] == {name: pytest.approx(2 * seconds) for name, seconds in sending.items()}


def test_page_equals_the_plans() -> None:
    """`make docs` has been run; a shell makes the settings of each command."""
    page = scale_pages.PAGE.read_text(encoding="utf-8")
    assert scale_pages.rendered(page) == page
    assert {match[2] for match in scale_pages.BLOCK.finditer(page)} == {*scale_pages.RUNS, "coefficients"}
    for scale in scale_pages.RUNS.values():
        words = shlex.split(scale.command.replace("\\\n", ""))
        given = dict(word.split("=", 1) for word in words[3:] if "=" in word and "urls" not in word)
        assert given == {key: str(value) for key, value in scale.settings.items()}
