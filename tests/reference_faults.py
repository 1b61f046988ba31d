"""Faults of a reference that follows the policy, and of distillation (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

REFERENCE: Table = {
    ("reference", "engines/test_weight_average.py"): [
        (
            "an average of bf16 weights in bf16",
            "return self.rate < 1.0 and piece.data.is_floating_point() and piece.data.dtype != torch.float32",
            "return False",
        ),
        ("rate and its complement exchanged", "alpha=rate)", "alpha=1 - rate)"),
        ("the host keeps the weights of before", "        self.model.resume_from(state.numbers)\n", ""),
        (
            "copies of weights count in the distance",
            "_mix(own, theirs, self.rate) * piece.owned",
            "_mix(own, theirs, self.rate)",
        ),
    ],
    ("reference", "checkpoint/test_resume.py"): [
        ("checkpoints without the reference", 'checkpoints.run.engines["reference"] = roles.average', "pass")
    ],
    ("reference", "trainer/test_loop.py"): [
        (
            "the reference takes in the weights before the step",
            "if done % interval == 0:",
            "if (done - 1) % interval == 0:",
        )
    ],
    ("reference", "algorithms/test_distillation.py"): [
        ("the student runs from its teacher", "teacher.float() - student.float()", "student.float() - teacher.float()"),
        (
            "a token never answers for later ones",
            "inputs.returns(gaps, gamma=self.gamma)",
            "inputs.returns(gaps, gamma=0.0)",
        ),
    ],
    ("reference", "config/test_choices.py"): [
        (
            "a teacher's run takes the rollout engine's log-probs for the student's",
            '(ADVANTAGE.needs(config, "needs_reference") and reads_reference(config))',
            "False",
        )
    ],
}
