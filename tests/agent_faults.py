"""Faults of turns, trajectories and environments (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

AGENTS: Table = {
    ("agents", "agents/test_templates.py"): [
        ("the line end after a stop token is lost", "return ids[1:]", "return ids[2:]"),
        (
            "special tokens in a tool's answer become ids",
            'return change(value) if is_data and key in ("content", "text", "name", "tool_call_id") else value',
            "return value",
        ),
        (
            "template and tool spell a special token together",
            "return text if self.special.findall(text) == self.special.findall(other) else other",
            "return text",
        ),
        (
            "text between turns that changes during a conversation passes",
            "if other[renderer.closing(other, form)[1] :] != after[place:]:",
            "if other[renderer.closing(other, form)[1] :] == 0:",
        ),
        ("a new branch keeps thoughts that the template drops", "rest = turn[ends[-1] :]", "rest = turn"),
        ("a turn goes on after another stop token", "if last != rule.stop:", "if last < 0:"),
    ],
    ("agents", "agents/test_trajectory.py"): [
        (
            "tokens that a tool wrote train",
            "[isinstance(part, Turn) and place >= branch.shared for",
            "[place >= branch.shared for",
        ),
        (
            "a shared turn trains in each branch",
            "fork.parts, fork.shared = branch.parts[:parts], parts",
            "fork.parts = branch.parts[:parts]",
        ),
        (
            "an input has its neighbour's experts",
            "routing[number, end - 1 - len(part.routing) : end - 1]",
            "routing[number, end - len(part.routing) : end]",
        ),
        (
            "a turn's inputs have the experts of the last turn that read them",
            "turn.routing = turn.routing[known:].clone()",
            "turn.routing = turn.routing.clone()",
        ),
        ("a trajectory without room counts as done", 'self.end = "length"\n            raise', "raise"),
        (
            "a group counts rows",
            "counted = answered if branch is None else answered & (branch == 0)",
            "counted = answered",
        ),
        (
            "a mean over sequences counts rows",
            "first = per_row > 0 if branch is None else (per_row > 0) & (branch == 0)",
            "first = mask.any(dim=1)",
        ),
        (
            "a row's weight knows only its own tokens",
            "row_tokens = over_trajectory(mask.sum(dim=1), branch)",
            "row_tokens = over_trajectory(mask.sum(dim=1), None)",
        ),
        (
            "the ratio of a sequence is over one row",
            "moved.rows = row_numbers(moved.loss_mask, moved.branch)",
            "moved.rows = row_numbers(moved.loss_mask)",
        ),
        (
            "votes read one row of several",
            "row if rollout.branch is None else row - int(rollout.branch[row])",
            "row if rollout.branch is None else row - 0 * int(rollout.branch[row])",
        ),
    ],
    ("credit", "agents/test_credit.py"): [
        ("scores of turns are no reward", "(self.score, *(turn.score for turn in self.turns))", "(self.score,)"),
        (
            "a turn's score stands at its first token",
            "of_turns[number, end - 1] = float(part.score or 0.0)",
            "of_turns[number, begin] = float(part.score or 0.0)",
        ),
        (
            "scores of turns count again at the end",
            "self.token_rewards(self.rewards - of_turns)",
            "self.token_rewards(self.rewards)",
        ),
        (
            "discounts count tokens within a turn",
            "ends = turn_ends(mask).gather(1, order)",
            "ends = torch.ones_like(order, dtype=torch.bool)",
        ),
        (
            "values at tokens that were read enter",
            "torch.where(active, x.float().gather(1, order), 0.0) for x in (rewards, values)",
            "x.float().gather(1, order) for x in (rewards, values)",
        ),
        (
            "values behind a fork add up",
            "share = 1 / successors.clamp(min=1)",
            "share = 1 / successors.clamp(min=1, max=1)",
        ),
        (
            "a reward counts where a row ends and in the row that continues it",
            "torch.where(self.forks.continued(self.mask), 0.0, scores)",
            "scores",
        ),
        (
            "a shared turn hears nothing of its later branches",
            "torch.where(own[self.rows], into * sums[self.rows, 0], 0.0)",
            "torch.where(own[self.rows], 0 * into, 0.0)",
        ),
        (
            "a fork right after a turn is a step of turns",
            "torch.where(forks.touches, 1.0, one)",
            "one",
        ),
        ("the last turn of each row trains", "return own & (places == last[number])[:, None]", "return own"),
        (
            "a group lacks trajectories whose first row does not train",
            "answered = over_trajectory(mask.sum(dim=1), branch) > 0",
            "answered = mask.any(dim=1)",
        ),
    ],
    ("agents", "agents/test_trajectory.py -k names_its_turn"): [
        (
            "a turn that another row trains is written as read",
            "for number, turn in enumerate(trajectory.turns, 1)}",
            "for number, turn in enumerate(trajectory.turns, 1) if len(trajectory.branches) == 1}",
        ),
    ],
    ("agents", "trainer/assemble/test_own_sources.py"): [
        (
            "a replay forgets which rows are of one trajectory",
            '*("routing", "token_versions", "kept", "failed", "branch", "turn", "turn_scores"),',
            '*("routing", "token_versions", "kept", "failed", "turn", "turn_scores"),',
        ),
        (
            "a replay forgets the scores of turns",
            '*("routing", "token_versions", "kept", "failed", "branch", "turn", "turn_scores"),',
            '*("routing", "token_versions", "kept", "failed", "branch", "turn"),',
        ),
    ],
    ("agents", "tracking/report/test_page.py -k folded"): [
        (
            "a report shows the words of tools as the policy's",
            'turns = record.tensors.get("turn", record.tensors["loss_mask"])',
            'turns = record.tensors["loss_mask"]',
        ),
    ],
    ("agents", "cli/test_eval.py -k environment"): [
        (
            "an evaluation leaves the environment out",
            "make, make_rows = ROLLOUT.maker(config), DATA.maker(config) if trains else None",
            "make, make_rows = (ROLLOUT.maker(config), DATA.maker(config)) if trains else (None, None)",
        ),
    ],
    ("agents", "agents/test_environment.py"): [
        (
            "a stalled environment stalls all",
            "end, gathers = end if gathers else time.monotonic() + gather_s, True",
            "end, gathers = end if gathers else time.monotonic() + 9, True",
        ),
        (
            "a trajectory pays for the time of the policy",
            "- self._waited - (now - self._since if self._waiting else 0.0)",
            "- 0.0 * self._waited",
        ),
        ("a trajectory that was cancelled has ended well", "elif failure is None and run.cancelled():", "elif False:"),
        (
            "tasks outlive their generation",
            "self.loop.run_until_complete(asyncio.wait(left, timeout=GRACE_S))",
            "pass",
        ),
        (
            "more turns than the limit",
            "len(trajectory.turns) >= self.max_turns",
            "len(trajectory.turns) > self.max_turns",
        ),
    ],
    ("agents", "workers/test_own_rollouts.py"): [
        (
            "turns of one sample share random numbers",
            "branch.number << 16 | number)",
            "branch.number << 16)",
        ),
        (
            "trajectories of lost servers are given up",
            "engine.settle(lambda: len(lost()), lambda: play(lost()))",
            "engine.settle(lambda: 0, lambda: play([]))",
        ),
        (
            "a trajectory without a score counts 0",
            'fault = "" if failed else score_fault(',
            'fault = "" if True else score_fault(',
        ),
        ("a score that is not finite trains", "> torch.finfo(torch.float32).max", "> 1e300"),
        ("the experts of turns are lost before the rows", "own += shapes[0] if shapes else (0, 0)", "own += (0, 0)"),
    ],
    ("agents", "rewards/test_early_scores.py"): [
        (
            "the score of a row of other data is taken",
            "for row in came if known.get(keys[row]) == texts[row]}",
            "for row in came if keys[row] in known}",
        ),
        (
            "an early score stands for another sample",
            "rollout.sample_index.tolist(), strict=True))\n\n\nclass EarlyScores",
            "[0] * len(rollout.lengths), strict=True))\n\n\nclass EarlyScores",
        ),
        (
            "a response is scored early and at the end",
            "for row, is_taken in zip(rows, taken[rank::size], strict=True) if not is_taken}",
            "for row in rows}",
        ),
        (
            "only the rank that began a response has its score",
            "        if any(taken):\n            parts = self.replica",
            "        if any(taken) and self.replica.size < 2:\n            parts = self.replica",
        ),
        (
            "responses that wait are scored by the thread, too",
            "            for key in own.keys() & self._waiting.keys():\n",
            "            for key in ():\n",
        ),
        (
            "an error of the thread is lost",
            "                    raise self._thread.error\n",
            "                    break\n",
        ),
        (
            "groups ahead are scored when they are complete",
            "        played = self.ended(played)\n",
            "",
        ),
        (
            "a group waits for all that is scored",
            "while not self._outcomes.keys() >= set(keys):",
            "while not self._outcomes.keys() >= self._asked.keys():",
        ),
        (
            "scores of a generation that raised are kept",
            "                failed.callback(self.scores.forget)",
            "                failed.callback(len, ())",
        ),
        (
            "failed trajectories are scored",
            'if self.scores is not None and played.trajectory.ended() != "error":',
            "if self.scores is not None:",
        ),
        (
            "trajectories are scored when all have ended",
            "            self.outcomes[place] = self.ended(self._outcome(policy, run, late=late))",
            "            self.outcomes[place] = self._outcome(policy, run, late=late)",
        ),
        (
            "functions in this process lose the main thread",
            "one.per_call == 1 and (self.pool is not None or one.is_async)",
            "one.per_call == 1",
        ),
        (
            "two threads ask a source at a time",
            "self._thread = self._thread or Running(",
            "self._thread = Running(",
        ),
        (
            "a pool that closes starts workers again",
            "        self._stop.set()\n        for worker",
            "        for worker",
        ),
    ],
    ("agents", "rollout/test_continuous.py"): [
        ("a cancelled turn decodes to its end", "batch.drop_cancelled()", "batch.rows"),
        ("a turn that its trajectory leaves behind decodes on", "if own == key:", "if own == ():"),
        (
            "the cache of another branch is read",
            "for place, (a, b) in pairs if a != b)",
            "for place, (a, b) in pairs if a < 0)",
        ),
        (
            "caches outlive an update of the weights",
            "kept = KeptCaches(self._batch_size)",
            'kept = vars(self).setdefault("kept", KeptCaches(64))',
        ),
        (
            "holes between old and new tokens are read",
            "torch.cat([held, mask], dim=1)",
            "torch.cat([held * 0 + 1, mask], dim=1)",
        ),
        ("a turn reads its trajectory again", "self._of_branch[_branch(request)] = kept", "self._of_branch.clear()"),
        (
            "a waiting tool holds up a batch",
            "gather_s = GATHER_S if not batch.size else _SOON_S if have_left else 0.0",
            "gather_s = 99.0",
        ),
        ("caches of ended trajectories stay", "if branch[:2] in ended]:", "if branch[:2] in ()]:"),
    ],
    ("agents", "rollout/sglang/test_engine.py"): [
        (
            "a turn that nobody waits for holds up the end",
            "for task in (*generation.jobs.values(), *generation.helpers.values()):",
            "for task in generation.helpers.values():",
        ),
        ("a server decodes a cancelled turn on", "job.asked.client.abort, job.rid,", 'job.asked.client.abort, "none",'),
        ("turns do not ask for their experts", "return_routing=routed is not None", "return_routing=False"),
        ("a server's room is not free after a turn", "given.in_flight -= 1", "given.in_flight -= 0"),
    ],
    ("agents", "test_preflight.py -k sources_that_generate"): [
        ("recorded rows pass for rows with experts", "if rollout.sglang.return_routing:", "if False:"),
    ],
    ("agents", "agents/test_chat.py"): [
        (
            "a turn goes on behind another stop token",
            "return turn.stopped and (self._reopens or turn.token_ids[-1] == self._rule.stop)",
            "return turn.stopped",
        ),
        (
            "a new branch lacks the last answers",
            "if self._reopens:\n            trajectory.open(self._turns.opening(history))",
            "if self._reopens:\n            trajectory.open(self._turns.opening(history[: -len(answers)]))",
        ),
        (
            "a policy plays without having seen its tools",
            "if self._turns.opening(messages) != prompt.token_ids:",
            "if not self._turns.opening(messages):",
        ),
    ],
    ("agents", "agents/test_gateway.py"): [
        ("an answer that comes back is tokenised", "self._ids(keys[: place + 1]) or one", "one"),
        ("a key outlives its trajectory", "self.sessions.pop(key), not self.sessions", "self.sessions[key], False"),
        ("two calls go on from one place in one row", "if len(branch.parts) > parts:", "if len(branch.parts) < parts:"),
        ("another history is not counted", "self.trajectory.drifted += last > 0", "pass"),
        ("an error of the run passes for the program's", "session.error = session.error or error", "pass"),
        ("a program blocks on its output", "os.read(pipe, 1 << 20)", "b''"),
    ],
    ("agents", "agents/test_gateway_training.py"): [
        (
            "the sampled ids of a program's answer are lost",
            "self._ids(keys[: place + 1]) or one",
            "one",
        ),
    ],
    ("agents", "agents/test_tools.py"): [
        ("calls in thoughts are made", 'text.rpartition("</think>")[2]', "text"),
        ("a late tool holds its answer", "call), self._timeout_s)", "call), 60 + self._timeout_s)"),
        ("arguments of another type reach a tool", "if kinds and not _is_of(value, kinds):", "if kinds and not kinds:"),
        (
            "thoughts that name a tool call it",
            'recipient = re.search(r"\\bto=([^\\s<]+)", header)',
            'recipient = re.search(r"\\bto=([^\\s<]+)", header + body)',
        ),
        ("true is a whole number", 'return "boolean" in kinds', "return True"),
    ],
    ("agents", "agents/test_sglang_calls.py"): [
        (
            "only the first of llama3's calls is made",
            "own, calls = (calls[:end], rest[1:].strip())",
            'own, calls = (calls[:end], "")',
        ),
        (
            "half a pair of GLM costs its argument",
            'is no pair of key and value" if left else "")',
            'is no pair" if not rest else "")',
        ),
        (
            "a key that is misspelt costs the arguments",
            'if unknown := given.keys() - {"name",',
            'if unknown := given.keys() & {"",',
        ),
    ],
    ("agents", "agents/test_tool_servers.py"): [
        (
            "a server of tools that died stays dead",
            "if self._session is opened:  # no other",
            "if not opened:  # no other",
        ),
        ("a dead server is an answer", "if isinstance(error, RunError):  # the", "if isinstance(error, str):  # the"),
        ("what a server calls an error is an answer", 'return f"error: {text}" if given', "return text if given"),
    ],
    ("agents", "workers/test_worlds_ahead.py -k http"): [
        (
            "trajectories ahead are left at the end of the run",
            "for task in self._tasks:",
            "for task in ():",
        ),
    ],
    ("agents", "agents/test_remote.py"): [
        (
            "an endless answer is read to its end",
            "if len(content) > limit:\n            break",
            "if len(content) < 0:\n            break",
        ),
        (
            "a server's failure is an answer",
            'if status != 200:\n        raise RunError(f"{url} answers {status}',
            'if status == 0:\n        raise RunError(f"{url} answers {status}',
        ),
        ("a session stays open", 'await world.ask("close", {})', "pass"),
        (
            "an idle connection is used again",
            "_LIMITS = httpx.Limits(max_keepalive_connections=0)",
            "_LIMITS = httpx.Limits()",
        ),
        ("only the last reward counts", "(trajectory.score or 0.0) + step.reward", "step.reward"),
    ],
    ("agents", "agents/test_nemo_gym.py"): [
        (
            "calls of a turn overtake each other",
            "        async with lock:\n            _, answer",
            "        if lock:\n            _, answer",
        ),
        (
            "a limit costs the verification",
            "except LimitReached as error:\n                reached = error",
            "except ZeroDivisionError as error:\n                reached = error",
        ),
        ("an invalid reward trains", 'if verified.get("mask_sample") or not', "if not"),
        ("a session is never seeded", 'f"{self.url}/seed_session"', 'f"{self.url}/verify"'),
    ],
    ("agents", "agents/test_verifiers_training.py"): [
        ("an empty answer fails its sample", 'error["error"] != "EmptyModelResponseError"', 'error["error"]'),
    ],
    ("agents", "agents/test_verifiers.py"): [
        ("an environment's failure passes", 'error = output.get("error")', 'error = output.get("no error")'),
        (
            "a score that nobody reads is set",
            "if self.context.reads_scores:\n            _playing",
            "if self.context:\n            _playing",
        ),
    ],
}
