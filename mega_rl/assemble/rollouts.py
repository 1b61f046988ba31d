"""Where a run's responses come from and how the policy gets there: the embedded engine, or SGLang servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from mega_rl import progress
from mega_rl.accelerator import Accelerator
from mega_rl.assemble.roles import Roles
from mega_rl.assemble.sglang import Connection, connect
from mega_rl.config.schema import Config
from mega_rl.models.build import DTYPES
from mega_rl.parallel.comm import GroupRanks
from mega_rl.protocols import CheckpointStore, RankState, RolloutSource, WeightSync
from mega_rl.rollout.embedded.engine import HFRolloutEngine
from mega_rl.rollout.embedded.weight_sync import EmbeddedWeightSync
from mega_rl.rollout.sglang.generation.engine import FailedSamples, Sampled, SglangRolloutEngine
from mega_rl.rollout.sglang.generation.results import Progress
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.rollout.sglang.http.keys import Keys
from mega_rl.rollout.sglang.server.pool import JoinedServers, StartedServers, ranks_on_this_host
from mega_rl.rollout.sglang.server.settings import ServerSettings
from mega_rl.rollout.stop_tokens import with_end_of_sequence
from mega_rl.types import Prompt
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.background import ThreadedRollouts
from mega_rl.workers.rollout import BackgroundRolloutWorker, RolloutWorker
from mega_rl.workers.turns import ColocatedRollouts


@dataclass(frozen=True)
class Rollouts:
    """The parts of a run that know where responses come from."""

    source: RolloutSource
    sync: WeightSync
    checkpoints: CheckpointStore
    pending: RankState | None = None  # what a checkpoint must keep of them
    # Inside, the trainer's state is on its device; collective.
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext


def is_colocated(config: Config, accelerator: Accelerator) -> bool:
    """Whether servers share the trainer's devices. A CPU's memory is the host's, which needs no turns."""
    sglang = config.sglang
    if sglang.placement == "auto":
        return accelerator.device.type == "cuda" and not sglang.urls and not config.trainer.async_steps
    return sglang.placement == "colocated"


def start_servers(
    config: Config, accelerator: Accelerator, world: GroupRanks, resources: ExitStack
) -> StartedServers | JoinedServers | None:
    """The servers of a run over SGLang, on their way up; None with the embedded engine. `resources` ends them."""
    sglang = config.sglang
    if config.rollout.backend != "sglang":
        return None
    if sglang.urls:
        return JoinedServers(world, sglang.urls, Keys.read(Path(sglang.keys_file)), timeout_s=sglang.start_timeout_s)
    per_host = ranks_on_this_host(world.size)
    colocated = is_colocated(config, accelerator)
    pool = StartedServers(
        world,
        [
            ServerSettings(
                model_path=Path(config.model.path),
                host=sglang.host,
                tp=sglang.tp,
                dtype=_rollout_dtype(config),
                device=accelerator.device.type,
                max_total_tokens=sglang.max_total_tokens,
                mem_fraction=sglang.mem_fraction,
                memory_saver=colocated,
                deterministic=config.trainer.deterministic,
                # Servers of their own devices have those after the trainer's.
                base_gpu=place * sglang.tp + (0 if colocated else per_host),
                seed=config.trainer.seed,
                start_timeout_s=sglang.start_timeout_s,
            )
            for place in range(sglang.servers)
        ],
        ranks_per_host=per_host,
        folder=Path(config.trainer.run_dir) / "sglang",
    )
    resources.callback(pool.close)
    return pool


