"""Settings of TRL, verl, OpenRLHF and slime, and the settings here that mean the same."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.packaged import rows_of

# peer -> its name -> the setting here, with a value or a remark behind it
NAMES: dict[str, dict[str, str]] = {}
for _peer, _name, _setting in rows_of("peer_names.tsv"):
    NAMES.setdefault(_peer, {})[_name] = _setting


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
