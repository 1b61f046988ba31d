"""Settings of prompts, rollouts and rewards."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from mega_rl.config.schema.data import AllPrompts, MixtureConfig, StreamConfig, SuccessCurriculum
from mega_rl.config.setting import ATTENTION, Kind, by_name, setting, tagged

CODE_TESTS = "code_tests"  # the reward function that reads these settings


@dataclass(frozen=True)
class ChatConfig:
    """Prompts as conversations."""

    template: str = setting(
        "auto",
        "Use the chat template for lists of messages (auto), for strings too, as user messages (true), or never: "
        "lists are errors (false).",
        choices=("auto", "true", "false"),
    )
    template_kwargs: dict[str, Any] = setting({}, "Variables of the chat template, such as {enable_thinking: false}.")
    system_prompt: str = setting("", "System message of conversations that begin with none; empty adds none.")
    date: str = setting("", "Date that templates write, as 2026-01-31; empty: today's.")


@dataclass(frozen=True)
class Files(Kind):
    """Rows of data.train_files, or of data.mixture."""

    name = "files"
    has_validation: ClassVar[bool] = False  # has its own held-out rows, the split "validation"


@dataclass(frozen=True)
class SingleTurn(Kind):
    """One response of the engine to each prompt."""

    name = "single_turn"


@dataclass(frozen=True)
class DataConfig:
    """Prompts: files, formats, lengths."""

    source: Kind = tagged(
        by_name(Files), "files", "Source of training prompts: train_files, or path/to/file.py:class that yields rows."
    )
    train_files: list[str] = setting([], "JSONL or Parquet files, or data sets of the Hub as org/name:split@revision.")
    val_files: list[str] = setting([], "Held-out prompts, named like train_files; empty splits off val_size rows.")
    val_size: int = setting(0, "Rows split off the training files if val_files is empty.", unit="rows", min=0)
    prompt_key: str = setting("prompt", "Column with the prompt: a string, or a list of chat messages.")
    answer_key: str = setting("answer", "Column with the reward's reference, or a given answer; empty: none.")
    source_key: str = setting("data_source", "Column with the name of a row's data source, for reward.sources.")
    max_prompt_tokens: int = setting(1024, "Longest prompt; of given answers, the longest row.", unit="tokens", min=1)
    overlong_prompts: str = setting("error", "What happens to longer prompts.", choices=("error", "drop"))
    malformed_rows: str = setting("error", "What happens to rows that cannot be read.", choices=("error", "drop"))
    shuffle: bool = setting(True, "Shuffle the training prompts each epoch, from trainer.seed.")
    curriculum: Kind = tagged(by_name(AllPrompts, SuccessCurriculum), "none", "Prompts that are drawn more often.")
    chat: ChatConfig = dataclasses.field(default_factory=ChatConfig)
    mixture: MixtureConfig = dataclasses.field(default_factory=MixtureConfig)
    stream: StreamConfig = dataclasses.field(default_factory=StreamConfig)

    @property
    def reads_train_files(self) -> bool:
        """Return whether training prompts come from train_files."""
        return self.source.name == "files" and not self.mixture.sources


@dataclass(frozen=True)
class EmbeddedConfig:
    """Generation in the trainer's processes."""

    batch_size: int = setting(256, "Sequences generated together.", unit="sequences", min=1)


@dataclass(frozen=True)
class SglangServerConfig:
    """Servers that the run starts itself."""

    count: int = setting(0, "Servers on each host or group of hosts; 0: as many as fit.", unit="servers", min=0)
    tp: int = setting(1, "Tensor-parallel ranks of each server that is started.", unit="ranks", min=1)
    nodes: int = setting(1, "Hosts that each server spans, with equally many ranks on each.", unit="hosts", min=1)
    host: str = setting("127.0.0.1", "Address or network interface that servers bind to.")
    args: dict[str, object] = setting(
        {},
        "Further ServerArgs of SGLang: {max_total_tokens: 20000, ep_size: 8}; true sets a flag. Without "
        "mem_fraction_static colocated servers take what the trainer leaves. Arguments that a setting decides or that "
        "no weight update can follow are refused.",
    )

    @property
    def max_total_tokens(self) -> int:
        """Return the tokens of a server's KV cache; 0: SGLang chooses."""
        given = self.args.get("max_total_tokens", 0)
        return given if isinstance(given, int) else 0

    @property
    def mem_fraction(self) -> float:
        """Return the share of a device's memory for weights and KV cache; 0: not given."""
        given = self.args.get("mem_fraction_static", 0.0)
        return float(given) if isinstance(given, int | float) else 0.0


