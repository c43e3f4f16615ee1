"""What `ruler` asks: facts to be put into a long text, a question about them, and the strings a right answer has.

Made from a random generator alone, after the kinds of RULER: `multi-key` (one of several keys is asked for),
`multi-value` (all values of one key), `variables` (every name that a value was handed on to), `aggregation` (the words
that are noted most often), `two-hop` (one fact names what another fact is about) and `table` (row and column of a CSV
table). Each has facts of the same form that are not asked for. Knows no tokenizer, no model and no text around it.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from forerun_research.studies.prefill_needle import CITIES

STATIONS = ("Skua", "Petrel", "Gannet", "Fulmar", "Dunlin", "Plover", "Curlew", "Osprey", "Merlin", "Bittern")
KEEPERS = (
    "Mara Quill",
    "Odo Finch",
    "Tess Harrow",
    "Ivo Brandt",
    "Nell Garrick",
    "Piet Loman",
    "Runa Voss",
    "Cal Ames",
)
NOTED = ("mango", "copper", "velvet", "anchor", "pepper", "basalt", "walnut", "turnip", "ribbon", "saddle", "marble")
COLUMNS = ("rope", "oil", "salt", "tar")

KEYS = 6  # stations with a code, one of which is asked for; and pairs of facts of a two-hop question
VALUES = 4  # of the key that is asked for
CHAIN = 4  # names that hold the value that is asked for
FREQUENT, OFTEN, SELDOM = 3, 8, 2  # words noted often, how often, and how often the others
ROWS = 16  # of a table
NUMBERS = range(10_000, 100_000)  # five digits each: four of them fit into a short answer


@dataclass(frozen=True)
class RulerTask:
    """`facts` are (depth, text): 0 is the text's beginning, 1 its end."""

    facts: tuple[tuple[float, str], ...]
    question: str
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...]  # of the same form, true of something else


def multi_key(draw: random.Random) -> RulerTask:
    stations, codes = draw.sample(STATIONS, KEYS), draw.sample(NUMBERS, KEYS)
    facts = [f"The access code of station {name} is {code}." for name, code in zip(stations, codes, strict=True)]
    question = f"What is the access code of station {stations[0]} in the text above? Answer with the number only."
    return _task(draw, facts, question, [str(codes[0])], [str(code) for code in codes[1:]])


def multi_value(draw: random.Random) -> RulerTask:
    name, other = draw.sample(STATIONS, 2)
    numbers = draw.sample(NUMBERS, 2 * VALUES)
    facts = [f"One of the magic numbers for {name} is {number}." for number in numbers[:VALUES]]
    facts += [f"One of the magic numbers for {other} is {number}." for number in numbers[VALUES:]]
    question = f"The text above has {VALUES} magic numbers for {name}. List all {VALUES}, with nothing else."
    return _task(draw, facts, question, [str(n) for n in numbers[:VALUES]], [str(n) for n in numbers[VALUES:]])


def variables(draw: random.Random) -> RulerTask:
    """Two chains; each hands its value on in the order of the text."""
    names = _names(draw, 2 * CHAIN)
    chains, values = (names[:CHAIN], names[CHAIN:]), draw.sample(NUMBERS, 2)
    facts: list[tuple[float, str]] = []
    for chain, value in zip(chains, values, strict=True):
        said = [f"VAR {chain[0]} = {value}."]
        said += [f"VAR {name} = VAR {before}." for before, name in zip(chain, chain[1:], strict=False)]
        facts += zip(sorted(draw.random() for _ in said), said, strict=True)
    question = (
        f"The text above assigns variables (VAR). Which {CHAIN} of them have the value {values[0]}, directly or "
        "through other variables? List their names, with nothing else."
    )
    return RulerTask(tuple(facts), question, tuple(chains[0]), tuple(chains[1]))


def aggregation(draw: random.Random) -> RulerTask:
    words = draw.sample(NOTED, len(NOTED))
    counts = [OFTEN] * FREQUENT + [SELDOM] * (len(words) - FREQUENT)
    facts = [f"The log notes: {word}." for word, count in zip(words, counts, strict=True) for _ in range(count)]
    question = (
        f"Which {FREQUENT} words does the log note most often in the text above (lines `The log notes: ...`)? "
        f"List the {FREQUENT} words, with nothing else."
    )
    return _task(draw, facts, question, words[:FREQUENT], words[FREQUENT:])


def two_hop(draw: random.Random) -> RulerTask:
    places, people, cities = (draw.sample(names, KEYS) for names in (STATIONS, KEEPERS, CITIES))
    facts = [f"The keeper of station {place} is {who}." for place, who in zip(places, people, strict=True)]
    facts += [f"{who} was born in {city}." for who, city in zip(people, cities, strict=True)]
    question = (
        f"In which city was the keeper of station {places[0]} born, by the text above? Answer with the city only."
    )
    return _task(draw, facts, question, cities[:1], cities[1:])


def table(draw: random.Random) -> RulerTask:
    rows = [f"{name}-{number}" for name in STATIONS for number in (1, 2)]
    rows = draw.sample(rows, ROWS)
    cells = draw.sample(NUMBERS, ROWS * len(COLUMNS))
    lines = [",".join(("station", *COLUMNS))]
    for at, name in enumerate(rows):
        lines.append(",".join((name, *(str(cell) for cell in cells[at * len(COLUMNS) : (at + 1) * len(COLUMNS)]))))
    row, column = draw.randrange(ROWS), draw.randrange(len(COLUMNS))
    wanted = str(cells[row * len(COLUMNS) + column])
    question = (
        f"In the table of the text above, what is in column {COLUMNS[column]} of row {rows[row]}? "
        "Answer with the number only."
    )
    whole = "\n\n" + "\n".join(lines) + "\n\n"
    return _task(draw, [whole], question, [wanted], [str(cell) for cell in cells if str(cell) != wanted])


KINDS: dict[str, Callable[[random.Random], RulerTask]] = {
    "multi-key": multi_key,
    "multi-value": multi_value,
    "variables": variables,
    "aggregation": aggregation,
    "two-hop": two_hop,
    "table": table,
}


def found(answer: str, strings: tuple[str, ...]) -> int:
    """How many of the strings an answer has, each as a word of its own; thousands may be set off by commas."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer)
    return sum(bool(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", plain, re.IGNORECASE)) for text in strings)


def _task(draw: random.Random, facts: list[str], question: str, wanted: list[str], unwanted: list[str]) -> RulerTask:
    placed = tuple((draw.random(), fact) for fact in facts)
    return RulerTask(placed, question, tuple(wanted), tuple(unwanted))


def _names(draw: random.Random, count: int) -> list[str]:
    """Names of five capitals, all different: no words of any text."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choices(string.ascii_uppercase, k=5))] = None
    return list(names)