def build_rollouts(
    config: Config,
    accelerator: Accelerator,
    world: GroupRanks,
    servers: StartedServers | JoinedServers | None,
    roles: Roles,
    *,
    checkpoints: CheckpointStore,
    prompts: Callable[[int], Sequence[Prompt]],
    resources: ExitStack,
) -> Rollouts:
    """Source, weight sync and checkpoints of a run; `prompts`: of a step. Waits for the servers; collective."""
    actor = roles.actor_engine
    if servers is None:
        embedded = _embedded_engine(config, accelerator)
        return Rollouts(
            source=RolloutWorker(
                engine=embedded,
                data_parallel=actor.data_parallel,
                replica=actor.replica,
                n=config.rollout.n,
                seed=config.trainer.seed,
            ),
            sync=EmbeddedWeightSync(
                actor.export_weights,
                embedded,
                bucket_bytes=config.rollout.bucket_mib << 20,
                verify_interval=config.rollout.verify_interval,
            ),
            checkpoints=checkpoints,
        )
    servers.wait_ready()
    colocated = is_colocated(config, accelerator)
    connection = resources.enter_context(connect(config, servers, actor=actor, world=world, colocated=colocated))
    engine = _sglang_engine(config, world, connection)
    worker = BackgroundRolloutWorker(
        engine=engine,
        data_parallel=actor.data_parallel,
        replica=actor.replica,
        n=config.rollout.n,
        seed=config.trainer.seed,
    )
    if config.trainer.async_steps:
        ahead = _ahead(config, world, worker, engine, connection, prompts)
        resources.callback(ahead.close)
        return Rollouts(source=ahead, sync=ahead, checkpoints=checkpoints, pending=ahead)
    if colocated:
        turns = ColocatedRollouts(
            source=worker,
            sync=connection.sync,
            checkpoints=checkpoints,
            policy=actor,
            others=roles.engines[1:],
            servers=connection.memory,
            accelerator=accelerator,
            everyone=world,
        )
        connection.before_proof(turns.make_room_for_proof)
        return Rollouts(source=turns, sync=turns, checkpoints=turns, on_device=turns.on_device)
    return Rollouts(source=worker, sync=connection.sync, checkpoints=checkpoints)


def _embedded_engine(config: Config, accelerator: Accelerator) -> HFRolloutEngine:
    """The Hugging Face engine of this rank, without weights yet."""
    rollout = config.rollout
    return HFRolloutEngine(
        config.model.path,
        dtype=DTYPES[config.model.dtype if rollout.dtype == "auto" else rollout.dtype],
        device=accelerator.device,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=rollout.stop_token_ids,
        batch_size=rollout.batch_size,
    )


def _sglang_engine(config: Config, world: GroupRanks, connection: Connection) -> SglangRolloutEngine:
    """The servers as this rank's rollout engine."""
    rollout, sglang = config.rollout, config.sglang
    path = Path(config.model.path)
    hf = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    return SglangRolloutEngine(
        connection.fleet,
        everyone=world,
        weight_version=lambda: connection.sync.weight_version,
        bring_back=connection.bring_back,
        sampling=Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=with_end_of_sequence(path, hf, rollout.stop_token_ids),
        ),
        max_positions=connection.max_positions,
        timeout_s=sglang.request_timeout_s,
        concurrency=connection.concurrency,
        restarts=sglang.restarts,
        failed=FailedSamples(mask=sglang.failed_samples == "mask", max_share=sglang.max_failed_share),
        token_versions=sglang.partial_rollout,
        progress=_ShownSamples(),
    )


class _ShownSamples:
    """Shows a generation of servers as a phase of its own, beside what the trainer does meanwhile."""

    def __init__(self) -> None:
        self._phase: progress.Phase | None = None

    def __call__(self, generation: Progress) -> None:
        """Take one report; all of a generation come from the same thread."""
        if self._phase is None:
            self._phase = progress.begin("samples")
        note = f"{generation.tokens_per_second:.0f} tok/s"
        self._phase.report(generation.done, generation.total, note=note)
        if generation.ended:
            self._phase.end()
            self._phase = None


def _ahead(
    config: Config,
    world: GroupRanks,
    worker: BackgroundRolloutWorker[Sampled],
    engine: SglangRolloutEngine,
    connection: Connection,
    prompts: Callable[[int], Sequence[Prompt]],
) -> OneStepAhead:
    """Generation of the next step beside training."""
    rows = math.ceil(config.trainer.prompts_per_step / world.size) * config.rollout.n
    background = ThreadedRollouts(
        worker.sample,
        worker.collect,
        everyone=world,
        timeout_s=engine.deadline_s(rows) + config.sglang.sync_timeout_s,
        requests=engine if config.sglang.partial_rollout else None,
    )
    return OneStepAhead(
        source=worker,
        background=background,
        sync=connection.sync,
        prompts=prompts,
        steps=config.trainer.steps,
        partial=config.sglang.partial_rollout,
    )


def _rollout_dtype(config: Config) -> str:
    """Return the dtype of the servers' weights."""
    name = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    return str(DTYPES[name]).removeprefix("torch.")