@dataclass(frozen=True)
class SglangSyncConfig:
    """Weights to the servers, and the proof that they arrived."""

    timeout_s: float = setting(300.0, "Deadline of each step of a weight update.", unit="seconds", above=0.0)
    probe_tokens: int = setting(8, "Greedy tokens that prove each weight update; 0 proves none.", unit="tokens", min=0)
    adapter: str = setting(
        "auto",
        "Low-rank adapters: sent apart from their base, or merged into it; auto: apart where SGLang serves them.",
        choices=("auto", "adapter", "merged"),
    )
    delta: str = setting(
        "auto",
        "Send only what changed, to servers of our launcher; auto: to joined ones over a link on which that is faster.",
        choices=("auto", "on", "off"),
    )
    in_flight: str = setting(
        "recompute",
        "Responses in flight over an update: interrupted, and continued after their prefix is computed again, or not "
        "interrupted, on the KV cache of the old weights, when no weights give their later tokens' log-probs (keep).",
        choices=("recompute", "keep"),
    )
    interval: int = setting(
        0,
        "With trainer.async_steps, also update weights within a step, after every N of its optimizer steps; 0: only "
        "after the step.",
        unit="optimizer steps",
        min=0,
    )


@dataclass(frozen=True)
class SglangConfig:
    """The SGLang servers of a run, and the requests to them."""

    urls: list[str] = setting(
        [],
        "Servers to join, as http://host:port, or one registry of servers, a file or an address with a path, that is "
        "read again at each weight update; empty starts servers next to the trainer.",
    )
    keys_file: str = setting("", 'Keys of joined servers, mode 0600: {"api_key": "...", "admin_key": "..."}.')
    placement: str = setting(
        "auto",
        "Servers take turns on the trainer's devices (colocated) or have their own; auto is colocated for started "
        "servers without trainer.async_steps.",
        choices=("auto", "colocated", "separate"),
    )
    start_timeout_s: float = setting(600.0, "Deadline of a server's start.", unit="seconds", above=0.0)
    request_timeout_s: float = setting(600.0, "Deadline of one request, tries and all.", unit="seconds", above=0.0)
    max_concurrency: int = setting(256, "Requests in flight at one server.", unit="requests", min=1)
    retries: int = setting(3, "Further tries of a sample after a failed one.", unit="tries", min=0)
    restarts: int = setting(3, "Times within one step that lost servers are brought back.", unit="times", min=0)
    max_failed_share: float = setting(0.0, "Share of a step's samples that may stay unanswered.", min=0.0, max=1.0)
    arrival: str = setting(
        "lock",
        "With trainer.async_steps, what decides which responses a step gets: their tokens, so that the run is a "
        "function of its seed (lock), or the clock (free), when weight updates interrupt responses.",
        choices=("lock", "free"),
    )
    return_routing: bool = setting(False, "Route tokens in the trainer's passes as the servers did.")
    server: SglangServerConfig = dataclasses.field(default_factory=SglangServerConfig)
    sync: SglangSyncConfig = dataclasses.field(default_factory=SglangSyncConfig)


@dataclass(frozen=True)
class MismatchConfig:
    """Limits on the log-prob differences between trainer and rollout engine."""

    mean_limit: float = setting(
        0.0, "Largest mean difference of a step; 0: 1e-3 if both are fp32, else 0.15.", unit="nats", min=0.0
    )
    share_limit: float = setting(0.01, "Largest share of tokens that differ by 1 nat or more.", min=0.0, max=1.0)
    max_limit: float = setting(0.0, "Largest of a token; 0: 1 if both are fp32, else none.", unit="nats", min=0.0)


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """Draw prompts until enough have samples of different rewards."""

    max_generations: int = setting(
        0,
        "Most generations of a step; then prompts of equal rewards fill it. 0: one, whose prompts all train.",
        unit="generations",
        min=0,
    )
    prompts: int = setting(0, "Prompts of each generation; 0 takes trainer.prompts_per_step.", unit="prompts", min=0)
    expired: str = setting(
        "drop",
        "Groups that no step took while they were young enough: drop them, or sample their prompts again.",
        choices=("drop", "redraw"),
    )


