"""Answer an unknown key: with the nearest legal one, or our name for a setting of TRL, verl, OpenRLHF or slime."""

from __future__ import annotations

import difflib
import re

from mega_rl.config.keys import FIELDS, SECTIONS
from mega_rl.config.packaged import rows_of
from mega_rl.config.values import shown

# peer -> its name -> the setting here, with a value or a remark behind it
NAMES: dict[str, dict[str, str]] = {}
for _peer, _name, _setting in rows_of("peer_names.tsv"):
    NAMES.setdefault(_peer, {})[_name] = _setting


def unknown_key(key: str, *, is_section: bool = False) -> str:
    """Return the error for a key that is no setting; is_section: a mapping stands under it."""
    legible = key if re.fullmatch(r"[\w.\-+~]{1,80}", key) else shown(key)
    near = difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.5) if is_section else []
    hint = in_peers(key) or (f"did you mean {near[0]}?" if near else nearest_key(key))
    return f"{legible}: unknown key; {hint}"


def nearest_key(key: str) -> str:
    """Return the nearest legal key to an unknown one, or all keys of its section, in words."""
    section, _, leaf = key.rpartition(".")
    if not section and (sections := difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.75)):
        return f"did you mean {sections[0]}? {_contents(sections[0])}"
    initials = "".join(word[:1] for word in leaf.removesuffix("_size").split("_"))  # learning_rate -> lr
    inside = [name for name in FIELDS if name.rpartition(".")[0] == section]
    for names in (inside, FIELDS):
        same_leaf = [name for name in names if _leaf(name) in (leaf, initials)]
        if near := difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0):
            return f"did you mean {near[0]}?"
    if inside:
        near = [f"{section}.{name}" for name in difflib.get_close_matches(leaf, map(_leaf, inside), n=1, cutoff=0.5)]
    else:
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


def in_peers(key: str) -> str:
    """Return the setting here for a peer's name: "TRL's num_generations is rollout.n here"; "" if no peer has the key.

    The longest ending of the key that a peer has decides; dashes count as underscores.
    """
    words = key.replace("-", "_").split(".")
    for name in (".".join(words[start:]) for start in range(len(words))):
        owners: dict[str, list[str]] = {}  # setting -> peers in the genitive
        for peer, names in NAMES.items():
            if name in names:
                owners.setdefault(names[name], []).append(f"{peer}'s")
        if owners:
            return "; ".join(f"{' and '.join(owners[own])} {name} is {own} here" for own in sorted(owners))
    return ""
