"""Faults of losses, corrections and experience for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

RL: Table = {
    ("losses", "algorithms/test_policy_objectives.py"): [
        (
            "GSPO's ratio of a response is the product, not the mean",
            "sequences.spread(sequences.mean(tokens.log_ratio.detach()).exp())",
            "sequences.spread(sequences.sum(tokens.log_ratio.detach()).exp())",
        ),
        (
            "GSPO's tokens keep their own ratios",
            "ratio = of_response * (tokens.logprobs - tokens.logprobs.detach()).exp()",
            "ratio = tokens.log_ratio.exp()",
        ),
        (
            "GMPO clips losses where gains are clipped",
            "torch.where(gains, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))",
            "torch.where(gains, log_ratio.clamp(min=-self.clip_low), log_ratio.clamp(max=self.clip_high))",
        ),
        (
            "CISPO's weight without its cap",
            "-ratio.clamp(max=self.cap) * tokens.advantages",
            "-ratio * tokens.advantages",
        ),
        (
            "SAPO's gates exchanged",
            "torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)",
            "torch.where(tokens.advantages > 0, self.tau_negative, self.tau_positive)",
        ),
        (
            "DPPO masks tokens on their way back",
            "masked = far & (change * tokens.advantages > 0)",
            "masked = far & (change * tokens.advantages < 0)",
        ),
        (
            "Clip-Cov holds back the others",
            "torch.where(held, token_loss.detach(), token_loss)",
            "torch.where(held, token_loss, token_loss.detach())",
        ),
        (
            "KL-Cov punishes tokens of small covariance",
            "held = (covariance(tokens) >= self.threshold)",
            "held = (covariance(tokens) <= self.threshold)",
        ),
    ],
    ("losses", "algorithms/test_policy_loss.py"): [
        (
            "the drift from the sampler has no gradient",
            "drift = clamped_log_ratio(tokens.logprobs, torch",
            "drift = clamped_log_ratio(tokens.logprobs.detach(), torch",
        ),
        (
            "entropy bonus with the wrong sign",
            "loss = loss - entropy_coef * (weights * entropy).sum()",
            "loss = loss + entropy_coef * (weights * entropy).sum()",
        ),
    ],
    ("losses", "algorithms/test_exact_gradients.py"): [
        ("KL in the loss with the wrong sign", "loss = loss + kl_loss", "loss = loss - kl_loss")
    ],
    ("losses", "distributed/test_sequence_losses.py"): [
        (
            "sums over context parallelism left out",
            "return x if group.size() == 1 else",
            "return x if group.size() >= 1 else",
        )
    ],
    ("losses", "parallel/test_context.py"): [
        (
            "no gradient from other context-parallel ranks",
            "return _SumOverGroup.apply(grad, ctx.group), None",
            "return grad, None",
        )
    ],
    ("corrections", "algorithms/test_corrections.py"): [
        (
            "ratio to the sampler the wrong way round",
            "clamped_log_ratio(self.old_logprobs, self.rollout_logprobs)",
            "clamped_log_ratio(self.rollout_logprobs, self.old_logprobs)",
        ),
        ("importance weights without their cap", "return ratio.clamp(max=self.cap), {", "return ratio, {"),
        (
            "IcePop keeps tokens outside its band",
            "torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)",
            "torch.where(ratio >= self.low, ratio, 0.0)",
        ),
        (
            "rejection by the product where the mean is meant",
            "_inside(tokens, tokens.sequences.mean(tokens.log_ratio).exp()",
            "_inside(tokens, tokens.sequences.sum(tokens.log_ratio).exp()",
        ),
        (
            "OPSM leaves out good responses",
            "torch.where(is_far & (tokens.advantages < 0)",
            "torch.where(is_far & (tokens.advantages > 0)",
        ),
    ],
    ("corrections", "algorithms/test_importance.py"): [
        (
            "importance weights do not reach the loss",
            "token_loss = torch.where(active, correction, 0.0) * token_loss",
            "token_loss = torch.where(active, torch.ones_like(correction), 0.0) * token_loss",
        )
    ],
    ("experience", "verify/test_lockstep.py"): [
        (
            "the old policy is the reference",
            "        old_logprobs=old.logprobs,\n",
            "        old_logprobs=old.logprobs if ref.logprobs is None else ref.logprobs,\n",
        ),
        (
            "advantages and returns exchanged",
            "experience.advantages, experience.returns = estimator(",
            "experience.returns, experience.advantages = estimator(",
        ),
        (
            "rewards of the next row",
            "experience, rewards.totals, penalty, sum_over_ranks,",
            "experience, rewards.totals.roll(1), penalty, sum_over_ranks,",
        ),
        (
            "loss weights of the rank's own tokens",
            "tokens, sequences = counts[:2].tolist()",
            "tokens, sequences = token_and_sequence_counts(mask).tolist()",
        ),
        (
            "odd prompts are scored against the prompt before",
            "[(prompts[indices[row]], one) for row, one",
            "[(prompts[indices[row] - indices[row] % 2], one) for row, one",
        ),
        (
            "each random number is used for two tokens",
            "draw(logits, keys[rows], step)",
            "draw(logits, keys[rows], step // 2)",
        ),
        (
            "tokens are drawn at a temperature 10 % higher than said",
            "tokens = _invert_cdf(weights, block_sums, uniforms)",
            "tokens = _invert_cdf(weights ** (1 / 1.1), _block_sums(weights ** (1 / 1.1)), uniforms)",
        ),
        (
            "neighbouring prompts share random numbers",
            "torch.tensor([one.key for one in requests], device=self._device)",
            "torch.tensor([(one.key[0] // 2, *one.key[1:]) for one in requests], device=self._device)",
        ),
    ],
    ("experience", "algorithms/test_exact_gradients.py"): [
        (
            "KL in the reward with the wrong sign",
            "out = out - torch.where(mask, kl_penalty, 0.0)",
            "out = out + torch.where(mask, kl_penalty, 0.0)",
        ),
        (
            "KL in the reward without its coefficient",
            "return self.value * k1(logprobs, ref_logprobs)",
            "return k1(logprobs, ref_logprobs)",
        ),
    ],
    ("experience", "workers/test_models.py"): [
        (
            "the critic's loss weighed as the policy's",
            'token_weights=fields["token_weights"],\n            value_clip',
            'token_weights=fields["loss_weights"],\n            value_clip',
        )
    ],
    ("experience", "trainer/test_loss_weights.py"): [
        ("a mean over prompts by the rank's own tokens", "prompt_tokens=counts[2:],", "prompt_tokens=of_prompts,")
    ],
    ("experience", "workers/test_turnwise.py"): [
        (
            "a continued response takes its random numbers again",
            "turn | have << NUMBER_BITS)",
            "turn)",
        ),
        (
            "all tokens have the version of the last round",
            "versions = [*before.versions, *(version for _ in got.token_ids)]",
            "versions = [version] * (have + len(got.token_ids))",
        ),
        (
            "an engine in turns samples next to training",
            "        if not self.in_turns:\n            self._begin()",
            "        self._begin()",
        ),
    ],
    ("experience", "workers/test_turnwise.py -k moved"): [
        (
            "a resumed run does not know the moves before it",
            'run.rollouts.changes.of_versions.update(state.get("policy_changes", ()))',
            "pass",
        ),
        (
            "a checkpoint lacks the move of the last update",
            "list(moves.items())[-run.trainer.async_steps - 1 :]",
            "list(moves.items())[:-1]",
        ),
    ],
    ("experience", "test_preflight.py -k sources_that_generate"): [
        (
            "sources that generate by themselves run ahead",
            "problems += [] if problems else generates(config)",
            "pass",
        ),
    ],
    ("experience", "workers/test_stream.py"): [
        (
            "a step in turns that has its groups makes a round",
            "if wait or (self.in_turns and self.quantum):",
            "if wait or self.in_turns:",
        ),
        (
            "servers release memory while a round runs",
            "            self.end_round()\n",
            "",
        ),
        (
            "a group is as old as its newest token",
            "known = [min(one.versions, default=current) for one",
            "known = [max(one.versions, default=current) for one",
        ),
        (
            "a request over an update is as old as the trainer",
            "[*known, *(version for version, _ in self.out.values()), current]",
            "[*known, current]",
        ),
        (
            "a resumed run samples anew what was in flight",
            "kept, context = self._kept.pop(key, (Sample(), None))",
            "kept, context = Sample(), None",
        ),
        (
            "a checkpoint forgets the groups that wait",
            '"flow": self.state_of_flow.state(), "pool": self.pool.state()}',
            '"flow": self.state_of_flow.state()}',
        ),
        (
            "a resumed run draws the tickets in flight again",
            'self.drawn = int(numbers["prompts_drawn"])',
            'self.drawn = int(numbers["prompts_drawn"]) - len(numbers["in_flight"])',
        ),
        (
            "the youngest groups train first",
            "argsort(stable=True)][:count]",
            "argsort(stable=True, descending=True)][:count]",
        ),
        (
            "short responses push out those that would be too old",
            "if complete < min(count, alive - later * count):",
            "if complete < 0:",
        ),
        (
            "an expired group trains",
            "over = self.pool.oldest < self.versions.first()\n",
            "over = self.pool.oldest < 0\n",
        ),
        ("groups that are too old are never sampled again", "self._again.append(one.ticket)", "pass"),
        ("more steps are in flight than training needs", "max(self.depth - spare, 2)", "self.versions.limit + 1"),
        (
            "the age of a group counts publishes",
            "return [*self.begun, self.begun[-1] + 1][later]",
            "return self.begun[-1] - self.limit + later",
        ),
        (
            "a step waits too late for groups that will be too old",
            "first = versions.first(later + 1)\n",
            "first = versions.first(later)\n",
        ),
        ("a resumed run forgets with what its steps began", 'self.versions.restore(numbers.get("begun", []))', "pass"),
        (
            "generation rests after an update within a step",
            "metrics = send(self)\n        self.flow.go_on()",
            "metrics = send(self)",
        ),
        ("a resumed run forgets how many steps were in flight", 'int(numbers.get("depth", self.depth))', "2"),
    ],
    ("experience", "trainer/test_rescoring.py"): [
        (
            "older tokens are exempt from limits",
            "if mismatch.mean - DEVIATIONS * error > self.limits.mean + MOVES * moved:",
            "if False:",
        ),
        (
            "what is rescored holds older tokens, too",
            "rows.loss_mask = rows.loss_mask & (rows.token_versions == version)",
            "",
        ),
        (
            "what servers have just sampled has no limit",
            "compared, self._is_due = self.guard(sampled, self.actor.evaluate(sampled)), False",
            "compared, self._is_due = {}, False",
        ),
        (
            "the policy's move is that of the step before",
            "self.changes.of_versions[self.changes.versions.current() + 1] = total",
            "self.changes.of_versions[self.changes.versions.current()] = total",
        ),
    ],
    ("experience", "verify/test_audit.py -k kept"): [
        (
            "the audit believes the mark of a run that kept no request",
            'load(None, one.description.config).rollout.sglang.sync.in_flight == "keep"',
            "bool(one.description.config)",
        ),
        (
            "tokens of a row with a kept one are exempt",
            "~(kept_tokens(step) & keeps)",
            "~(kept_tokens(step).any() & keeps)",
        ),
        ("the audit checks tokens that no weights give", "~(kept_tokens(step) & keeps)", "~(False & keeps)"),
    ],
    ("experience", "verify/test_audit.py"): [
        (
            "the audit counts ages in publishes",
            "begun.get(step.description.step - ahead, 0)",
            "step.description.weight_version - ahead",
        ),
        (
            "the audit believes what a record says of other steps",
            "return begun | {step.description.step: step.description.weight_version for step in steps}",
            "return begun",
        ),
        ("the audit reads no versions of other steps", "if version != begun[number]:", "if False:"),
    ],
    ("experience", "trainer/test_staleness.py"): [
        (
            "the age of a token counts publishes",
            "ages = len(begun) - torch.bucketize(versions.contiguous(), begun, right=True)",
            "ages = begun[-1] - versions",
        ),
        (
            "weights from within a step are as young as those after it",
            "len(begun) - torch.bucketize(versions.contiguous(), begun, right=True)",
            "len(begun) - 1 - torch.bucketize(versions.contiguous(), begun)",
        ),
        ("tokens kept over an update have limits", "ages[kept], moved[kept] = KEPT, inf", "pass"),
        (
            "of the policy's moves one counts, not all since",
            "dtype=torch.float64).cumsum(0)[ages]",
            "dtype=torch.float64)[ages]",
        ),
        (
            "rare tokens that move far end the run",
            "if mismatch.mean - DEVIATIONS * error >",
            "if mismatch.mean >",
        ),
    ],
    ("experience", "workers/test_agent_stream.py"): [
        (
            "a part of a turn is answered as a whole one",
            "            if is_over:\n                self._answer(request, outcome)",
            '            self._answer(request, replace(outcome, finish="length"))',
        ),
        (
            "kept turns are not compared by the tokens before them",
            "if context is not None and context != _digest(request.prompt):",
            "if False:",
        ),
        ("each turn has the quantum of its trajectory", "group.room[number] -= limit - have", "pass"),
        (
            "a turn that waits for room counts as lost",
            "for other in group.open() if is_over and self.runs and self.quantum else ():",
            "for other in ():",
        ),
        (
            "a sample plays twice",
            "Trajectory(group.prompt, ticket, number, self.limit))",
            "Trajectory(group.prompt, ticket, max(number - 1, 0), self.limit))",
        ),
        (
            "a checkpoint forgets kept turns that nobody has asked for",
            "rows += [(key, *kept, False) for key, kept in self._kept.items() if key[0] in self.groups]",
            "pass",
        ),
        (
            "a round ends while a tool works",
            "group.playing.keys() <= {number_of(request.key) for request in group.open()}",
            "True",
        ),
        (
            "a round whose servers were lost begins anew",
            "self.requests.start(anew=False)",
            "self.requests.start()",
        ),
        (
            "trajectories of a blocked loop pay again for their turns",
            "if keep and key not in group.failures:",
            "if False:",
        ),
    ],
    ("experience", "trainer/test_dynamic_sampling.py"): [
        (
            "dynamic sampling delivers the rows of other prompts",
            "kept.rollout.prompt_index = numbers[kept.rollout.prompt_index]",
            "kept.rollout.prompt_index = numbers[kept.rollout.prompt_index].flip(0)",
        ),
    ],
    ("experience", "trainer/test_rows.py"): [
        (
            "prompts of other rows are not compared",
            "if own_ids != prompts[prompt].token_ids and is_foreign:",
            "if len(own_ids) != len(prompts[prompt].token_ids) and is_foreign:",
        ),
        ("evaluations check no row", "        check_rows(rows, prompts, self.ranks, samples=self.settings.n)\n", ""),
    ],
    ("experience", "rollout/sglang/test_rows.py"): [
        (
            "the answer of the request after a row's own",
            "response(request)) for request in requests),",
            "response(other)) for request, other in zip(requests, [*requests[1:], *requests[:1]])),",
        )
    ],
    ("fleet", "rollout/sglang/test_fleet.py"): [
        (
            "a server that joins gets requests before its weights",
            "        self.state = State.STALE\n        self.version = -1",
            "        self.state = State.READY\n        self.version = 1",
        ),
        (
            "a server that leaves gets new requests",
            "self._replicas.pop(index).drain()",
            "self._replicas[index].drain()",
        ),
        ("requests in flight are cut when a server leaves", "while self.in_flight:", "while False:"),
    ],
    ("fleet", "rollout/sglang/test_engine.py -k restarts_count"): [
        ("restarts count anew in each round", "holds=holds, times=self.restarts)", "holds=holds)"),
    ],
    ("fleet", "rollout/sglang/test_joined.py -k servers_that_stay"): [
        ("a step that keeps requests reports none", "self._since.add(self.router.taken())", "pass"),
        ("what is reported counts again", "result.requests = result.retries = result.tokens = 0", "pass"),
    ],
    ("fleet", "rollout/sglang/test_joined.py"): [
        (
            "a kept request's tokens all have its newest version",
            "versions = _versions(meta, len(tokens), expected)",
            "versions = _versions(meta, len(tokens), expected)[-1:] * len(tokens)",
        ),
        (
            "spans do not say which tokens were kept",
            "[one > expected.version for one in versions]",
            "[False for one in versions]",
        ),
        ("a new request reuses a prefix of older weights", '"extra_key": str(version)', '"extra_key": "all"'),
        ("requests that are kept are aborted", '"in_place" if in_place else "abort"', '"abort"'),
        ("a late server is not sent the weights of the step", "self.sync.refit(due)", "self.sync.refit(lost)"),
        ("a number is given to a second server", "back.append(len(self.endpoints))", "back.append(len(self.members))"),
        (
            "each rank decides who joins",
            "run_on_one(lambda: self._look(lost, fits), self._ranks)",
            "self._look(lost, fits)",
        ),
        ("lost servers get new weights as the old version", "self.flow.pause(holds=False)", "self.flow.pause()"),
        ("a server of another model joins", "if self._registry and (problems := fits(control)):", "if False:"),
        (
            "the good lines of a broken registry count",
            'urls = [line for line in lines if not (isinstance(line, str) and (not line or line.startswith("#")))]',
            "urls = [line for line in lines if isinstance(line, str) and is_server(line)]",
        ),
        ("a registry is followed elsewhere", 'raise ValueError(f"HTTP {response.status_code}")', "pass"),
        ("a server that left the registry stays", "if url not in self._urls:\n", "if False:\n"),
        ("the run waits for a vanished server", "(len(self._urls) if all_at_once else 1)", "len(self._urls)"),
        ("silent addresses are asked at each update", "self._slow.get(url, (0, 0))[1] <= now", "True"),
        ("silent addresses are skipped though no server is left", "now = inf  #", "pass  #"),
        ("silent addresses are asked in turns", "_MOST_THREADS = 128", "_MOST_THREADS = 1"),
    ],
    ("changes", "plan/test_cost.py -k link_takes"): [
        (
            "the plan waits for the slower of all weights and changes",
            "min(sync_seconds(setup, link).values())",
            "max(sync_seconds(setup, link).values())",
        )
    ],
    ("changes", "rollout/sglang/test_delta.py -k store"): [
        (
            "servers load though a bucket is of another version",
            "if held is None or (held.version, held.digest) != ((session, count), digest):",
            "if held is None:",
        ),
        (
            "changes are added to whatever version is there",
            'or tuple(head["base"]) != held.version:',
            "or False:",
        ),
        (
            "a digest is not compared",
            'if digest_of(held.words) != head["digest"]:',
            "if False:",
        ),
        (
            "words of no version count as those of the last one",
            """            else:
                held.digest = ""
