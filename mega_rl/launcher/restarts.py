"""Decision whether a run that has failed is started again."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.launcher.outcome import RunFailure

# By default. Long runs mostly end by hardware, drivers and networks, and starting again from the newest checkpoint is
# what their owner would do by hand, hours later. A fault of the program comes back at the same step and is not tried a
# third time, so that three restarts cost a broken run one.
DEFAULT_RESTARTS = 3


@dataclass
class RestartPolicy:
    """Decisions of one launch. max_restarts: as the user allows."""

    max_restarts: int
    restarts: int = 0
    _last_step: int | None = None  # steps done at the fault before

    @property
    def left(self) -> int:
        """Return the number of further restarts that the user allows."""
        return self.max_restarts - self.restarts

    def refusal(self, failure: RunFailure, *, step: int, progressed: bool) -> str | None:
        """Return why the run is not started again, in words that follow its cause, or None: it is, and that counts.

        step: steps done when it failed, as far as known. progressed: this launch has done some.
        """
        if not failure.may_go_on or not self.max_restarts:
            return ""
        if failure.said and not progressed:
            return ""  # a program that says why it cannot begin would say so again
        if self._last_step == step:
            return f"again after step {step}, where it failed before the restart: given up"
        if not self.left:
            return f"after step {step}: --max-restarts={self.max_restarts} are used up"
        self._last_step = step
        self.restarts += 1
        return None

    def forgive(self) -> None:
        """Forget where the last fault was: other nodes take part now."""
        self._last_step = None
