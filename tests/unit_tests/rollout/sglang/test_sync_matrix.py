"""Every train layout, and models under FSDP, into real servers of one and two tensor-parallel ranks.

Servers are started from checkpoint A, and what they answer then is the reference. Each layout sends them B, after which
answers differ, and A, after which they must be the reference again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema import AdapterConfig, MegatronConfig, RolloutConfig
from mega_rl.config.schema.rollout import SglangConfig, SglangSyncConfig
from mega_rl.converters.architecture import Adapter
from mega_rl.rollout.sglang.control import Control, Endpoint, Keys, ServerError
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings, telling_lines
from mega_rl.rollout.sglang.weights.adapters import server_arguments
from mega_rl.types import Prompt
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL, without
from tests.helpers.sglang import DEVICE, START_S, generate, needs_sglang
from tests.unit_tests.engines.any_model_cases import write_model

pytestmark = [needs_sglang, pytest.mark.timeout(900)]  # the first test pays for the starts of all servers

# case -> (ranks, source, how the trainer runs it)
ALL_CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp2": (2, "dense", {"megatron": MegatronConfig(tp=2)}),
    "pp2": (2, "dense", {"megatron": MegatronConfig(pp=2)}),
    "ep2": (2, "mixture", {"megatron": MegatronConfig(ep=2)}),
    "fsdp": (2, "dense", {"engine": "fsdp"}),
    "fsdp of experts": (2, "mixture", {"engine": "fsdp"}),
    "fsdp of any model": (2, "untabled", {"engine": "fsdp"}),
    "adapters of tp2": (2, "adapted", {"megatron": MegatronConfig(tp=2)}),
    "adapters of fsdp": (2, "adapted", {"engine": "fsdp"}),
    "changes of tp2": (2, "dense", {"megatron": MegatronConfig(tp=2)}),
    "changes of ep2": (2, "mixture", {"megatron": MegatronConfig(ep=2)}),
    "tp2-pp2": (4, "dense", {"megatron": MegatronConfig(tp=2, pp=2)}),
}
# Families whose adapters servers of 0.5.21 take; each has a case "adapters of NAME".
ADAPTED = ("llama", "qwen2", "mistral")
ALL_CASES |= {f"adapters of {name}": (2, f"adapted-{name}", {"megatron": MegatronConfig(tp=2)}) for name in ADAPTED}
# The stages are those of "tp2-pp2".
CASES = without(ALL_CASES, "pp2", "fsdp of experts", *(f"adapters of {name}" for name in ADAPTED))
OF_ADAPTERS = [name for name in CASES if name.startswith("adapters")]
# Tensor-parallel ranks of the servers of each source, a server each.
SERVERS = {"dense": (1, 2), "mixture": (1, 2)} if FULL else {"dense": (2,), "mixture": (1,)}
SERVERS |= {"untabled": (1,), "adapted": (2,)}
SERVERS |= {f"adapted-{name}": (2,) for name in ADAPTED if FULL}
FAMILIES = {"dense": ("qwen3", True), "mixture": ("qwen3_moe", False), "adapted": ("qwen3", False)}  # family, tied
FAMILIES |= {f"adapted-{name}": (name, False) for name in ADAPTED if FULL}
ADAPTER = AdapterConfig(rank=4, alpha=8.0, rs=True)  # of all projections
LORA = server_arguments(Adapter(4, 8.0, tuple(ADAPTER.targets)), DEVICE)
UNTABLED = "gpt2"  # no table of ours knows it; matrices stored transposed, learned positions, biases
TEMPERATURE = 0.7
PROMPTS = [[3, 4, 5, 6], [49], list(range(2, 40)), [7, 7, 7]]
LIMIT = 1e-5  # nats, float32: matrices of other shapes are summed in another order


@dataclass
class Servers:
    """Servers of one model, of one tensor-parallel rank and of two, or of two alone."""

    processes: list[ServerProcess]
    endpoints: list[Endpoint] = field(default_factory=list)
    reference: list[Any] = field(default_factory=list)

    def entries(self) -> list[dict[str, Any]]:
        """For another process."""
        return [_entry(one, process.settings.tp) for one, process in zip(self.endpoints, self.processes, strict=True)]


def _entry(endpoint: Endpoint, tp: int) -> dict[str, Any]:
    return {"index": endpoint.index, "url": endpoint.url, "keys": dataclasses.asdict(endpoint.keys), "tp": tp}


def _endpoint(entry: dict[str, Any]) -> Endpoint:
    return Endpoint(entry["index"], entry["url"], Keys(**entry["keys"]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    for source, (family, tied) in FAMILIES.items():
        for seed, name in enumerate("ab"):
            write_tiny_checkpoint(folder / f"{source}-{name}", family=family, tied=tied, seed=seed)
    for seed, name in enumerate("ab"):
        write_model(folder / f"untabled-{name}", UNTABLED, seed=seed)
    return folder


@pytest.fixture(scope="module")
def servers(root: Path) -> Iterator[dict[str, Servers]]:
    """All of them, started side by side."""
    with ExitStack() as stack:
        actual = {}
        for source in SERVERS:
            processes = [
                ServerProcess(
                    ServerSettings(
                        model_path=root / f"{source}-a",
                        tp=tp,
                        device=DEVICE,
                        start_timeout_s=2 * START_S,
                        args={"max_total_tokens": 8000} | (LORA if source.startswith("adapted") else {}),
                    ),
                    index=index,
                    folder=root / source,
                )
                for index, tp in enumerate(SERVERS[source])
            ]
            for process in processes:
                stack.enter_context(_stopped(process))
                process.start()
            actual[source] = Servers(processes)
        for group in actual.values():
            group.endpoints = [process.wait_ready() for process in group.processes]
            group.reference = [answers(endpoint) for endpoint in group.endpoints]
        yield actual


def _stopped(process: ServerProcess) -> ExitStack:
    stack = ExitStack()
    stack.callback(_stop, process)
    return stack


def _stop(process: ServerProcess) -> None:
    """Stop a server; one that has died meanwhile leaves its last lines in the report."""
    if process.exit_code is not None:
        print(f"{process.name} died with exit code {process.exit_code}:", *telling_lines(process.log_file, 0), sep="\n")
    process.stop()


def answers(endpoint: Endpoint) -> list[tuple[list[int], list[float]]]:
    """(greedy tokens, log-probs) of every prompt."""
    actual = generate(endpoint, PROMPTS, max_new_tokens=16)
    return [(one["output_ids"], [pair[0] for pair in one["meta_info"]["output_token_logprobs"]]) for one in actual]


def assert_equal(actual: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    for (tokens, logprobs), (wanted, wanted_logprobs) in zip(actual, expected, strict=True):
        assert tokens == wanted, what
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(wanted_logprobs), atol=LIMIT, rtol=0, msg=what)


class Joined:
    """`pool.ServerPool` of servers that this test started elsewhere."""

    colocated = False

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self.endpoints = [_endpoint(one) for one in entries]
        self.tp = [one["tp"] for one in entries]
        self.hosts: list[tuple[int, ...]] = [()] * len(entries)
        self.ranks_per_host = 1

    def bring_back(self, lost: Sequence[int], fits: Any) -> Any:
        raise AssertionError(lost)

    def close(self) -> None:
        pass


def _config(root: Path, case: str, model: str, entries: Sequence[dict[str, Any]]) -> Any:
    _, source, areas = CASES[case]
    urls = [one["url"] for one in entries]
    adapted = source.startswith("adapted")
    way = "on" if case.startswith("changes") else "auto"
    sync = SglangSyncConfig(timeout_s=60.0, adapter="adapter" if adapted else "auto", delta=way)
    sglang = SglangConfig(urls=urls, sync=sync)
    config = make_config(
        root / f"{source}-{model}",
        rollout=RolloutConfig(temperature=TEMPERATURE, sglang=sglang),
        **areas,
    )
    config = replaced(config, "model", adapter=ADAPTER) if adapted else config
    return replaced(config, "trainer", run_dir=str(root / "run"))


@contextmanager
def connected(config: Any, pool: Any, engine: Any, world: Any) -> Iterator[Any]:
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.rollout.sglang.build import connect
    from mega_rl.trainer.assemble.plan import plan_run

    plan = plan_run(config, prepare("auto"))
    dtype, hidden = plan.rollout_dtype, plan.engine.hidden_tokens
    with ExitStack() as resources:
        yield connect(config.rollout, dtype, pool, resources, actor=engine, world=world, hidden_tokens=hidden)


def _send_in_layouts(rank: int, cases: list[str], folder: str, servers: dict[str, list[dict[str, Any]]]) -> Any:
    root = Path(folder)
    actual: dict[str, Any] = {"said": _warnings()}
    version = 0
    for case in cases:
        source = CASES[case][1]
        for model in "ba":
            config = _config(root, case, model, servers[source])
            with running_engine(config, trainable=source.startswith(("untabled", "adapted"))) as engine:
                from mega_rl.parallel.comm import GroupRanks

                world = GroupRanks(engine.groups.world)
                pool = Joined(servers[source])
                version += 5
                with connected(config, pool, engine, world) as connection:
                    connection.sync.resume_at(version)
                    actual[f"{case} {model}"] = {
                        "metrics": connection.sync.publish(),
                        "ready": sorted(connection.sync.ready),
                        "answers": [answers(one) for one in pool.endpoints] if rank == 0 else None,
                    }
                    if (case, model) == ("tp2", "a"):
                        actual["parity"] = _both_engines(root / "dense-a", connection, engine, world)
                    if (source, model) == ("untabled", "a"):
                        actual["steps"] = [_step(engine, connection, pool, world, seed) for seed in range(2)]
                    if source.startswith("adapted") and model == "a":
                        actual[case] = _adapted(root / f"{source}-a", engine, connection, pool, world)
                    world.sum(torch.zeros(1))  # rank 0 has its answers before the next weights come
                    groups = getattr(connection.sync._transport, "_groups", None)
                    names = [] if groups is None else list(groups.names)
                actual[f"{case} {model}"]["groups"] = [
                    _has_left(endpoint, name) for endpoint in pool.endpoints for name in names if rank == 0
                ]
    return actual


def _step(engine: Any, connection: Any, pool: Any, world: Any, seed: int) -> Any:
    """(metrics of the update, answers on rank 0) after a step of the trainer."""
    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.workers.models import PolicyLoss

    world.sum(torch.zeros(1))  # rank 0 has the answers of the weights before
    loss = PolicyLoss(PPO(clip_low=0.2, clip_high=0.3), kl=None, kl_estimator=k3)
    engine.train_minibatch(
        own_rows(random_experience(vocab_size=engine.sharding.hf.vocab_size, seed=seed), engine), loss, lr=1e-2
    )
    return connection.sync.publish(), [answers(one) for one in pool.endpoints if world.rank == 0]


def _adapted(path: Path, engine: Any, connection: Any, pool: Any, world: Any) -> dict[str, Any]:
    """What updates after steps of adapters send, also to a server that has lost its weights, and what it then says."""
    metrics = [_step(engine, connection, pool, world, seed)[0] for seed in range(2)]
    weights = dict(engine.export_weights("adapters"))
    control = connection.sync._controls.get(0)
    if control is not None:  # as a server that somebody has started again
        control.succeed("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    metrics.append(connection.sync.publish())
    metrics.append(connection.sync.refit([0]))
    metrics.append(connection.sync.publish())
    parity = _both_engines(path, connection, engine, world)
    return {"metrics": metrics, "bytes": sum(tensor.nbytes for tensor in weights.values()), "parity": parity}


def _warnings() -> list[str]:
    """Return a list that fills with this process's warnings, among them why a server was left out."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("mega_rl").addHandler(Kept(logging.WARNING))
    return said


