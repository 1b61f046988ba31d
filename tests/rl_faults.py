"""Faults of losses, corrections and experience for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import fault

LOCKSTEP = "verify/test_lockstep.py"
EXACT = "algorithms/test_exact_gradients.py"
OBJECTIVES = "algorithms/test_policy_objectives.py"
WEIGHTS = "algorithms/test_corrections.py"

LOSSES = (
    fault(
        "losses",
        "GSPO's ratio of a response is the product, not the mean",
        "sequences.spread(sequences.mean(tokens.log_ratio.detach()).exp())",
        "sequences.spread(sequences.sum(tokens.log_ratio.detach()).exp())",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "GSPO's tokens keep their own ratios",
        "ratio = of_response * (tokens.logprobs - tokens.logprobs.detach()).exp()",
        "ratio = tokens.log_ratio.exp()",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "GMPO clips losses where gains are clipped",
        "torch.where(gains, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))",
        "torch.where(gains, log_ratio.clamp(min=-self.clip_low), log_ratio.clamp(max=self.clip_high))",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "the drift from the sampler has no gradient",
        "drift = clamped_log_ratio(tokens.logprobs, torch",
        "drift = clamped_log_ratio(tokens.logprobs.detach(), torch",
        "algorithms/test_policy_loss.py",
    ),
    fault(
        "losses",
        "CISPO's weight without its cap",
        "-ratio.clamp(max=self.cap) * tokens.advantages",
        "-ratio * tokens.advantages",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "SAPO's gates exchanged",
        "torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)",
        "torch.where(tokens.advantages > 0, self.tau_negative, self.tau_positive)",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "DPPO masks tokens on their way back",
        "masked = far & (change * tokens.advantages > 0)",
        "masked = far & (change * tokens.advantages < 0)",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "Clip-Cov holds back the others",
        "torch.where(held, token_loss.detach(), token_loss)",
        "torch.where(held, token_loss, token_loss.detach())",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "KL-Cov punishes tokens of small covariance",
        "held = (covariance(tokens) >= self.threshold)",
        "held = (covariance(tokens) <= self.threshold)",
        OBJECTIVES,
    ),
    fault(
        "losses",
        "KL in the loss with the wrong sign",
        "loss = loss + kl_loss",
        "loss = loss - kl_loss",
        EXACT,
    ),
    fault(
        "losses",
        "entropy bonus with the wrong sign",
        "loss = loss - entropy_coef * (weights * entropy).sum()",
        "loss = loss + entropy_coef * (weights * entropy).sum()",
        "algorithms/test_policy_loss.py",
    ),
    fault(
        "losses",
        "sums over context parallelism left out",
        "return x if group.size() == 1 else",
        "return x if group.size() >= 1 else",
        "distributed/test_sequence_losses.py",
    ),
    fault(
        "losses",
        "no gradient from other context-parallel ranks",
        "return _SumOverGroup.apply(grad, ctx.group), None",
        "return grad, None",
        "parallel/test_context.py",
    ),
)
CORRECTIONS = (
    fault(
        "corrections",
        "ratio to the sampler the wrong way round",
        "clamped_log_ratio(self.old_logprobs, self.rollout_logprobs)",
        "clamped_log_ratio(self.rollout_logprobs, self.old_logprobs)",
        WEIGHTS,
    ),
    fault(
        "corrections",
        "importance weights without their cap",
        "return ratio.clamp(max=self.cap), {",
        "return ratio, {",
        WEIGHTS,
    ),
    fault(
        "corrections",
        "importance weights do not reach the loss",
        "token_loss = torch.where(active, correction, 0.0) * token_loss",
        "token_loss = torch.where(active, torch.ones_like(correction), 0.0) * token_loss",
        "algorithms/test_importance.py",
    ),
    fault(
        "corrections",
        "IcePop keeps tokens outside its band",
        "torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)",
        "torch.where(ratio >= self.low, ratio, 0.0)",
        WEIGHTS,
    ),
    fault(
        "corrections",
        "rejection by the product where the mean is meant",
        "_inside(tokens, tokens.sequences.mean(tokens.log_ratio).exp()",
        "_inside(tokens, tokens.sequences.sum(tokens.log_ratio).exp()",
        WEIGHTS,
    ),
    fault(
        "corrections",
        "OPSM leaves out good responses",
        "torch.where(is_far & (tokens.advantages < 0)",
        "torch.where(is_far & (tokens.advantages > 0)",
        WEIGHTS,
    ),
)
EXPERIENCE = (
    fault(
        "experience",
        "rows without an advantage leave the others more weight",
        "left.token_weights = (left.token_weights / share).float()",
        "left.loss_weights, left.token_weights = left.loss_weights / share, (left.token_weights / share).float()",
        "trainer/test_zero_advantages.py",
    ),
    fault(
        "experience",
        "rows of negative advantages are left out, too",
        "((minibatch.advantages != 0) & minibatch.loss_mask)",
        "((minibatch.advantages > 0) & minibatch.loss_mask)",
        "trainer/test_zero_advantages.py",
    ),
    fault(
        "experience",
        "the old policy is the reference",
        "        old_logprobs=old.logprobs,\n",
        "        old_logprobs=old.logprobs if ref.logprobs is None else ref.logprobs,\n",
        LOCKSTEP,
    ),
    fault(
        "experience",
        "advantages and returns exchanged",
        "experience.advantages, experience.returns = estimator(",
        "experience.returns, experience.advantages = estimator(",
        LOCKSTEP,
    ),
    fault(
        "experience",
        "rewards of the next row",
        "AdvantageInputs(experience, rewards.totals, penalty,",
        "AdvantageInputs(experience, rewards.totals.roll(1), penalty,",
        LOCKSTEP,
    ),
    fault(
        "experience",
        "KL in the reward with the wrong sign",
        "out = out - torch.where(mask, kl_penalty, 0.0)",
        "out = out + torch.where(mask, kl_penalty, 0.0)",
        EXACT,
    ),
    fault(
        "experience",
        "KL in the reward without its coefficient",
        "return self.controller.value * self.estimator(logprobs, ref_logprobs)",
        "return self.estimator(logprobs, ref_logprobs)",
        EXACT,
    ),
    fault(
        "experience",
        "the critic's loss weighed as the policy's",
        'token_weights=fields["token_weights"],\n            value_clip',
        'token_weights=fields["loss_weights"],\n            value_clip',
        "workers/test_models.py",
    ),
    fault(
        "experience",
        "loss weights of the rank's own tokens",
        "tokens, sequences = counts[:2].tolist()",
        "tokens, sequences = token_and_sequence_counts(mask).tolist()",
        LOCKSTEP,
    ),
    fault(
        "experience",
        "a mean over prompts by the rank's own tokens",
        "prompt_tokens=counts[2:],",
        "prompt_tokens=of_prompts,",
        "trainer/test_loss_weights.py",
    ),
    fault(
        "experience",
        "one step ahead samples the prompts of the step before",
        "self._start(self.prompts(step + 1), step + 1)",
        "self._start(self.prompts(step), step + 1)",
        "workers/test_ahead.py",
    ),
    fault(
        "experience",
        "dynamic sampling delivers the rows of other prompts",
        "rows.prompt_index = torch.searchsorted(chosen, rows.prompt_index)",
        "rows.prompt_index = torch.searchsorted(chosen, rows.prompt_index).flip(0)",
        "trainer/test_rows.py",
    ),
    fault(
        "experience",
        "the answer of the request after a row's own",
        "samples.get(request.key, Sample()) for request in requests]",
        "samples.get(request.key, Sample()) for request in [*requests[1:], *requests[:1]]]",
        "rollout/sglang/test_rows.py",
    ),
    fault(
        "experience",
        "odd prompts are scored against the prompt before",
        "[(prompts[indices[row]], one) for row, one",
        "[(prompts[indices[row] - indices[row] % 2], one) for row, one",
        LOCKSTEP,
    ),
    fault(
        "experience",
        "each random number is used for two tokens",
        "uniform_at(self._keys[rows], step)",
        "uniform_at(self._keys[rows], step // 2)",
        LOCKSTEP,
    ),
    fault(
        "experience",
        "prompts of other rows are not compared",
        "for row in (differ | (",
        "for row in (differ & (",
        "trainer/test_rows.py",
    ),
    fault(
        "experience",
        "evaluations check no row",
        "        check_rows(rows, prompts, self.ranks, samples=self.plan.n)\n",
        "",
        "trainer/test_rows.py",
    ),
)
