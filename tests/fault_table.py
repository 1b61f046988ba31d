"""Faults for tests/planted_faults.py: one small change of the package each, and the tests that must find it."""

from __future__ import annotations

from tests.adapter_faults import ADAPTERS
from tests.agent_faults import AGENTS
from tests.evaluation_faults import EVALUATION
from tests.fault import UNIT, Fault, Table
from tests.given_faults import GIVEN
from tests.order_faults import ORDER
from tests.part_faults import PARTS
from tests.reference_faults import REFERENCE
from tests.rl_faults import RL
from tests.sandbox_faults import SANDBOX

TABLE: Table = {
    ("models", "parallel/accelerator/test_delta_rule.py"): [
        (
            "state of a linear-attention layer leaks between packed sequences",
            "return by_sequence(lambda *tensors: chunked(*tensors)[0], [q, k, v, g, beta], cu_seqlens), None",
            "return chunked(q, k, v, g, beta)[0], None",
        ),
        (
            "the convolution before a delta net sees the sequence before",
            "return by_sequence(silu_conv, [x], cu_seqlens), None",
            "return silu_conv(x), None",
        ),
    ],
    ("algorithms", "algorithms/test_kl.py"): [
        ("k1 with the wrong sign", "return logprobs - ref_logprobs", "return ref_logprobs - logprobs"),
        (
            "k3 adds the log ratio",
            "estimate = torch.expm1(log_ratio) - log_ratio",
            "estimate = torch.expm1(log_ratio) + log_ratio",
        ),
    ],
    ("algorithms", "algorithms/test_kl_gradients.py"): [
        (
            "KL in the loss not weighted by the ratio",
            "weight = log_ratio.detach().exp().clamp(max=WEIGHT_LIMIT)",
            "weight = torch.ones_like(log_ratio)",
        )
    ],
    ("algorithms", "trainer/test_loop.py"): [
        (
            "KL coefficient adapted while the policy stands still",
            "        if moved:\n            sequences",
            "        if True:\n            sequences",
        ),
        (
            "weights within a step are sent before its first update",
            "            if first:\n",
            "            if True:\n",
        ),
    ],
    ("algorithms", "algorithms/test_advantages.py"): [
        ("GAE off by one token", "discount[:, :-1] * values[:, 1:]", "discount[:, :-1] * values[:, :-1]"),
        (
            "whitening over the local batch",
            "return whiten(x, self.mask, sum_over_ranks=self.sum_over_ranks)",
            "return whiten(x, self.mask)",
        ),
    ],
    ("algorithms", "algorithms/test_group_advantages.py"): [
        ("GRPO's deviation over the batch", 'if self.std == "batch":', 'if self.std != "none":')
    ],
    ("algorithms", "algorithms/test_policy_loss.py"): [
        (
            "clip takes the better of two losses",
            "token_loss = torch.maximum(unclipped, clipped)",
            "token_loss = torch.minimum(unclipped, clipped)",
        )
    ],
    ("algorithms", "algorithms/test_value_loss.py"): [
        ("value clip ignored", "token_loss = 0.5 * torch.maximum(error, near_error)", "token_loss = 0.5 * error")
    ],
    ("algorithms", "algorithms/test_aggregation.py"): [
        (
            "loss weights over the rank's own tokens",
            "max(global_tokens, 1.0), max(",
            "max(float(mask.sum()), 1.0), max(",
        )
    ],
    ("advantages", "algorithms/test_advantages.py"): [
        (
            "a tool's tokens are steps of GAE",
            "return torch.argsort(~mask, dim=1, stable=True)",
            "return torch.arange(mask.shape[1]).expand_as(mask).contiguous()",
        ),
        (
            "response tokens in another order",
            "return torch.argsort(~mask, dim=1, stable=True)",
            "return torch.argsort(~mask, dim=1, stable=True).flip(1)",
        ),
        (
            "a score at the end of every turn",
            "return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))",
            "return mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))",
        ),
        (
            "lambda by the length of the longest",
            "lengths = mask.sum(dim=1, keepdim=True).double().clamp(min=1)",
            "lengths = mask.sum(dim=1, keepdim=True).double().max().clamp(min=1)",
        ),
        (
            "the critic learns from the policy's lambda",
            "advantages, _ = estimate(scores, values, mask, lam=lam)",
            "advantages, returns = estimate(scores, values, mask, lam=lam)",
        ),
    ],
    ("advantages", "algorithms/test_group_advantages.py"): [
        (
            "ReMax without its baseline",
            "inputs.on_tokens(torch.where(known, returns - greedy[:, None], 0.0))",
            "inputs.on_tokens(torch.where(known, returns, 0.0))",
        ),
        (
            "failed samples in the sums of a group",
            "torch.where(self.counted, x.double(), 0.0))[self.index]",
            "x.double())[self.index]",
        ),
        (
            "sums of a group in float32",
            "torch.where(self.counted, x.double(), 0.0))[self.index]",
            "torch.where(self.counted, x.double(), 0.0))[self.index].float()",
        ),
        (
            "a deviation of the rank's own batch",
            "count, squares = inputs.sum_over_ranks(own.sum(dim=1))",
            "count, squares = own.sum(dim=1)",
        ),
        (
            "RLOO's baseline holds the sample",
            "groups.centred(inputs.rewards) * n / (n - 1).clamp(min=1)",
            "groups.centred(inputs.rewards)",
        ),
        ("OPO's baseline without lengths", "centred(inputs.rewards, weights=lengths)", "centred(inputs.rewards)"),
        ("sets of pass@k with a sample twice", "for j in range(1, self.k):", "for j in range(self.k):"),
        (
            "pass@k's deviation without a root",
            "(all_missed * (1 - all_missed)).sqrt() if self.std",
            "(all_missed * (1 - all_missed)) if self.std",
        ),
        (
            "a right sample gains what all gain",
            "advantages = torch.where(right, all_missed, all_missed - missed)",
            "advantages = torch.where(right, 1 - all_missed, all_missed - missed)",
        ),
        ("REINFORCE++ without the later tokens", "gamma=gamma, lam=1.0, forks", "gamma=gamma, lam=0.0, forks"),
        (
            "REINFORCE++ whitens the rank's own batch",
            "return whiten(x, self.mask, sum_over_ranks=self.sum_over_ranks)",
            "return whiten(x, self.mask)",
        ),
        (
            "REINFORCE++ without the baseline",
            "scores = inputs.groups.centred(inputs.rewards).float()",
            "scores = inputs.rewards",
        ),
    ],
    ("advantages", "trainer/test_greedy.py"): [
        (
            "greedy rewards of other prompts",
            "else greedy[rollout.prompt_index],",
            "else greedy[rollout.prompt_index - 1],",
        )
    ],
    ("advantages", "trainer/test_step_metrics.py"): [
        (
            "lengths of responses with a tool's answers",
            "response = over_trajectory(rollout.loss_mask.sum(dim=1), rollout.branch).double()",
            "response = (rollout.lengths - rollout.prompt_lengths).double()",
        )
    ],
    ("data", "data/test_minibatches.py"): [
        (
            "prompts in two mini-batches",
            "order[first : first + minibatch_size]",
            "order[first : first + minibatch_size + 1]",
        )
    ],
    ("data", "data/test_prompts.py"): [
        ("sampler starts again after a resume", "return done * self._batch_size", "return 0 * self._batch_size"),
        (
            "every epoch in the same order",
            "key=(self._seed, EPOCH, epoch, *self._key)",
            "key=(self._seed, EPOCH, 0, *self._key)",
        ),
    ],
    ("data", "data/test_packing.py"): [
        (
            "positions run on across packed sequences",
            "position_ids=places.column.unsqueeze(0)",
            "position_ids=places.flat.unsqueeze(0)",
        ),
        (
            "outputs written one token early",
            "row=cells.row, column=cells.column + 1)",
            "row=cells.row, column=cells.column)",
        ),
    ],
    ("data", "data/test_zigzag.py"): [
        ("context-parallel slices in the wrong order", "2 * (cp_size - 1 - cp_rank) * second", "(cp_size - 1) * second")
    ],
    ("parallel", "parallel/test_vocab.py"): [
        (
            "vocab-parallel log-probs without the maximum over ranks",
            "local_maximum = maximum.clone()\n        dist.all_reduce(maximum, op",
            "local_maximum = maximum.clone()\n        dist.all_reduce(maximum.clone(), op",
        ),
        ("log-probs not divided by the temperature", "scale=1.0 / temperature,", "scale=1.0,"),
        ("padding of the vocabulary counts", "count=min(max(vocab_size - first, 0), width)", "count=width"),
    ],
    ("rollout", "rollout/test_hidden_tokens.py"): [
        ("hidden tokens are sampled", "hide(output.logits[:, -1], hidden)", "output.logits[:, -1]")
    ],
    ("rollout", "rollout/test_sampling.py"): [
        (
            "top-p keeps one token too many",
            "(above < self.top_p * mass[:, None])",
            "(above - ranked < self.top_p * mass[:, None])",
        ),
        (
            "sampled log-probs not divided by the temperature",
            "return exponents, exponents.exp()",
            "return exponents * self.temperature, exponents.exp()",
        ),
    ],
    ("rollout", "rollout/test_hf.py"): [
        (
            "random numbers depend on the place in the batch",
            "draw(logits, keys[rows], step)",
            "draw(logits, keys[: len(rows)], step)",
        ),
        (
            "stop token outside the response",
            "torch.where(newly, step + 1, lengths[rows])",
            "torch.where(newly, step, lengths[rows])",
        ),
    ],
    ("rollout", "rollout/test_weight_sync.py"): [
        (
            "version of the engine's weights not raised",
            "self._engine.finish_update(self.weight_version + 1)",
            "self._engine.finish_update(self.weight_version)",
        ),
        (
            "reported version is ahead of the engine's weights",
            "self.weight_version += 1\n        self._num_publishes += 1",
            "self.weight_version += 2\n        self._num_publishes += 1",
        ),
        (
            "last weight of a sync left out",
            "for name, tensor in export():",
            "for name, tensor in list(export())[:-1]:",
        ),
        (
            "checksums of a sync not compared",
            "            if received[name] != total\n",
            "            if not received[name]\n",
        ),
    ],
    ("rollout", "rollout/sglang/test_sync.py -k probe"): [
        ("probes not compared", "if mean > self.limits[0] or largest > self.limits[1]:", "if False:")
    ],
    ("trainer", "trainer/test_staleness.py"): [
        ("stale samples accepted", "oldest if oldest > limit else", "oldest if oldest > limit + 1 else")
    ],
    ("trainer", "trainer/test_step_metrics.py"): [
        (
            "metrics averaged without the mask",
            "*((column.double() * mask).sum() for column in columns.values())",
            "*(column.double().sum() for column in columns.values())",
        ),
        (
            "metrics averaged over padding, too",
            "{name: total / max(count, 1.0) for name, total",
            "{name: total / mask.numel() for name, total",
        ),
    ],
    ("trainer", "trainer/test_loop.py"): [
        (
            "resume repeats a step",
            "done = self.start\n        self._after",
            "done = max(self.start - 1, 0)\n        self._after",
        ),
        ("weights not sent after an update", "self.log.add(self.stage.publish(self.sync))", "self.log.add({})"),
        (
            "an event that ends the run keeps later ones from acting",
            "if any([event.before(done) for event in self.events]) or",
            "if any(event.before(done) for event in self.events) or",
        ),
        (
            "metrics of the step before stay in a record",
            "self.last, self.metrics = self.metrics, {}",
            "self.last = self.metrics",
        ),
        (
            "a step is saved before its record is written",
            "                rounds.advance()\n                self.log.write(done)\n",
            "                rounds.advance()\n",
        ),
    ],
    ("trainer", "trainer/test_dumps.py"): [
        ("all dumped samples of one prompt", "groups[position * len(groups) // taken]", "groups[0]")
    ],
    ("steps", "workers/test_models.py"): [
        (
            "the critic's warm-up uses up the actor's",
            "lr = self.learning_rate(step - self.first_step)",
            "lr = self.learning_rate(step)",
        ),
        ("skipped steps counted over the whole run", "                self._skipped = 0\n", "                pass\n"),
    ],
    ("storage", "converters/safetensors/test_reader.py"): [
        ("gaps in a safetensors header accepted", "if entry.offset != at:", "if entry.offset < at:"),
        ("sizes in a safetensors header accepted", "if nbytes == need:", "if nbytes >= need:"),
    ],
    ("storage", "test_preflight.py -k damaged"): [
        ("a shard without a tensor of the index starts a run", "if name not in header", "if not name"),
    ],
    ("storage", "test_disk.py"): [
        ("lock not exclusive", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB")
    ],
    ("checkpoint", "checkpoint/test_manifest.py", "checkpoint/test_damage.py"): [
        ("manifest's checksum not verified", "if commit != commit_text(manifest).encode():", "if not commit:")
    ],
    ("checkpoint", "checkpoint/test_folders.py", "checkpoint/test_shards.py"): [
        ("COMMIT and manifest without fsync of their folder", "    disk.sync_folder(work)\n", "")
    ],
    ("checkpoint", "checkpoint/test_store.py", "checkpoint/test_manifest.py"): [
        (
            "overlapping pieces accepted",
            "if (pair := overlap(pieces)) is not None:",
            "if (pair := overlap(pieces)) and len(pieces) > 9:",
        )
    ],
    ("checkpoint", "ddp/test_state.py"): [
        (
            "second moment saved as the first",
            "name: tensor for name, tensor in trained.state.items() if name in MOMENTS",
            "name: trained.state[MOMENTS[0]] for name in trained.state if name in MOMENTS",
        )
    ],
    ("checkpoint", "checkpoint/test_fill.py"): [
        (
            "pieces read from the wrong offset",
            "PieceCopy(source, within(box, common), target)",
            "PieceCopy(source, within(piece.box, common), target)",
        )
    ],
    ("checkpoint", "checkpoint/test_random_state.py", "checkpoint/test_resume.py"): [
        ("random state not restored", "rank_state.restore(kept[name] or None)", "rank_state.restore(None)")
    ],
    ("checkpoint", "checkpoint/test_resume.py"): [
        ("checkpoint of another run accepted", "        if differing:\n", "        if len(differing) > 9:\n"),
        (
            "optimizer's steps start again after a resume",
            "engine.resume_from(manifest.numbers[name])",
            "engine.resume_from(dict.fromkeys(manifest.numbers[name], 0))",
        ),
    ],
    ("converters", "converters/test_plan.py"): [
        (
            "kinds of rows that take turns in a tensor from the wrong place",
            "group * sum(parts) + before) for group in range(groups)]",
            "group * sum(parts)) for group in range(groups)]",
        ),
        (
            "k and v swapped in the fused rows",
            'parts = {"q": "q", "k": "kv", "v": "kv"}',
            'parts = {"q": "q", "v": "kv", "k": "kv"}',
        ),
        (
            "expert-parallel ranks hold the wrong experts",
            "return range(ep_rank * count, (ep_rank + 1) * count)",
            "return range((layout.ep - 1 - ep_rank) * count, (layout.ep - ep_rank) * count)",
        ),
    ],
    ("converters", "converters/test_offline.py"): [
        (
            "columns that take turns are written side by side",
            "dst_col = copy.dst_col + low * copy.dst_step",
            "dst_col = copy.dst_col + low",
        )
    ],
    ("converters", "converters/test_hf_config.py"): [
        (
            "sparse attention sees every token, whatever its indexer chooses",
            '"dsa_indexer_topk": indexer.top_k,',
            '"dsa_indexer_topk": 1 << 20,',
        ),
        (
            "rotary base ignored",
            'theta = rope.number("rope_theta", default=fields.number("rope_theta", default=1e4))',
            "theta = 1e4",
        ),
    ],
    ("converters", "converters/test_wrapped.py"): [
        (
            "a tower is cast with the language model",
            "outputs.append(_copied(name, weights, None))",
            "outputs.append(_copied(name, weights, cast))",
        ),
        (
            "prediction layers that the class does not read are dropped",
            "return frozenset(ignored).union(",
            "return frozenset().union(",
        ),
        (
            "parts of a delta net's projection are read one over the other",
            "copy = Copy(canonical, low + row, col,",
            "copy = Copy(canonical, row, col,",
        ),
        (
            "names of an export begin as those of a language model on its own",
            "TensorSpec(renamed(name, PLAIN_NAMES, prefixes), ",
            "TensorSpec(name, ",
        ),
        (
            "a text without a table forgets the tower around it",
            "wrapper=None if described is raw else dict(raw),\n    )\n\n\ndef _read",
            "wrapper=None,\n    )\n\n\ndef _read",
        ),
    ],
    ("converters", "converters/safetensors/test_quantised.py"): [
        (
            "8-bit blocks are 128 x 128 whatever config.json says",
            "return None if size is None else (max(int(size[0]), 1), max(int(size[1]), 1))",
            "return 128, 128",
        ),
        ("4-bit integers without their offset", "(wanted - 8).float()", "wanted.float()"),
    ],
    ("converters", "converters/test_plan.py", "converters/test_export.py"): [
        (
            "padding of the vocabulary exported",
            "blocks.append(Block(None, rows[0], padded_vocab - rows[0]))",
            "blocks.append(blocks[0]._replace(dst_row=rows[0], rows=padded_vocab - rows[0]))",
        )
    ],
    ("converters", "converters/test_families.py"): [
        (
            "router's bias not exported",
            '    copy("mlp.router.bias", "mlp.router.bias", "experts"),\n',
            "",
        )
    ],
    ("converters", "converters/test_families.py", "converters/test_plan.py"): [
        (
            "gate and up swapped",
            "starts = accumulate(rows, initial=0)",
            "starts = list(accumulate(rows, initial=0))[len(rows) - 1 :: -1]",
        )
    ],
    ("ddp", "ddp/test_muon.py"): [
        (
            "joined query, key and value are one matrix to Muon",
            "        for blocks, shape in matrix_blocks(part, hf):\n",
            "        found = matrix_blocks(part, hf)\n"
            "        starts = [sum(s[0] for _, s in found[:i]) for i in range(len(found))]\n"
            "        whole = [b._replace(dst_row=a + b.dst_row) for a, (own, _) in zip(starts, found) for b in own]\n"
            "        for blocks, shape in [(whole, (sum(s[0] for _, s in found), found[0][1][1]))] if found else []:\n",
        ),
        (
            "Muon's update without its scale",
            'lr = upstream._adjust_lr(self._members[panel.parameter][1]["lr"], "match_rms_adamw", shape)',
            'lr = self._members[panel.parameter][1]["lr"]',
        ),
        (
            "Muon without Nesterov's step ahead",
            "panel.of(panel.parameter.grad).lerp(average, MOMENTUM).flatten()",
            "average.flatten()",
        ),
    ],
    ("ddp", "plan/test_states.py"): [
        (
            "the plan counts two moments of Muon's matrices",
            "buffer.owned(index, buffer.matrices) if training.muon else 0",
            "0",
        )
    ],
    ("ddp", "ddp/test_optimizer.py"): [
        ("weight decay on norms", 'optim.weight_decay * group["wd_mult"]', "optim.weight_decay")
    ],
    ("verify", "cli/test_card.py"): [
        (
            "exported bits are not compared",
            "if name in lost and torch.equal(kept(weight), reference.get_tensor(START + name)):",
            "if name in lost:",
        ),
        ("a card with a failed proof is good", "one.verdict != NOT_PROVED for one in", "one.verdict for one in"),
    ],
    ("ddp", "verify/test_matrix.py -k tp2+sp"): [
        (
            "sum of gradients over sequence parallelism left out",
            "config.sequence_parallel  # type: ignore[attr-defined]\n\n    def forward(self, x",
            "False  # type: ignore[attr-defined]\n\n    def forward(self, x",
        )
    ],
    ("ddp", "distributed/test_distributed_data_parallel.py"): [
        (
            "gradients of experts scaled wrongly",
            "gradients *= bucket.gradient_scaling_factor",
            "gradients *= 2 * bucket.gradient_scaling_factor",
        ),
        (
            "gradients of other optimizer instances left out",
            "dist.all_reduce(total, group=self.across)",
            "pass",
        ),
    ],
    ("ddp", "distributed/test_reduce_scatter_with_fp32_accumulation.py"): [
        (
            "a mean over optimizer instances divides by those of one",
            "(1 if across is None else across.size()) if mean",
            "1 if mean",
        ),
    ],
    ("ddp", "distributed/test_finalize_model_grads.py"): [
        (
            "gradients of a tied embedding not summed over the pipeline",
            '{"pg_collection": pg_collection, "force',
            '{"pg_collection": type("Groups", (), vars(pg_collection) | {"embd": None}), "force',
        ),
        (
            "gradients of virtual stages not finalised",
            "finalize_model_grads(model, None, **kwargs)",
            "finalize_model_grads(model[-1:], None, **kwargs)",
        ),
    ],
    ("engines", "distributed/test_expert_parallel.py -k apertus"): [
        (
            "slopes of xIELU have the gradients of one rank",
            "copy_to_tensor_model_parallel_region(torch.cat([self.alpha_p, self.alpha_n]), group=self.tp_group)",
            "torch.cat([self.alpha_p, self.alpha_n])",
        ),
    ],
    ("engines", "distributed/test_family_parity.py"): [
        (
            "corrections of a softmax enter the weights",
            "values = scores.gather(1, experts)",
            "values = corrected.gather(1, experts)",
        ),
    ],
    ("engines", "engines/test_tenants.py"): [
        (
            "moments of a tenant stay for the next one",
            "(piece for piece in state.pieces if PART in piece.name)",
            '(piece for piece in state.pieces if PART in piece.name and "exp_avg/" not in piece.name)',
        ),
        (
            "steps of a tenant count for the next one",
            "self.engine.resume_from(coming.numbers)",
            "self.engine.resume_from(state.numbers)",
        ),
    ],
    ("engines", "trainer/test_together.py"): [
        (
            "a run trains with the optimizer's settings of the run before",
            "            adopt(self.tenants.engine, settings)",
            "            pass",
        ),
        ("a run samples with the weights of the run before", "            sync.resend()", "            pass"),
        ("random numbers go on from run to run", "RandomState().restore(coming.random)", "pass"),
    ],
    ("engines", "engines/test_fsdp.py"): [
        ("weights of experts' biases decay", 'or name.endswith("bias")}', "}"),
        (
            "clipping by the local norm",
            "return math.sqrt(float(ranks.sum(squares.cpu())))",
            "return math.sqrt(float(squares.cpu()))",
        ),
        (
            "a mini-batch without a token makes an optimizer step",
            "if not metrics[TRAINED_TOKENS]:\n            return {TRAINED_TOKENS: 0.0}\n        if inspect",
            "if inspect",
        ),
    ],
    ("engines", "ddp/test_optimizer.py"): [
        (
            "clipping by half the norm",
            "max_norm=limit, total_norm=norm",
            "max_norm=limit, total_norm=norm / 2",
        )
    ],
    ("engines", "distributed/test_distributed_data_parallel.py"): [
        (
            "average over micro-batches not undone",
            "self.config.calculate_per_token_loss else len(micros) * ",
            "self.config.calculate_per_token_loss else 1 * ",
        )
    ],
    ("engines", "distributed/test_layout_invariance.py"): [
        (
            "temperature of the model ignored",
            "vocab_size, temperature = self.sharding.hf.vocab_size, self.temperature",
            "vocab_size, temperature = self.sharding.hf.vocab_size, 1.0",
        )
    ],
    ("engines", "rollout/test_hidden_tokens.py"): [
        (
            "hidden tokens of the first rank on every rank",
            "hide(logits, self.hidden_tokens, first=0 if group is None else group.rank() * logits.shape[1])",
            "hide(logits, self.hidden_tokens)",
        )
    ],
    ("engines", "trainer/test_step_metrics.py"): [
        ("updates weigh alike, whatever their tokens", "in PER_UPDATE else tokens))", "in PER_UPDATE else 1.0))")
    ],
    ("engines", "distributed/test_engine_parity.py"): [
        (
            "metrics of the last micro-batch alone",
            "torch.stack([loss.sums[name] for loss in losses]).sum()",
            "losses[-1].sums[name]",
        )
    ],
    ("turns", "engines/test_offload.py"): [
        ("discarded gradients return as whatever the memory held", "cast(Any, storage).fill_(0)", "cast(Any, storage)"),
        (
            "an update is undone by the host's earlier copy",
            "self._memory.changed()\n        results, metrics",
            "results, metrics",
        ),
    ],
    ("turns", "workers/test_residency.py"): [
        (
            "a model stays while others have their turns",
            "for role, parts in leaving.items() if parts)",
            'for role, parts in leaving.items() if parts and role != "reference")',
        ),
        (
            "servers resume memory that models still hold",
            "        offloaded = models.hold(self._residents(layout))\n",
            "        coming = [tag for tag in TAGS if tag in set(layout.servers) - set(now.servers)]\n"
            "        self.everyone.sum(torch.zeros(1))\n"
            "        self.servers.resume(coming)\n"
            "        now, offloaded = layout, models.hold(self._residents(layout))\n",
        ),
        (
            "a failed step leaves the trainer's state on the host",
            "            self.models.hold(self._residents(TRAINING))\n",
            "            pass\n",
        ),
        ("a reward model scores beside the servers' cache", '    "reward": SCORING,\n', '    "reward": GENERATING,\n'),
    ],
    ("rewards", "rewards/test_role.py"): [
        (
            "scores out of their rows",
            "columns[rows] = torch.tensor(numbers, dtype=torch.float32)",
            "columns[: len(rows)] = torch.tensor(numbers, dtype=torch.float32)",
        ),
        ("a response without a score is not counted", "                counts[result.kind] += 1\n", ""),
        (
            "failed responses counted on one rank",
            "sum(failed) > self.max_failed_share * total",
            "sum(failed) > self.max_failed_share * sum(own)",
        ),
        (
            "the stop token is not counted",
            "return Response(text, sum(own), finish, token_ids=kept)",
            "return Response(text, len(kept), finish, token_ids=kept)",
        ),
    ],
    ("rewards", "trainer/test_loop.py"): [
        (
            "a run without a reward reports zeros",
            "device=rollout.tokens.device), scored=False)",
            "device=rollout.tokens.device))",
        )
    ],
    ("rewards", "parallel/test_agreement.py -k interrupted"): [
        (
            "hung work is interrupted when it has ended, too",
            "        signal.signal(INTERRUPT, previous)\n",
            "        pass\n",
        )
    ],
    ("rewards", "rewards/test_pool.py -k guilty"): [
        (
            "a lost worker gets the next responses",
            "        self._workers[number] = None\n",
            "        pass\n",
        ),
        (
            "responses of a message are lost with their worker",
            "                elif len(rows) > 1:\n",
            "                elif len(rows) < 1:\n",
        ),
    ],
    ("rewards", "rewards/test_pool.py"): [
        ("both sides of a fork answer", "if os.getpid() != own:", "if os.getpid() < 0:")
    ],
    ("rewards", "test_processes.py -k has_started"): [
        (
            "processes that fork on and on are killed one by one",
            "os.killpg(self.pid, signal.SIGKILL)",
            "os.kill(self.pid, signal.SIGKILL)",
        )
    ],
    ("rewards", "rewards/test_pool.py -k one_by_one"): [
        (
            "a batch that fails costs all of its responses",
            "        if len(chunk) == 1:\n            return [result]\n",
            "        if chunk:\n            return [result] * len(chunk)\n",
        )
    ],
    ("rewards", "rewards/test_pool.py -k killing_the_rank"): [
        (
            "workers outlive their rank",
            "            os.killpg(0, signal.SIGKILL)\n",
            "            pass\n",
        )
    ],
    ("rewards", "parallel/test_agreement.py"): [
        ("ranks do not meet while one scores", "running = not ended.wait(beat_s)", "running = not ended.wait()")
    ],
    ("gpu", "distributed/test_weight_resharding.py -k fails"): [
        (
            "every rank shares every bucket",
            "payload(device.handle(data), bucket, self._weights.dtype) if opens else None",
            "payload(device.handle(data), bucket, self._weights.dtype)",
        )
    ],
    ("gpu", "parallel/test_strict_nccl.py -k transports"): [
        (
            "senders of weights meet and the others do not",
            "new_subgroups_by_enumeration(list(map(list, parts)),",
            "new_subgroups_by_enumeration([list(parts[0])],",
        )
    ],
    ("gpu", "parallel/test_groups.py -k bound"): [
        (
            "the world is bound to a device, whose communicator each group splits",
            "rank=rank, world_size=world_size, timeout=timeout)\n",
            "rank=rank, world_size=world_size, timeout=timeout, device_id=accelerator.device)\n",
        )
    ],
    ("gpu", "trainer/assemble/test_packaged_hosts.py"): [
        (
            "servers of all hosts are asked alike",
            "near = [replica for replica in replicas if replica.near] or replicas",
            "near = replicas",
        ),
        ("one seed for all servers of a run", "seed=settings.seed + index,", "seed=settings.seed,"),
    ],
    ("gpu", "trainer/assemble/test_memory_turns.py"): [
        (
            "one server by default, the other devices idle",
            "count = server.count or devices // tp_here",
            "count = server.count or 1",
        )
    ],
    ("gpu", "engines/models/test_varlen.py"): [
        (
            "a window one token too wide in the kernel for variable lengths",
            "window_size=(-1 if window is None else window - 1, 0)",
            "window_size=(-1 if window is None else window, 0)",
        )
    ],
    ("gpu", "engines/models/test_norms.py"): [
        (
            "a norm that adds one to its weight runs the plain kernel",
            "return torch.allclose(trial(hidden), _normalise(trial, hidden), rtol=1e-5, atol=1e-6)",
            "return True",
        ),
        ("the fused norm's epsilon is torch's own", "weight, _epsilon(module))", "weight, None)"),
    ],
    ("gpu", "engines/models/test_moe.py"): [
        (
            "fused permutation of tokens where bits must repeat",
            "te and not deterministic",
            "te",
        )
    ],
    ("gpu", "test_environment.py"): [
        (
            "servers inherit the trainer's allocator",
            "if name not in _set_by_run and name not in _ALLOCATOR}",
            "if name not in _set_by_run}",
        )
    ],
    ("gpu", "rollout/test_hf.py"): [
        (
            "the embedded cache doubles beyond the longest sequence",
            "room = max(min(self.num_tokens + max(first, _FIRST_RESERVE), self._max_tokens), self.num_tokens)",
            "room = self.num_tokens + max(first, _FIRST_RESERVE)",
        ),
        ("the host asks at every token who is finished", "check_tokens = check_interval(device)", "check_tokens = 1"),
    ],
    ("gpu", "parallel/test_fp32_linear.py"): [
        (
            "one bfloat16 part of the head's float32 gradient",
            "yield torch.sub(grad, part, out=part)",
            "yield part.zero_()",
        )
    ],
    ("gpu", "distributed/test_fp32_head.py"): [
        (
            "no sum over the columns of a tensor-parallel float32 head",
            "reduce = partial(reduce_from_tensor_model_parallel_region, group=tp_group)",
            "reduce = None",
        ),
        (
            "no sum over the columns of a sequence-parallel float32 head",
            "reduce = partial(reduce_scatter_to_sequence_parallel_region, group=tp_group)",
            "reduce = lambda grad: grad.chunk(tp_group.size())[tp_group.rank()]",
        ),
        (
            "float32 logits of FSDP rounded to bfloat16",
            "logits = fp32_linear(hidden, head.weight)",
            "logits = fp32_linear(hidden, head.weight).bfloat16()",
        ),
    ],
    ("gpu", "parallel/test_vocab.py"): [
        (
            "a kernel's annotation that Triton's compiler refuses",
            "sums: tl.tensor, tokens: int",
            "sums: Tensor, tokens: int",
        )
    ],
    ("gpu", "plan/test_plan.py"): [
        (
            "the plan counts bfloat16 logits under a float32 head",
            'return _BYTES["fp32"] if self.config.model.fp32_head else self.itemsize',
            "return self.itemsize",
        )
    ],
    ("gpu", "config/test_server_arguments.py"): [
        (
            "server arguments do not reach the server",
            "for part in pair), *flags, *command_line(settings.args)]",
            "for part in pair), *flags]",
        )
    ],
    ("Transformer Engine", "engines/models/test_transformer_engine.py"): [
        (
            "whole weights stay marked as cut",
            'vars(parameter)["tensor_model_parallel"] = False',
            'vars(parameter)["tensor_model_parallel"] = True',
        ),
        (
            "weight gradients are rounded and added by a hook",
            "setattr(module, FUSED, True)",
            "setattr(module, FUSED, False)",
        ),
    ],
    ("launcher", "operations/launcher/test_launch.py -k first_failure"): [
        (
            "exit code 0 believed without the rank's last word",
            "if code in MEANINGFUL and os.pread(self._last_words, 1, rank) != bytes([code + 1]):",
            "if code in MEANINGFUL[1:] and os.pread(self._last_words, 1, rank) != bytes([code + 1]):",
        )
    ],
    ("launcher", "test_programs.py"): [
        (
            "the working folder first on the path of programs",
            'return [python, "-P", "-m", module, *arguments]',
            'return [python, "-m", module, *arguments]',
        )
    ],
}
FAULTS = [
    Fault(area, *row, tuple(UNIT + target for target in targets))
    for table in (RL, ADAPTERS, AGENTS, REFERENCE, PARTS, ORDER, EVALUATION, SANDBOX, GIVEN, TABLE)
    for (area, *targets), rows in table.items()
    for row in rows
]