def _has_left(endpoint: Endpoint, group: str) -> bool:
    """Whether a server is no longer in a group of weight updates."""
    control = Control(endpoint, timeout_s=60.0)
    try:
        control.destroy_group(group)
    except ServerError as error:
        return "not exist" in str(error)
    finally:
        control.close()
    return False


def _both_engines(path: Path, connection: Any, engine: Any, world: Any) -> list[Any]:
    """(tokens, lengths, log-probs) of the embedded engine and of the servers, greedy."""
    from mega_rl.rollout.embedded import EmbeddedWeightSync, HFRolloutEngine
    from mega_rl.rollout.sampling import Sampler
    from mega_rl.rollout.sglang.generation.engine import SglangRolloutEngine, SglangRolloutSettings
    from mega_rl.rollout.sglang.generation.samples import Sampling

    embedded = HFRolloutEngine(
        path,
        dtype=torch.float32,
        device="cpu",
        sampler=Sampler(TEMPERATURE),
        max_new_tokens=24,
        stop_token_ids=[1],
        batch_size=8,
    )
    EmbeddedWeightSync(engine.export_weights, embedded, verify_interval=1).publish()
    served = SglangRolloutEngine(
        connection.router,
        everyone=world,
        weight_version=lambda: connection.sync.weight_version,
        bring_back=connection.bring_back,
        settings=SglangRolloutSettings(
            sampling=Sampling(TEMPERATURE, 1.0, 0, max_new_tokens=24, stop_token_ids=(1,), adapter=connection.adapter),
            max_positions=engine.sharding.hf.max_position_embeddings,
            timeout_s=60.0,
            concurrency=8,
            restarts=0,
            max_failed_share=0.0,
        ),
    )
    prompts = [Prompt(index=i, token_ids=tuple(ids), text="", answer="") for i, ids in enumerate(PROMPTS)]
    rollouts = [made.generate(prompts, range(len(prompts)), n=1, seed=(3,), greedy=True) for made in (embedded, served)]
    return [(one.tokens, one.lengths, one.rollout_logprobs) for one in rollouts]


