"""A corpus of invented facts, a search in it by BM25, and the reward of the answer."""

from __future__ import annotations

import random

import bm25s

import mega_rl

FIRST = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Klara", "Leo", "Mia", "Noah",
    "Olga", "Paul", "Quinn", "Rosa", "Sven", "Tessa",
)  # fmt: skip
LAST = (
    "Adler", "Brandt", "Carver", "Dietz", "Engel", "Fisher", "Gruber", "Hansen", "Iversen", "Jensen", "Keller",
    "Lang", "Moser", "Novak", "Olsen", "Peters",
)  # fmt: skip
PARTS = ("Upper", "Lower", "Old", "New", "North", "South", "East", "West")
PLACES = (
    "Arden", "Brook", "Calder", "Dover", "Elster", "Falken", "Grasse", "Hollow", "Iberg", "Jarrow", "Kelso",
    "Linden", "Marlow", "Norden", "Otley", "Perth",
)  # fmt: skip
RIVERS = (
    "Aare", "Bode", "Clyde", "Drava", "Ebro", "Fulda", "Garonne", "Havel", "Isar", "Jagst", "Kinzig", "Lahn",
    "Mosel", "Neckar", "Oder", "Po",
)  # fmt: skip
LIVES, FLOWS = "{} lives in {}.", "The {} flows through {}."


def facts() -> tuple[dict[str, str], dict[str, str]]:
    """Return (the town of each person, the river of each town)."""
    numbers = random.Random(1)
    rivers = {f"{part} {place}": numbers.choice(RIVERS) for part in PARTS for place in PLACES}
    towns = {f"{first} {last}": numbers.choice(list(rivers)) for first in FIRST for last in LAST}
    return towns, rivers


def documents() -> list[str]:
    """Return each fact as a sentence."""
    towns, rivers = facts()
    people = [LIVES.format(person, town) for person, town in towns.items()]
    return people + [FLOWS.format(river, town) for town, river in rivers.items()]


DOCUMENTS = documents()
INDEX = bm25s.BM25(corpus=DOCUMENTS)
INDEX.index(bm25s.tokenize(DOCUMENTS, show_progress=False), show_progress=False)


def search(query: str) -> str:
    """Return the fact that fits best.

    Args:
        query: Words to look for.
    """
    found, _ = INDEX.retrieve(bm25s.tokenize(query, show_progress=False), k=1, show_progress=False)
    return str(found[0, 0])


class Search(mega_rl.ToolsEnvironment):
    """A conversation with a search."""

    tools = (search,)
    style = "hermes"


def right(prompt: str, response: str, answer: str) -> float:
    """Return 1 if what follows the last call is the answer."""
    return float(response.rpartition("</tool_call>")[2].strip() == answer)
