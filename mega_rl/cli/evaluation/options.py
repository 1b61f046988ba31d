"""Options of `mega-rl eval`, each short for a setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from mega_rl.errors import UserError


@dataclass(frozen=True)
class EvaluationOptions:
    """Model, prompts and sampling of an evaluation; every field is an option."""

    model: Annotated[str | None, typer.Option("--model", metavar="HF_DIR", help="Checkpoint: model.path.")] = None
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]FILE", help="Prompts, JSONL or Parquet; more than once for more sets."),
    ] = None
    n: Annotated[int | None, typer.Option("--n", min=1, help="Samples of each prompt: validation.n.")] = None
    k: Annotated[str | None, typer.Option("--k", metavar="K,...", help="Of pass@k and maj@k: validation.k.")] = None
    reward: Annotated[str | None, typer.Option("--reward", help="Function that scores: reward.function.")] = None
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="validation.temperature; 0 is greedy.")
    ] = None
    top_p: Annotated[float | None, typer.Option("--top-p", help="validation.top_p.")] = None
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Longest response: validation.max_new_tokens.")
    ] = None

    def settings(self) -> Iterator[str]:
        """Yield what is given as `key=value`. Raises UserError for a set without a file."""
        given: dict[str, object] = {
            "model.path": self.model,
            "validation.n": self.n,
            "validation.k": None if self.k is None else f"[{self.k}]",
            "reward.function": self.reward,
            "validation.temperature": self.temperature,
            "validation.top_p": self.top_p,
            "validation.max_new_tokens": self.max_new_tokens,
        }
        yield from (f"{key}={value}" for key, value in given.items() if value is not None)
        unnamed = []
        for text in self.data or []:
            name, equals, file = text.partition("=")
            if not equals or not re.fullmatch(r"\w+", name):
                unnamed.append("'" + text.replace("'", "''") + "'")
            elif not file:
                raise UserError(f"--data={text}: names no file; write NAME=FILE")
            else:
                yield f"validation.sets.{name}={file}"
        if unnamed:
            yield f"data.val_files=[{', '.join(unnamed)}]"
