"""The card of a model: what this installation proves of it on a small twin.

Imports Megatron-Core: the accelerator must be prepared before.
"""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config, release_problems
from mega_rl.converters.hf.untabled import FOREIGN
from mega_rl.converters.live.load import model_config
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.sharding import Sharding, check_layout
from mega_rl.engines.fsdp_proof import find_way
from mega_rl.environment import installed_version
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.cost import HARDWARE
from mega_rl.plan.memory import in_gb
from mega_rl.plan.preflight.checkpoints import untrained
from mega_rl.plan.search import search
from mega_rl.plan.setup import Machine, read_setup
from mega_rl.plan.state import weight_bytes
from mega_rl.rollout.decoding import prove_decoding
from mega_rl.verify.launcher import RanksFailed
from mega_rl.verify.layouts import FP32, REFERENCE, TRANSFORMERS, Layout, Plan, fsdp
from mega_rl.verify.run import Verdict, prepare_model, problems, resolve_on_twin, verify

LAYOUTS = "tp2+sp,pp2,cp2,ep2"
PROVED, NOT_PROVED, NOT_RUN = "proved", "not proved", "not run"
VERSIONS = ("mega_rl", "torch", "transformers", "megatron-core")
GPU, MOST_GPUS = "h100", 4096
# The servers have hosts of their own.
SERVERS = ("rollout.backend=sglang", "rollout.sglang.urls=[http://server:1]", "rollout.sglang.keys_file=keys")
LEAST_STATE = 6  # bytes of a parameter that no layout goes below: its weight and gradient
# Proof -> errors of a layout that it judges.
KINDS: Mapping[str, Sequence[str]] = {
    **{"bits": ("bits",), "logits": ("logprob", "loss"), "gradients": ("grad_norm", "gradient", "weight")},
    "layouts": tuple(FP32),
}


class Proof(NamedTuple):
    """A row of a card."""

    name: str
    verdict: str  # PROVED, NOT_PROVED or NOT_RUN
    figure: str  # in short
    text: str


def make_card(source: Path, names: str | None, *, timeout_s: float) -> dict[str, Any]:
    """Return the card of the model that `source`/config.json describes, in JSON's types.

    names: layouts of Megatron-Core; None: those of `LAYOUTS` that the model can have. timeout_s: of each proof, and of
    each launch of ranks. Raises UserError for a model that does not train, and for layouts that it cannot have.
    """
    hf = read_hf_config(source, any_model=True)
    if refused := list(untrained(hf)):
        raise UserErrors([f"{source}: {problem}" for problem in refused])
    missing = f"model_type={hf.family} has no table" if hf.own else "; ".join(release_problems(hf.family))
    if missing and names is not None:
        raise UserError(f"--layouts={names}: {missing}; leave the option out")
    layouts, layers, impossible = ([], 1, {}) if missing else choose_layouts(hf, source, names)
    measured = [*([] if missing else [REFERENCE]), fsdp(1), *layouts, fsdp(2)]
    with TemporaryDirectory(prefix="card_") as folder:
        model, described = prepare_model(source, Path(folder), twin=True, multiple=layers, seed=0)
        plan = Plan(str(model), folder, (), reference=TRANSFORMERS)
        try:
            verdicts = verify(plan, measured, tolerances=FP32, timeout_s=timeout_s, on_gpus=False)
            renamed = json.loads(plan.reference_facts.read_text(encoding="utf-8"))["renamed"]
            wrong = f"transformers loads {', '.join(renamed[:3])} otherwise" if renamed else ""
        except (UserError, RanksFailed) as error:
            verdicts, wrong = [(layout, None, ["no reference"]) for layout in measured], str(error)
    loaded = "transformers loads every tensor of the file by its name, bit for bit"
    proofs = [Proof("names", NOT_PROVED, "no", wrong) if wrong else Proof("names", PROVED, "yes", loaded)]
    for name, kinds in KINDS.items():
        single = [verdict for verdict in verdicts if (verdict[0].ranks > 1) == (name == "layouts")]
        proofs.append(judge(name, verdicts if name == "bits" else single, kinds))
    proofs += [Proof("layouts", NOT_RUN, name, reason) for name, reason in impossible.items()]
    for name, (prove, lacking) in {
        "elements": (partial(prove_elements, hf, layouts), missing),
        "packing": (partial(prove_packing, source), ""),
        "sampling": (partial(prove_sampling, source), ""),
        "plan": (partial(prove_plan, hf, source), missing),
    }.items():
        proofs.append(Proof(name, NOT_RUN, "no", lacking) if lacking else within(timeout_s, name, prove))
    card = describe(hf.family, described, proofs)
    columns = ("name", "ranks", "problems", "errors")
    rows = [(layout.title, layout.ranks, faults, errors and asdict(errors)) for layout, errors, faults in verdicts]
    return card | {"layouts": [dict(zip(columns, row, strict=True)) for row in rows]}


def describe(family: str, model: str, proofs: Sequence[Proof]) -> dict[str, Any]:
    """Return a card in JSON's types, without the layouts."""
    installed = {"python": platform.python_version()}
    installed |= {name: installed_version(name) or "none" for name in VERSIONS}
    good = all(one.verdict != NOT_PROVED for one in proofs)
    facts = {"family": family, "model": model, "good": good, "versions": installed}
    return facts | {"proofs": [one._asdict() for one in proofs]}