""",
            """            else:
""",
        ),
        (
            "a message of an earlier version replaces a later one",
            "if held is not None and held.digest and version <= held.version:",
            "if held is not None and held.digest and version == held.version:",
        ),
    ],
    ("changes", "rollout/sglang/test_delta.py -k give_the_new"): [
        (
            "wide gaps are cut one word short",
            "cuts = gaps >> 8 * width\n    at = np.cumsum(cuts + 1) - 1",
            "cuts = gaps >> 8 * width\n    cuts = np.maximum(cuts - 1, 0)\n    at = np.cumsum(cuts + 1) - 1",
        ),
    ],
    ("changes", "rollout/sglang/test_delta.py -k bad_network"): [
        (
            "a changed bit reaches a server",
            'if digest_of(held.words) != head["digest"]:',
            "if False:",
        ),
    ],
    ("changes", "rollout/sglang/test_delta.py -k bit_equal"): [
        ("the sender compares with the first weights", "            sent.words[:] = words\n", ""),
        (
            "a server that lacks the base gets no weights",
            'send({**head, "base": None}, whole)',
            "return",
        ),
        (
            "changes of other stages are not asked for",
            "versions = {number: held for one, _ in of_ranks for number, held in one.items()}",
            "versions = {str(number): held for number, held in own.items()}",
        ),
    ],
}