@pytest.fixture(scope="module")
def sent(root: Path, servers: dict[str, Servers]) -> dict[str, Any]:
    """What came of every case; layouts of one number of ranks share a launch."""
    entries = {source: group.entries() for source, group in servers.items()}
    actual: dict[str, Any] = {}
    for size in sorted({case[0] for case in CASES.values()}):
        cases = [name for name, case in CASES.items() if case[0] == size]
        ranks = run_ranks(size, _send_in_layouts, cases, str(root), entries, timeout_s=300.0, device=DEVICE)
        for name, result in ranks[0].items():
            assert "ready" not in result or all(rank[name]["ready"] == result["ready"] for rank in ranks)
        actual |= ranks[0] | {"said": [*actual.get("said", []), *ranks[0]["said"]]}
    return actual


@pytest.mark.parametrize("case", CASES)
def test_updated_servers_answer_as_freshly_started_ones(
    servers: dict[str, Servers], sent: dict[str, Any], case: str
) -> None:
    reference = servers[CASES[case][1]].reference
    answers = zip(
        SERVERS[CASES[case][1]], reference, sent[f"{case} a"]["answers"], sent[f"{case} b"]["answers"], strict=True
    )
    for tp, expected, actual, others in answers:
        assert_equal(actual, expected, f"{case} into TP{tp}")
        assert [tokens for tokens, _ in others] != [tokens for tokens, _ in actual], "B is no other model"


