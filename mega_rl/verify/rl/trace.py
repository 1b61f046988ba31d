"""Files of a recorded run: each step's batch, and the real trainer's figures per update."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.verify.rl.independent.records import Figures, SampledRow, ScoredSample, StepBatch

SHIFT = 0.3  # nats
GREEDY, DRAWN = "greedy", "drawn"  # kinds of samples; after the latter its number in the step, from 0
PART = "part/"  # before the name of a part of the rewards
ROWS = (
    *("tokens", "loss_mask", "prompt_lengths", "lengths", "prompt_index", "sample_index", "rollout_logprobs"),
    *("turn", "turn_scores", "rewards", "token_versions"),  # not of every run
)


def write_rows(folder: Path, step: int, rows: dict[str, Tensor], *, kind: str = "") -> None:
    """Write the samples that a step trains on, or those of a kind: `GREEDY`, `DRAWN`.

    rows: the tensors of `ROWS`, in any order of samples, and perhaps, after `PART`, parts of the rewards.
    """
    torch.save(rows, _rows_path(folder, step, kind))


def shift(tokens: Tensor, sample_index: Tensor) -> Tensor:
    """Compute the recorder's shift of log-probs, nats [B, S]; sample_index: [B]."""
    return SHIFT * torch.sin(3.0 * torch.arange(tokens.size(1)) + tokens + sample_index[:, None])


def write_update(folder: Path, figures: Figures, prompts: list[int]) -> None:
    """Write an update of the real trainer and its prompts."""
    torch.save((vars(figures), prompts), _update_path(folder, figures.role, figures.step, figures.update))


def read_batch(folder: Path, step: int) -> StepBatch:
    """Return a step's samples, by prompt and sample number, mini-batches, generations and greedy samples."""
    updates: dict[str, list[list[int]]] = {}
    for figures, prompts in read_updates(folder):
        if figures.step == step:
            updates.setdefault(figures.role, []).append(prompts)
    paths = (_rows_path(folder, step, f"{DRAWN}{number}") for number in itertools.count())
    greedy = _rows_path(folder, step, GREEDY)
    return StepBatch(
        _samples(_rows_path(folder, step)),
        max(updates.values(), key=len, default=[]),
        generations=[_samples(path) for path in itertools.takewhile(Path.exists, paths)],
        greedy=_samples(greedy) if greedy.exists() else (),
    )


def _samples(path: Path) -> list[ScoredSample]:
    """Return the samples of a file, by prompt and sample number."""
    rows: dict[str, Tensor] = torch.load(path)
    parts = {name.removeprefix(PART): rows[name].tolist() for name in rows if name.startswith(PART)}
    samples, keys = [], (rows["prompt_index"], rows["sample_index"])
    order = by_sample(*keys).tolist()
    for (prompt, _), places in itertools.groupby(order, key=lambda i: (int(keys[0][i]), int(keys[1][i]))):
        own = list(places)
        samples.append(
            ScoredSample(
                rows=[_row(rows, i, own) for i in own],
                prompt=prompt,
                reward=float(rows["rewards"][own[0]]) if "rewards" in rows else math.nan,
                rollout_logprobs=_of_tokens(rows, "rollout_logprobs", own),
                turn_scores=_of_tokens(rows, "turn_scores", own) if "turn_scores" in rows else (),
                versions=_of_tokens(rows, "token_versions", own) if "token_versions" in rows else (),
                parts={name: column[own[0]] for name, column in parts.items()},
            )
        )
    return samples


def _of_tokens(rows: dict[str, Tensor], name: str, own: list[int]) -> list[float]:
    return [number for i in own for number in rows[name][i][rows["loss_mask"][i]].tolist()]


def _row(rows: dict[str, Tensor], i: int, own: list[int]) -> SampledRow:
    """Return a row of a sample; own: the sample's rows."""
    tokens, places = rows["tokens"][i, : int(rows["lengths"][i])], rows["loss_mask"][i].nonzero().flatten().tolist()
    row = SampledRow(tokens.tolist(), int(rows["prompt_lengths"][i]), places)
    read = rows["turn"][i, : places[0]].nonzero().flatten().tolist() if places and "turn" in rows else []
    for number, other in enumerate(own if read else ()):
        trained = rows["turn"][other][rows["loss_mask"][other]] == rows["turn"][i, read[-1]]
        if trained.any():
            return replace(row, after=(number, int(trained.nonzero()[-1]), read[-1]))
    return row


def read_figures(folder: Path, role: str, step: int, update: int) -> Figures | None:
    """Return the figures of an update of a step, None where the real trainer made none."""
    path = _update_path(folder, role, step, update)
    return _read_update(path)[0] if path.exists() else None


def by_sample(prompt_index: Tensor, sample_index: Tensor) -> Tensor:
    """Return the order of rows by prompt and sample number; both [B] int64."""
    return torch.argsort(prompt_index * (int(sample_index.max()) + 1) + sample_index, stable=True)


def _rows_path(folder: Path, step: int, kind: str = "") -> Path:
    """Return the file of a step's samples of a kind."""
    return folder / f"step{step}{kind and '_'}{kind}.pt"


def _update_path(folder: Path, role: str, step: int, update: int) -> Path:
    return folder / f"update_{role}_{step:06d}_{update:04d}.pt"


def read_updates(folder: Path) -> list[tuple[Figures, list[int]]]:
    """Return the figures and prompts of all updates, in the order of those of each role."""
    return [_read_update(path) for path in sorted(folder.glob("update_*.pt"))]


def _read_update(path: Path) -> tuple[Figures, list[int]]:
    figures, prompts = torch.load(path, mmap=True)
    return Figures(**figures), prompts
