"""Faults for tests/planted_faults.py: one small change of the package each, and the tests that must find it."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = "tests/unit_tests/"
MATRIX = "verify/test_matrix.py"
RESUME = "checkpoint/test_resume.py"
POOL = "workers/reward_pool/test_pool.py"
INVARIANCE = "distributed/test_layout_invariance.py"


@dataclass(frozen=True)
class Fault:
    """A silent fault. `old` stands exactly once in the package; a target is a file, and perhaps " -k EXPRESSION"."""

    area: str
    name: str
    old: str
    new: str
    targets: tuple[str, ...]
    gap: str = ""  # why no test finds it yet


def _fault(area: str, name: str, old: str, new: str, *targets: str, gap: str = "") -> Fault:
    return Fault(area, name, old, new, tuple(UNIT + target for target in targets), gap)


ALGORITHMS = (
    _fault(
        "algorithms",
        "k1 with the wrong sign",
        "return logprobs - ref_logprobs",
        "return ref_logprobs - logprobs",
        "algorithms/test_kl.py",
    ),
    _fault(
        "algorithms",
        "k3 adds the log ratio",
        "estimate = torch.expm1(log_ratio) - log_ratio",
        "estimate = torch.expm1(log_ratio) + log_ratio",
        "algorithms/test_kl.py",
    ),
    _fault(
        "algorithms",
        "KL in the loss not weighted by the ratio",
        "weight = log_ratio.detach().exp().clamp(max=WEIGHT_LIMIT)",
        "weight = torch.ones_like(log_ratio)",
        "algorithms/test_kl_gradients.py",
    ),
    _fault(
        "algorithms",
        "KL coefficient adapted while the policy stands still",
        'if moved and "kl/ref" in metrics:',
        'if "kl/ref" in metrics:',
        "trainer/test_loop.py",
    ),
    _fault(
        "algorithms",
        "GAE off by one token",
        "next_values[:, :-1] = values[:, 1:]",
        "next_values[:, :-1] = values[:, :-1]",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "algorithms",
        "whitening over the local batch",
        "advantages = whiten(advantages, mask, sum_over_ranks=inputs.sum_over_ranks)",
        "advantages = whiten(advantages, mask)",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "algorithms",
        "GRPO's deviation over the batch",
        'if std == "batch":',
        'if std != "none":',
        "algorithms/test_advantages.py",
    ),
    _fault(
        "algorithms",
        "clip takes the better of two losses",
        "token_loss = torch.maximum(unclipped, clipped)",
        "token_loss = torch.minimum(unclipped, clipped)",
        "algorithms/test_policy_loss.py",
    ),
    _fault(
        "algorithms",
        "value clip ignored",
        "token_loss = 0.5 * torch.maximum(error, near_error)",
        "token_loss = 0.5 * error",
        "algorithms/test_value_loss.py",
    ),
    _fault(
        "algorithms",
        "loss weights over the rank's own tokens",
        "max(global_tokens, 1.0), max(",
        "max(float(mask.sum()), 1.0), max(",
        "algorithms/test_aggregation.py",
    ),
)
ADVANTAGES = (
    _fault(
        "advantages",
        "a tool's tokens are steps of GAE",
        "return torch.argsort(~mask, dim=1, stable=True)",
        "return torch.arange(mask.shape[1]).expand_as(mask).contiguous()",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "advantages",
        "response tokens in another order",
        "return torch.argsort(~mask, dim=1, stable=True)",
        "return torch.argsort(~mask, dim=1, stable=True).flip(1)",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "advantages",
        "a score at the end of every turn",
        "return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))",
        "return mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "advantages",
        "lambda by the length of the longest",
        "lengths = mask.sum(dim=1, keepdim=True).double().clamp(min=1)",
        "lengths = mask.sum(dim=1, keepdim=True).double().max().clamp(min=1)",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "advantages",
        "the critic learns from the policy's lambda",
        "advantages, _ = gae(scores, experience.values, mask, gamma=self.gamma, lam=lam)",
        "advantages, returns = gae(scores, experience.values, mask, gamma=self.gamma, lam=lam)",
        "algorithms/test_advantages.py",
    ),
    _fault(
        "advantages",
        "ReMax without its baseline",
        "return torch.where(known, returns - greedy_rewards[:, None], 0.0)",
        "return torch.where(known, returns, 0.0)",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "greedy rewards of other prompts",
        "own = self.rewards[inputs.experience.prompt_index]",
        "own = self.rewards[inputs.experience.prompt_index - 1]",
        "trainer/test_greedy.py",
    ),
    _fault(
        "advantages",
        "failed samples in the sums of a group",
        "torch.where(self.answered, x.double(), 0.0))[self.index]",
        "x.double())[self.index]",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "sums of a group in float32",
        "torch.where(self.answered, x.double(), 0.0))[self.index]",
        "torch.where(self.answered, x.double(), 0.0))[self.index].float()",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "a deviation of the rank's own batch",
        "count, squares = sum_over_ranks(torch.stack(",
        "count, squares = (torch.stack(",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "RLOO's baseline holds the sample",
        "groups.centred(rewards) * n / (n - 1).clamp(min=1)",
        "groups.centred(rewards)",
        "algorithms/test_unbiased_estimators.py",
    ),
    _fault(
        "advantages",
        "OPO's baseline without lengths",
        "centred(rewards, weights=lengths)",
        "centred(rewards)",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "sets of pass@k with a sample twice",
        "for j in range(1, k):",
        "for j in range(k):",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "pass@k's deviation without a root",
        "(all_missed * (1 - all_missed)).sqrt() if normalize",
        "(all_missed * (1 - all_missed)) if normalize",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "a right sample gains what all gain",
        "advantages = torch.where(right, all_missed, all_missed - missed)",
        "advantages = torch.where(right, 1 - all_missed, all_missed - missed)",
        "algorithms/test_unbiased_estimators.py",
    ),
    _fault(
        "advantages",
        "REINFORCE++ without the later tokens",
        "gamma=gamma, lam=1.0)",
        "gamma=gamma, lam=0.0)",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "REINFORCE++ whitens the rank's own batch",
        "return whiten(returns, mask, sum_over_ranks=sum_over_ranks)",
        "return whiten(returns, mask)",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "REINFORCE++ without the baseline",
        "scores = PromptGroups.of(inputs.experience.prompt_index, mask).centred(inputs.rewards).float()",
        "scores = inputs.rewards",
        "algorithms/test_group_advantages.py",
    ),
    _fault(
        "advantages",
        "lengths of responses with a tool's answers",
        "response = rollout.loss_mask.sum(dim=1).double()",
        "response = (rollout.lengths - rollout.prompt_lengths).double()",
        "trainer/test_step_metrics.py",
    ),
)
DATA = (
    _fault(
        "data",
        "prompts in two mini-batches",
        "order[first : first + minibatch_size]",
        "order[first : first + minibatch_size + 1]",
        "data/test_minibatches.py",
    ),
    _fault(
        "data",
        "sampler starts again after a resume",
        "first = step * self._batch_size",
        "first = 0 * self._batch_size",
        "data/test_prompts.py",
    ),
    _fault(
        "data",
        "every epoch in the same order",
        "key=(self._seed, EPOCH, epoch)",
        "key=(self._seed, EPOCH, 0)",
        "data/test_prompts.py",
    ),
    _fault(
        "data",
        "positions run on across packed sequences",
        "position_ids=places.column.unsqueeze(0)",
        "position_ids=places.flat.unsqueeze(0)",
        "data/test_packing.py",
    ),
    _fault(
        "data",
        "context-parallel slices in the wrong order",
        "2 * (cp_size - 1 - cp_rank) * second",
        "(cp_size - 1) * second",
        "data/test_zigzag.py",
    ),
    _fault(
        "data",
        "outputs written one token early",
        "row=cells.row, column=cells.column + 1)",
        "row=cells.row, column=cells.column)",
        "data/test_packing.py",
    ),
)
PARALLEL = (
    _fault(
        "parallel",
        "vocab-parallel log-probs without the maximum over ranks",
        "dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)",
        "dist.all_reduce(maximum.clone(), op=dist.ReduceOp.MAX, group=group)",
        "parallel/test_vocab.py",
    ),
    _fault(
        "parallel",
        "log-probs not divided by the temperature",
        "        1.0 / temperature,\n",
        "        1.0,\n",
        "parallel/test_vocab.py",
    ),
    _fault(
        "parallel",
        "padding of the vocabulary counts",
        "columns = min(max(vocab_size - first, 0), width)",
        "columns = width",
        "parallel/test_vocab.py",
    ),
)
ROLLOUT = (
    _fault(
        "rollout",
        "top-p keeps one token too many",
        "(above < self.top_p * mass[:, None])",
        "(above - ranked < self.top_p * mass[:, None])",
        "rollout/test_sampling.py",
    ),
    _fault(
        "rollout",
        "sampled log-probs not divided by the temperature",
        "return exponents, exponents.exp()",
        "return exponents * self.temperature, exponents.exp()",
        "rollout/test_sampling.py",
    ),
    _fault(
        "rollout",
        "random numbers depend on the place in the batch",
        "uniform_at(self._keys[rows], step)",
        "uniform_at(self._keys[: len(rows)], step)",
        "rollout/test_hf.py",
    ),
    _fault(
        "rollout",
        "stop token outside the response",
        "torch.where(newly, step + 1, lengths[rows])",
        "torch.where(newly, step, lengths[rows])",
        "rollout/test_hf.py",
    ),
    _fault(
        "rollout",
        "version of the engine's weights not raised",
        "self._engine.finish_update(self._weight_version + 1)",
        "self._engine.finish_update(self._weight_version)",
        "rollout/test_weight_sync.py",
    ),
    _fault(
        "rollout",
        "reported version is ahead of the engine's weights",
        'the engine holds; 0 before the first publish."""\n        return self._weight_version\n',
        'the engine holds; 0 before the first publish."""\n        return self._weight_version + 1\n',
        "rollout/test_weight_sync.py",
    ),
    _fault(
        "rollout",
        "last bucket of a sync left out",
        "        size += tensor.nbytes\n    if bucket:\n",
        "        size += tensor.nbytes\n    if not size:\n",
        "rollout/test_weight_sync.py",
    ),
    _fault(
        "rollout",
        "probes not compared",
        "if self.limits.exceeded(difference[row]):",
        "if False:",
        "rollout/sglang/test_sync.py -k probe",
    ),
    _fault(
        "rollout",
        "checksums of a sync not compared",
        "            if received[name] != total\n",
        "            if not received[name]\n",
        "rollout/test_weight_sync.py",
    ),
)
TRAINER = (
    _fault(
        "trainer",
        "stale samples accepted",
        "if oldest > self.limit:",
        "if oldest > self.limit + 1:",
        "trainer/test_staleness.py",
    ),
    _fault(
        "trainer",
        "metrics averaged without the mask",
        "*((column.double() * mask).sum() for column in columns.values())",
        "*(column.double().sum() for column in columns.values())",
        "trainer/test_step_metrics.py",
    ),
    _fault(
        "trainer",
        "metrics averaged over padding, too",
        "{name: total / max(count, 1.0) for name, total",
        "{name: total / mask.numel() for name, total",
        "trainer/test_step_metrics.py",
    ),
    _fault(
        "trainer",
        "resume repeats a step",
        "for step in range(self.start, self.settings.steps):",
        "for step in range(max(self.start - 1, 0), self.settings.steps):",
        "trainer/test_loop.py",
    ),
    _fault(
        "trainer",
        "all dumped samples of one prompt",
        "candidates[position * len(candidates) // taken]",
        "candidates[0]",
        "trainer/test_dumps.py",
    ),
    _fault(
        "trainer",
        "weights not sent after an update",
        "metrics |= self.sync.publish()",
        "metrics |= {}",
        "trainer/test_loop.py",
    ),
)
STEPS = (
    _fault(
        "steps",
        "the critic's warm-up uses up the actor's",
        "lr = self.learning_rate(step - self.first_step)",
        "lr = self.learning_rate(step)",
        "workers/test_models.py",
    ),
    _fault(
        "steps",
        "skipped steps counted over the whole run",
        "            self._skipped = 0\n",
        "",
        "workers/test_models.py",
    ),
)
STORAGE = (
    _fault(
        "storage",
        "gaps in a safetensors header accepted",
        "if entry.offset != at:",
        "if entry.offset < at:",
        "storage/test_safetensors_reader.py",
    ),
    _fault(
        "storage",
        "sizes in a safetensors header accepted",
        "if nbytes == need:",
        "if nbytes >= need:",
        "storage/test_safetensors_reader.py",
    ),
    _fault(
        "storage",
        "lock not exclusive",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "storage/test_lock.py",
    ),
)
CHECKPOINT = (
    _fault(
        "checkpoint",
        "manifest's checksum not verified",
        "(len(manifest), checksum(manifest))",
        '(len(manifest), raw["manifest"])',
        "checkpoint/test_manifest.py",
        "checkpoint/test_damage.py",
    ),
    _fault(
        "checkpoint",
        "COMMIT and manifest without fsync of their folder",
        "    disk.sync_folder(work)\n",
        "",
        "checkpoint/test_folders.py",
        "checkpoint/test_shards.py",
    ),
    _fault(
        "checkpoint",
        "overlapping pieces accepted",
        "if missing or overlap(pieces[name]) is not None:",
        "if missing:",
        "checkpoint/test_store.py",
        "checkpoint/test_manifest.py",
    ),
    _fault(
        "checkpoint",
        "second moment saved as the first",
        "trained.state[name] for name in MOMENTS",
        "trained.state[MOMENTS[0]] for name in MOMENTS",
        "ddp/test_state.py",
    ),
    _fault(
        "checkpoint",
        "pieces read from the wrong offset",
        "PieceCopy(source, within(box, common), target)",
        "PieceCopy(source, within(piece.box, common), target)",
        "checkpoint/test_fill.py",
    ),
    _fault(
        "checkpoint",
        "random state not restored",
        "rank_state.restore(kept[name] or None)",
        "rank_state.restore(None)",
        "checkpoint/test_random_state.py",
        RESUME,
    ),
    _fault(
        "checkpoint",
        "checkpoint of another run accepted",
        "        if differing:\n",
        "        if len(differing) > 9:\n",
        RESUME,
    ),
    _fault(
        "checkpoint",
        "optimizer's steps start again after a resume",
        "engine.resume_from(manifest.numbers[name])",
        "engine.resume_from(dict.fromkeys(manifest.numbers[name], 0))",
        RESUME,
    ),
)
CONVERTERS = (
    _fault(
        "converters",
        "k and v swapped in the fused rows",
        'parts = {"q": "q", "k": "kv", "v": "kv"}',
        'parts = {"q": "q", "v": "kv", "k": "kv"}',
        "converters/test_plan.py",
    ),
    _fault(
        "converters",
        "rotary base ignored",
        'theta = rope.number("rope_theta", default=fields.number("rope_theta", default=1e4))',
        "theta = 1e4",
        "converters/test_hf_config.py",
    ),
    _fault(
        "converters",
        "padding of the vocabulary exported",
        "blocks.append(Block(None, rows[0], padded_vocab - rows[0]))",
        "blocks.append(blocks[0]._replace(dst_row=rows[0], rows=padded_vocab - rows[0]))",
        "converters/test_plan.py",
        "converters/test_export.py",
    ),
    _fault(
        "converters",
        "router's bias not exported",
        '    copy("mlp.router.bias", "mlp.router.bias", "experts", when=["router_bias"]),\n',
        "",
        "converters/test_families.py",
    ),
    _fault(
        "converters",
        "expert-parallel ranks hold the wrong experts",
        "return range(ep_rank * count, (ep_rank + 1) * count)",
        "return range((layout.ep - 1 - ep_rank) * count, (layout.ep - ep_rank) * count)",
        "converters/test_plan.py",
    ),
    _fault(
        "converters",
        "gate and up swapped",
        "blocks = [first, *(block._replace(dst_row=first.rows) for block, _ in pieces[1:])]",
        "blocks = [first._replace(dst_row=first.rows), *(block for block, _ in pieces[1:])]",
        "converters/test_families.py",
        "converters/test_plan.py",
    ),
)
DDP = (
    _fault(
        "ddp",
        "weight decay on norms",
        'config.weight_decay * group["wd_mult"]',
        "config.weight_decay",
        "ddp/test_optimizer.py",
    ),
    _fault(
        "ddp",
        "sum of gradients over sequence parallelism left out",
        "config.sequence_parallel  # type: ignore[attr-defined]\n\n    def forward(self, x",
        "False  # type: ignore[attr-defined]\n\n    def forward(self, x",
        MATRIX + " -k tp2+sp",
    ),
    _fault(
        "ddp",
        "gradients of experts scaled wrongly",
        "gradients *= bucket.gradient_scaling_factor",
        "gradients *= 2 * bucket.gradient_scaling_factor",
        "distributed/test_distributed_data_parallel.py",
    ),
    _fault(
        "ddp",
        "gradients of a tied embedding not summed over the pipeline",
        '{"pg_collection": pg_collection, "force',
        '{"pg_collection": type("Groups", (), vars(pg_collection) | {"embd": None}), "force',
        "distributed/test_finalize_model_grads.py",
    ),
    _fault(
        "ddp",
        "gradients of virtual stages not finalised",
        "finalize_model_grads(model, None, **kwargs)",
        "finalize_model_grads(model[-1:], None, **kwargs)",
        "distributed/test_finalize_model_grads.py",
    ),
)
ENGINES = (
    _fault(
        "engines",
        "clipping by the local norm",
        "return math.sqrt(float(ranks.sum(total)))",
        "return math.sqrt(float(total))",
        "engines/test_fsdp.py",
    ),
    _fault(
        "engines",
        "clipping by half the norm",
        "max_norm=config.clip_grad, total_norm=norm",
        "max_norm=config.clip_grad, total_norm=norm / 2",
        "ddp/test_optimizer.py",
    ),
    _fault(
        "engines",
        "average over micro-batches not undone",
        "self.config.calculate_per_token_loss else len(micros) * ",
        "self.config.calculate_per_token_loss else 1 * ",
        "distributed/test_distributed_data_parallel.py",
    ),
    _fault(
        "engines",
        "temperature of the model ignored",
        "group=self.groups.tp,\n            vocab_size=self.sharding.hf.vocab_size,\n"
        "            temperature=self.temperature,",
        "group=self.groups.tp,\n            vocab_size=self.sharding.hf.vocab_size,",
        INVARIANCE,
    ),
    _fault(
        "engines",
        "metrics of the last micro-batch alone",
        "torch.stack([loss.sums[name] for loss in losses]).sum()",
        "losses[-1].sums[name]",
        "distributed/test_engine_parity.py",
    ),
)
TURNS = (
    _fault(
        "turns",
        "discarded gradients return as whatever the memory held",
        "cast(Any, storage).fill_(0)",
        "cast(Any, storage)",
        "engines/test_offload.py",
    ),
    _fault(
        "turns",
        "an update is undone by the host's earlier copy",
        "self._memory.changed()\n        for chunk in self.chunks:",
        "for chunk in self.chunks:",
        "engines/test_offload.py",
    ),
    _fault(
        "turns",
        "a model stays while others have their turns",
        "for role, parts in leaving.items() if parts)",
        'for role, parts in leaving.items() if parts and role != "reference")',
        "workers/test_turns.py",
    ),
)
REWARDS = (
    _fault(
        "rewards",
        "scores out of their rows",
        "scores[rows] = torch.tensor(row_scores, dtype=torch.float32)",
        "scores[: len(rows)] = torch.tensor(row_scores, dtype=torch.float32)",
        "workers/test_reward.py",
    ),
    _fault(
        "rewards",
        "a response waits behind one that hangs",
        'if kind in ("timeout", "crash"):',
        'if kind == "crash":',
        POOL,
    ),
    _fault(
        "rewards",
        "both sides of a fork answer",
        "if os.getpid() != own:",
        "if os.getpid() < 0:",
        POOL,
    ),
    _fault(
        "rewards",
        "processes of a response stay",
        "        _end_children(kept)\n",
        "",
        POOL,
    ),
    _fault(
        "rewards",
        "workers outlive their rank",
        "if sys.stdin.fileno() in ready or signal.SIGTERM in numbers:",
        "if sys.stdin.fileno() in ready and os.getppid() < 0:",
        POOL + " -k killing_the_rank",
    ),
    _fault(
        "rewards",
        "a score of a timeout is not counted",
        'timeouts=self._counts["timeout"],',
        "timeouts=0,",
        "workers/reward_pool/test_scorer.py",
    ),
    _fault(
        "rewards",
        "failed responses counted on one rank",
        "failed > own.max_failed_share * scored",
        "failed > own.max_failed_share * own.scored",
        "workers/reward_pool/test_scorer.py",
    ),
    _fault(
        "rewards",
        "a response that one rank has begun is scored by two",
        "others = [row for row in rows if not owner_of[row]]",
        "others = list(rows)",
        "workers/test_reward.py",
    ),
    _fault(
        "rewards",
        "an early score is given twice",
        "_, value = entries.popleft()",
        "_, value = entries[0]",
        "workers/reward_pool/test_scorer.py",
    ),
    _fault(
        "rewards",
        "the stop token is not counted",
        "num_tokens=len(self.token_ids) + self.finished,",
        "num_tokens=len(self.token_ids),",
        "workers/test_reward.py",
    ),
    _fault(
        "rewards",
        "ranks do not meet while one scores",
        "running = not ended.wait(beat_s)",
        "running = not ended.wait()",
        "parallel/test_agreement.py",
    ),
)
GPU = (
    _fault(
        "gpu",
        "one server by default, the other devices idle",
        "count = server.count or devices // tp_here",
        "count = server.count or 1",
        "assemble/test_memory_turns.py",
    ),
    _fault(
        "gpu",
        "a window one token too wide in the kernel for variable lengths",
        "window_size=(-1 if window is None else window - 1, 0)",
        "window_size=(-1 if window is None else window, 0)",
        "models/test_varlen.py",
    ),
    _fault(
        "gpu",
        "fused permutation of tokens where bits must repeat",
        "te and moe.permute_fusion and not settings.deterministic",
        "te and moe.permute_fusion",
        "models/test_moe.py",
    ),
    _fault(
        "gpu",
        "servers inherit the trainer's allocator",
        "if name not in _set_by_run and name not in _ALLOCATOR}",
        "if name not in _set_by_run}",
        "test_environment.py",
    ),
    _fault(
        "gpu",
        "the embedded cache doubles beyond the longest sequence",
        "room = max(min(self.num_tokens + max(first, _FIRST_RESERVE), self._max_tokens), self.num_tokens)",
        "room = self.num_tokens + max(first, _FIRST_RESERVE)",
        "rollout/test_hf.py",
    ),
    _fault(
        "gpu",
        "the host asks at every token who is finished",
        "CHECK_TOKENS.get(device.type, _CHECK_TOKENS_ON_DEVICE)",
        "1",
        "rollout/test_hf.py",
    ),
    _fault(
        "gpu",
        "one bfloat16 part of the head's float32 gradient",
        "yield torch.sub(grad, part, out=part)",
        "yield part.zero_()",
        "parallel/test_fp32_linear.py",
    ),
    _fault(
        "gpu",
        "no sum over the columns of a tensor-parallel float32 head",
        "reduce = partial(reduce_from_tensor_model_parallel_region, group=tp_group)",
        "reduce = None",
        "distributed/test_fp32_head.py",
    ),
    _fault(
        "gpu",
        "no sum over the columns of a sequence-parallel float32 head",
        "reduce = partial(reduce_scatter_to_sequence_parallel_region, group=tp_group)",
        "reduce = lambda grad: grad.chunk(tp_group.size())[tp_group.rank()]",
        "distributed/test_fp32_head.py",
    ),
    _fault(
        "gpu",
        "float32 logits of FSDP rounded to bfloat16",
        "head.forward = lambda hidden: fp32_linear(hidden, head.weight)",
        "head.forward = lambda hidden: fp32_linear(hidden, head.weight).bfloat16()",
        "distributed/test_fp32_head.py",
    ),
    _fault(
        "gpu",
        "the plan counts bfloat16 logits under a float32 head",
        'return _BYTES["fp32"] if self.config.model.fp32_head else self.itemsize',
        "return self.itemsize",
        "plan/test_plan.py",
    ),
    _fault(
        "gpu",
        "server arguments do not reach the server",
        "for part in pair), *flags, *command_line(settings.args)]",
        "for part in pair), *flags]",
        "config/test_server_arguments.py",
    ),
)
TRANSFORMER_ENGINE = (
    _fault(
        "Transformer Engine",
        "whole weights stay marked as cut",
        'vars(parameter)["tensor_model_parallel"] = False',
        'vars(parameter)["tensor_model_parallel"] = True',
        "models/test_transformer_engine.py",
    ),
    _fault(
        "Transformer Engine",
        "weight gradients are rounded and added by a hook",
        "setattr(module, FUSED, True)",
        "setattr(module, FUSED, False)",
        "models/test_transformer_engine.py",
    ),
)
FAULTS = (
    *ALGORITHMS,
    *ADVANTAGES,
    *DATA,
    *PARALLEL,
    *ROLLOUT,
    *TRAINER,
    *STEPS,
    *STORAGE,
    *CHECKPOINT,
    *CONVERTERS,
    *DDP,
    *ENGINES,
    *TURNS,
    *REWARDS,
    *GPU,
    *TRANSFORMER_ENGINE,
)