@pytest.mark.parametrize("case", CASES)
def test_every_update_is_proved(sent: dict[str, Any], case: str) -> None:
    for model in "ba":
        actual = sent[f"{case} {model}"]
        servers = SERVERS[CASES[case][1]]
        assert actual["ready"] == list(range(len(servers))), sent["said"]
        assert actual["metrics"]["sync/failed_servers"] == 0.0
        assert 0.0 < actual["metrics"]["sync/probe_logprob_diff_max"] <= LIMIT
        stages = 0 if case.startswith("changes") else CASES[case][2].get("megatron", MegatronConfig()).pp
        assert actual["groups"] == [True] * len(servers) * stages, "a joined server keeps a group"


def test_a_model_without_a_table_trains_with_its_server(servers: dict[str, Servers], sent: dict[str, Any]) -> None:
    before = [tokens for tokens, _ in servers["untabled"].reference[0]]
    for metrics, answers in sent["steps"]:
        assert metrics["sync/failed_servers"] == 0.0
        assert 0.0 < metrics["sync/probe_logprob_diff_max"] <= LIMIT
        after = [tokens for tokens, _ in answers[0]]
        assert after != before, "no new weights"
        before = after


def test_servers_of_both_sizes_say_the_same(servers: dict[str, Servers]) -> None:
    for group in servers.values():
        for others in group.reference[1:]:
            assert_equal(others, group.reference[0], "TP2 against TP1")


def test_only_adapters_follow_their_base(sent: dict[str, Any]) -> None:
    for case in OF_ADAPTERS:
        sizes = [metrics["sync/bytes"] for metrics in sent[case]["metrics"]]
        alone = float(sent[case]["bytes"])
        whole = sent[f"{case} a"]["metrics"]["sync/bytes"]
        assert whole > 2 * alone > 0
        # Two steps; a server that has lost its weights; a refit; a server that has all.
        assert sizes == [alone, alone, whole, whole, alone]
        assert all(0.0 < metrics["sync/probe_logprob_diff_max"] <= LIMIT for metrics in sent[case]["metrics"])


@pytest.mark.parametrize("case", ["", *OF_ADAPTERS])
def test_the_embedded_engine_says_the_same(sent: dict[str, Any], case: str) -> None:
    """Adapters next to their base in the servers are merged weights in the embedded engine."""
    parity = sent[case]["parity"] if case else sent["parity"]
    (tokens, lengths, logprobs), (served_tokens, served_lengths, served_logprobs) = parity
    assert torch.equal(lengths, served_lengths)
    assert torch.equal(tokens, served_tokens)
    torch.testing.assert_close(logprobs, served_logprobs, atol=LIMIT, rtol=0)
    assert logprobs.abs().max() > 0.1
