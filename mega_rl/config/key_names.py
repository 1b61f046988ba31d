"""Answer an unknown key: with the nearest legal one, or our name for a setting of TRL, verl, OpenRLHF or slime."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from mega_rl.config.keys import FIELDS, SECTIONS
from mega_rl.config.packaged import rows_of
from mega_rl.config.values import shown

# peer -> its name -> the setting here, with a value or a remark behind it
NAMES: dict[str, dict[str, str]] = {}
for _peer, _name, _setting in rows_of("peer_names.tsv"):
    NAMES.setdefault(_peer, {})[_name] = _setting


# Keys of earlier versions, and of what is below them.
MOVED = {
    **{f"{key}_settings": key for key in ("algorithm.advantage", "algorithm.loss", "algorithm.correction")},
    **{f"{key}_settings": key for key in ("rollout.source", "data.source")},
    **{f"reward.{name}": "reward.source" for name in ("pool", "http", "model")},
    "data.curriculum.success": "data.curriculum",
    "rollout.sglang.server.max_total_tokens": "rollout.sglang.server.args.max_total_tokens",
    "rollout.sglang.server.mem_fraction": "rollout.sglang.server.args.mem_fraction_static",
    "rollout.sglang.failed_samples": "rollout.sglang.max_failed_share",
}


def unknown_key(key: str) -> str:
    """Return the error for a key that is no setting."""
    for old, new in MOVED.items():
        if key == old or key.startswith(f"{old}."):
            return f"{key}: unknown key; it is {new}{key.removeprefix(old)} now"
    return f"{_legible(key)}: unknown key; {in_peers(key) or nearest_key(key)}"


def unknown_section(key: str, *, holds_settings: bool) -> str:
    """Return the error for a name that is no section; holds_settings: a mapping stands under it."""
    if in_peers(key) or key in MOVED:
        return unknown_key(key)
    near = difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.5) if holds_settings else []
    guess = f"did you mean {near[0]}?" if near else nearest_key(key)
    return f"{_legible(key)}: unknown section; {guess}"


def nearest_key(key: str) -> str:
    """Return the nearest legal key to an unknown one, or all keys of its section, in words."""
    section, _, leaf = key.rpartition(".")
    if not section and (sections := difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.75)):
        return f"did you mean {sections[0]}? {_contents(sections[0])}"
    initials = "".join(word[:1] for word in leaf.removesuffix("_size").split("_"))  # learning_rate -> lr
    inside = [name for name in FIELDS if name.rpartition(".")[0] == section]
    same_leaf = [name for name in inside or FIELDS if _leaf(name) in (leaf, initials)]
    same_leaf = same_leaf or [name for name in FIELDS if _leaf(name) in (leaf, initials)]
    near = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0)
    if not near and inside:
        leaves = difflib.get_close_matches(leaf, map(_leaf, inside), n=1, cutoff=0.5)
        near = [f"{section}.{leaves[0]}"] if leaves else []
    elif not near:
        near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else _contents(section)


def _contents(section: str) -> str:
    """Return the names in a section, or those of all sections if it is none."""
    if section not in SECTIONS:
        return "the sections are " + ", ".join(name for name in SECTIONS if "." not in name)
    below = [*FIELDS, *SECTIONS]
    return f"{section} has " + ", ".join(_leaf(name) for name in below if name.rpartition(".")[0] == section)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _legible(key: str) -> str:
    return key if re.fullmatch(r"[\w.\-+~]{1,80}", key) else shown(key)


def in_peers(key: str) -> str:
    """Return the setting here for a peer's name: "TRL's num_generations is rollout.n here"; "" if no peer has the key.

    The longest ending of the key that a peer has decides; dashes count as underscores.
    """
    words = key.replace("-", "_").split(".")
    for start in range(len(words)):
        name = ".".join(words[start:])
        if answers := dict(_answers(name)):
            return "; ".join(f"{' and '.join(peers)} {name} is {setting} here" for setting, peers in answers.items())
    return ""


def _answers(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings that peers' `name` stands for, each with the peers in the genitive."""
    settings = {setting for names in NAMES.values() for own, setting in names.items() if own == name}
    for setting in sorted(settings):
        yield setting, [f"{peer}'s" for peer, names in NAMES.items() if names.get(name) == setting]