@dataclass(frozen=True)
class RolloutConfig:
    """Rollouts: engine, source, sampling, weight sync."""

    backend: str = setting(
        "hf",
        "Rollout engine: Hugging Face models in the trainer's processes, SGLang servers, or none if your "
        "rollout.source needs none.",
        choices=("hf", "sglang", "none"),
    )
    source: Kind = tagged(
        by_name(SingleTurn),
        "single_turn",
        "How prompts become rollouts: one response each (single_turn), or path/to/file.py:class.",
    )
    n: int = setting(8, "Samples per prompt.", unit="samples", min=1)
    temperature: float = setting(1.0, "Sampling temperature; the trainer's log-probs use it too.", above=0.0)
    top_p: float = setting(1.0, "Nucleus mass; below 1 a run warns: training does not see the cut.", above=0.0, max=1.0)
    top_k: int = setting(0, "Keep the k most likely tokens, with the same warning; 0: all.", unit="tokens", min=0)
    max_new_tokens: int = setting(256, "Longest response.", unit="tokens", min=1)
    stop_token_ids: list[int] = setting([], "Token ids that end a response besides the model's.")
    dtype: str = setting("auto", "Type of its weights; auto takes model.dtype.", choices=("auto", "bf16", "fp32"))
    verify_interval: int = setting(
        10,
        "Verify the first and every N-th publish by checksums; with trainer.async_steps, score again what was just "
        "sampled.",
        unit="publishes",
        min=1,
    )
    bucket_mib: int = setting(256, "Weight-sync bucket.", unit="MiB", min=1)
    dynamic_sampling: DynamicSamplingConfig = dataclasses.field(default_factory=DynamicSamplingConfig)
    mismatch: MismatchConfig = dataclasses.field(default_factory=MismatchConfig)
    hf: EmbeddedConfig = dataclasses.field(default_factory=EmbeddedConfig)
    sglang: SglangConfig = dataclasses.field(default_factory=SglangConfig)


@dataclass(frozen=True)
class RewardModelConfig(Kind):
    """A sequence-classification checkpoint that scores, on the run's engine."""

    name = "model"

    path: str = setting("", "Hugging Face sequence-classification checkpoint with one label.")
    attn_implementation: str = setting(
        "same", "Attention kernel; same takes the model section's.", choices=("same", *ATTENTION)
    )


@dataclass(frozen=True)
class RewardHttpConfig(Kind):
    """An HTTP service that scores."""

    name = "http"

    url: str = setting("", "Address that batches are posted to, as http://127.0.0.1:8000/score.")
    key_file: str = setting("", "File with the service's bearer token, mode 0600; empty sends none.")
    batch_size: int = setting(64, "Responses in one request.", unit="responses", min=1)
    concurrency: int = setting(4, "Requests in flight of one rank.", unit="requests", min=1)
    timeout_s: float = setting(60.0, "Deadline of one request, tries and all.", unit="seconds", above=0.0)
    retries: int = setting(3, "Further tries of a request after a failed one.", unit="tries", min=0)


@dataclass(frozen=True)
class RewardFunctionConfig(Kind):
    """Python functions: reward.function or reward.functions, called in worker processes or in the rank."""

    name = "function"

    workers: int = setting(
        -1,
        "Worker processes of each rank; 0: none, and no deadlines. -1: none for built-in functions except math_verify "
        "and for functions of a Python program, else the rank's cores minus one, 1 to 8.",
        unit="processes",
        min=-1,
    )
    timeout_s: float = setting(30.0, "Deadline of one response, or of one call for several.", unit="seconds", above=0.0)
    concurrency: int = setting(64, "Calls of an asynchronous function at a time in each worker.", min=1)
    batch_size: int = setting(64, "Most responses of a call that takes several.", unit="responses", min=1, max=4096)
    memory_mib: int = setting(0, "Address space of one worker; 0 is no limit.", unit="MiB", min=0)
    on_failure: str = setting(
        "score",
        "A response whose function raises, gives no number, is late or crashes its worker gets failure_score (score) "
        "or is left out (mask).",
        choices=("score", "mask"),
    )
    failure_score: float = setting(0.0, "Reward of such a response: choose the lowest.")
    max_failed_share: float = setting(0.1, "Share of a step's responses that may fail.", min=0.0, max=1.0)