def choose_layouts(hf: HFConfig, source: Path, names: str | None) -> tuple[list[Layout], int, Mapping[str, str]]:
    """Return (layouts, number that divides the twin's layers, why others of `LAYOUTS` are not possible)."""
    resolve, impossible = partial(resolve_on_twin, hf=hf, where=str(source / "config.json")), {}
    if names is None:
        possible = []
        for name in LAYOUTS.split(","):
            try:
                resolve(name)
                possible.append(name)
            except UserError as error:
                impossible[name] = " ".join(str(error).split()).removeprefix("--layouts: ")
        names = ",".join(possible)
    return (*(resolve(names) if names else ([], 1)), impossible)


def judge(name: str, verdicts: Sequence[Verdict], kinds: Sequence[str]) -> Proof:
    """Return whether layouts have transformers' numbers, by the named errors of `FP32`."""
    allowed = {kind: FP32[kind] for kind in kinds}
    faults, figures = [], {}
    for layout, errors, failed in verdicts:
        lines = failed if errors is None else problems(errors, allowed)
        faults += [f"{layout.title}: {line}" for line in lines]
        if errors is not None:
            worst = (errors.logprob_error, *errors.gradients.values())
            figures[layout.title] = max(worst[:1] if name == "logits" else worst[1:])
    if faults or not figures:
        return Proof(name, NOT_PROVED, "no", "; ".join(faults))
    text = ", ".join(title if name == "bits" else f"{title} {error:.0e}" for title, error in figures.items())
    return Proof(name, PROVED, "yes" if name == "bits" else f"{max(figures.values()):.0e}", text)


def within(timeout_s: float, name: str, prove: Callable[[], tuple[str, str]]) -> Proof:
    """Return the proof of a function that returns (figure, text) or raises; main thread only."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {timeout_s:g} s")

    handler, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return Proof(name, PROVED, *prove())
    except (TimeoutError, *FOREIGN) as error:
        return Proof(name, NOT_PROVED, "no", " ".join(str(error).split()))
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def prove_elements(hf: HFConfig, layouts: Sequence[Layout]) -> tuple[str, str]:
    """Prove that each layout that divides the model reads and writes every element once."""
    fitting = [layout for layout in (REFERENCE, *layouts) if not check_layout(hf, layout.parallel_layout())]
    for layout in fitting:
        prove_complete(Sharding(hf, layout.parallel_layout()))
    names = ", ".join(layout.title for layout in fitting)
    return "yes", f"all {hf.num_layers} layers, each element read and written once: {names}"


def prove_packing(source: Path) -> tuple[str, str]:
    """Prove that packed rows, or else padded ones, have logits and gradients of single ones."""
    way, why = find_way(model_config(source), "auto", True, "cpu")
    if way is None:
        raise UserError(why)
    word = "packed" if way[1] else "padded"
    reason = "" if way[1] else f"; not packed: {why}"
    return word, f"{word} rows have logits and gradients of single ones, attention {way[0]}{reason}"


def prove_sampling(source: Path) -> tuple[str, str]:
    """Prove that cached decoding has the log-probs of the uncached forward."""
    way = prove_decoding(model_config(source), torch.device("cpu"))
    word = "batches" if way.left_padded else "one length"
    return word, f"cached decoding has the forward's log-probs, {word}, attention {way.attention}"


def prove_plan(hf: HFConfig, source: Path) -> tuple[str, str]:
    """Return the fewest GPUs on which a layout fits a run of the default settings."""
    capacity, half = HARDWARE[GPU].memory, min(1024, hf.max_position_embeddings // 2 - 1)
    settings = [f"model.path={source}", *SERVERS]
    settings += [f"data.max_prompt_tokens={half}", f"rollout.max_new_tokens={half}"]
    gpus = 1 << int(LEAST_STATE * weight_bytes(hf, 1) / capacity).bit_length()
    while gpus <= MOST_GPUS:
        machine = Machine(gpus, gpu_memory=round(capacity))
        rows = [f"trainer.{name}={max(64, gpus)}" for name in ("prompts_per_step", "minibatch_size")]  # one a rank
        for best in search(read_setup(None, [*settings, *rows], machine), most=1):
            fits = f"{best.layout}, model.recompute={best.recompute}, {in_gb(best.needed)} of a GPU"
            return f"{gpus} {GPU}", f"{gpus} x {GPU} train sequences of {2 * half:,} tokens: {fits}"
        gpus *= 2
    raise UserError(f"no layout fits {MOST_GPUS} x {GPU}")


def page(card: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a card as a page of Markdown."""
    yield f"# {card['family']}\n"
    yield f"{card['model']}; {', '.join(f'{name} {version}' for name, version in card['versions'].items())}.\n"
    yield "| proof | verdict | |\n|---|---|---|"
    for one in card["proofs"]:
        yield f"| {one['name']} | {one['verdict']} | {one['text'].replace('|', '/')} |"
    yield f"\nErrors against transformers in float32; allowed are {', '.join(f'{k} {v:g}' for k, v in FP32.items())}."