@dataclass(frozen=True)
class EnvironmentScores(Kind):
    """The environment, which sets trajectory.score and turn.score; rollout.source names it."""

    name = "environment"


@dataclass(frozen=True)
class NoRewards(Kind):
    """No rewards: the run learns from a teacher only."""

    name = "none"


@dataclass(frozen=True)
class RewardSandboxConfig(Kind):
    """Settings of every sandbox."""

    timeout_s: float = setting(6.0, "Wall clock of one case, with the start of its sandbox.", unit="seconds", above=0.0)
    total_s: float = setting(20.0, "Wall clock of all cases of a response.", unit="seconds", above=0.0)
    memory_mib: int = setting(512, "Address space of each process, and resident memory of all.", unit="MiB", min=64)
    output_kib: int = setting(256, "Longest output of a case, and longest error output.", unit="KiB", min=1)
    score: str = setting("share", "The share of cases that pass, or 1 if all pass.", choices=("share", "all"))


@dataclass(frozen=True)
class LocalSandboxConfig(RewardSandboxConfig):
    """Locked processes under bubblewrap on the rank's host."""

    name = "local"

    processes: int = setting(16, "Processes and threads of a case; asserts take three.", min=4, max=1024)
    tmp_mib: int = setting(16, "Size of a case's temporary files, and of its shared memory.", unit="MiB", min=1)
    interpreter: str = setting("", "Absolute path of the Python inside; empty: this environment's, without packages.")


@dataclass(frozen=True)
class RemoteSandboxConfig(RewardSandboxConfig):
    """A service that speaks SandboxFusion's protocol."""

    name = "remote"

    url: str = setting("", "Address of the service, as http://127.0.0.1:8080/run_code.")
    key_file: str = setting("", "File with the service's bearer token, mode 0600; empty sends none.")


@dataclass(frozen=True)
class OverlongConfig:
    """Responses that reach rollout.max_new_tokens."""

    filter: bool = setting(False, "Leave truncated responses out of every loss; their rewards still count.")
    buffer_tokens: int = setting(
        0, "Last tokens over which the reward falls by the penalty; 0: none.", unit="tokens", min=0
    )
    penalty: float = setting(1.0, "What a response of the full length loses.", unit="reward", above=0.0)


@dataclass(frozen=True)
class RewardConfig:
    """Rewards: functions, services, reward models."""

    source: Kind = tagged(
        by_name(RewardFunctionConfig, RewardModelConfig, RewardHttpConfig, EnvironmentScores, NoRewards),
        "function",
        "Who scores.",
    )
    function: str = setting(
        "exact_match",
        "Built-in name (code_format, code_tests, exact_match, has_final_answer, math_verify, number_match) or "
        "path/to/file.py:function.",
    )
    functions: dict[str, str] = setting({}, "Named parts instead: {correct: math_verify, format: r.py:f}.")
    sources: dict[str, list[str]] = setting({}, "Functions of each data source, as {gsm8k: [correct]}; empty: all.")
    weights: dict[str, float] = setting({}, "Weights of named parts, as {format: 0.2}; default 1; 0 only shows one.")
    skip_special_tokens: bool = setting(True, "Leave special tokens out of the scored text.")
    sandbox: RewardSandboxConfig = tagged(
        by_name(LocalSandboxConfig, RemoteSandboxConfig),
        "local",
        "Locked processes in which the reward function code_tests runs programs.",
    )
    overlong: OverlongConfig = dataclasses.field(default_factory=OverlongConfig)

    @property
    def model_path(self) -> str:
        """Return the checkpoint of the reward model; empty for other sources."""
        return self.source.path if isinstance(self.source, RewardModelConfig) else ""

    @property
    def calls(self) -> RewardFunctionConfig:
        """Return how functions are called; defaults for other sources."""
        return self.source if isinstance(self.source, RewardFunctionConfig) else RewardFunctionConfig()


def runs_code(reward: RewardConfig) -> bool:
    """Return whether a reward function of a run reads the settings of the sandbox."""
    functions = reward.functions.values() if reward.functions else (reward.function,)
    return reward.source.name == "function" and CODE_TESTS in functions
