"""The rules of the house, counted: imports point one way, one name for one class, sizes, no person for a program.

Every import statement counts, inside functions too. What may break a rule is listed here with its reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom to the top: a module imports from its own package and from the lines above its own.
LAYERS = (
    ("forerun.errors", "forerun.interrupt"),
    ("forerun.options", "forerun.renamed"),
    ("forerun.data", "forerun.params"),
    ("forerun.core",),
    ("forerun.cache", "forerun.text"),
    ("forerun.models",),
    ("forerun.decode",),
    ("forerun.prefill",),
    ("forerun.engine",),
    ("forerun.runtime",),
    ("forerun.inputs", "forerun.loading", "forerun.outputs"),
    ("forerun.llm",),
    ("forerun.sharing",),
    ("forerun.drafters", "forerun"),  # the public names
    ("forerun.recipes", "forerun.serve", "forerun.train", "forerun.vllm"),
    ("forerun.ray",),
    ("forerun.checks",),
    ("forerun.commands",),
    ("forerun.cli",),
    ("forerun.__main__",),
    ("forerun_research",),
)
RANK = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}

# (importing module, imported module or package): why the import may point upward. Only inside functions or for types.
ALLOWED_UPWARD: dict[tuple[str, str], str] = {
    ("forerun.llm", "forerun.sharing"): "LLM.sessions, rollout and workers: methods people look for on LLM",
    ("forerun.llm", "forerun.recipes"): "LLM.edit: a method people look for on LLM",
}
# The one module that may reach research, by its name at run time.
BRIDGE = "forerun.commands.extras"


@dataclass(frozen=True)
class ImportStatement:
    module: str  # where it stands
    target: str  # the module it imports
    line: int
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`: for the type checker alone


@cache
def python_files(package: str) -> dict[str, Path]:
    """Modules of a package by dotted name; documents for models to read are no modules."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if "documents" in path.parts:
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports(package: str) -> tuple[ImportStatement, ...]:
    return tuple(entry for name, path in python_files(package).items() for entry in imports_of(name, path.read_text()))


def imports_of(module: str, source: str) -> Iterator[ImportStatement]:
    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[ImportStatement]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in imported_modules(child):
                    yield ImportStatement(module, target, child.lineno, lazy, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(ast.Module(child.body, []), lazy, True)
                yield from visit(ast.Module(child.orelse, []), lazy, typing)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, lazy or inside, typing)

    yield from visit(ast.parse(source), False, False)


def imported_modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Our own modules that a statement imports; `from package import module` imports the module."""
    known = {**python_files("forerun"), **python_files("forerun_research")}
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert not node.level, "imports are absolute"
        assert node.module is not None
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in known else node.module for name in names]
    yield from dict.fromkeys(name for name in names if name.split(".")[0] in ("forerun", "forerun_research"))


def layer(module: str) -> str:
    """The longest listed package a module lies in; one that lies in none fails."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in RANK and not (name == "forerun" and end < len(parts)):
            return name
    raise AssertionError(f"{module} has no layer: add it to LAYERS")


def upward(entry: ImportStatement) -> bool:
    own, other = layer(entry.module), layer(entry.target)
    return own != other and RANK[other] >= RANK[own]


def test_every_module_has_a_layer() -> None:
    assert {layer(name) for name in python_files("forerun")} <= set(RANK)


def allowed(entry: ImportStatement) -> tuple[str, str] | None:
    """The listed exception that covers an import."""
    if not (entry.lazy or entry.typing):
        return None
    pairs = [(entry.module, package) for module, package in ALLOWED_UPWARD if module == entry.module]
    return next((pair for pair in pairs if f"{entry.target}.".startswith(f"{pair[1]}.")), None)


def test_imports_point_one_way() -> None:
    found = [entry for entry in imports("forerun") if upward(entry)]
    new = [entry for entry in found if allowed(entry) is None]
    assert not new, "upward imports:\n" + "\n".join(f"{e.module}:{e.line} imports {e.target}" for e in new)
    assert {allowed(entry) for entry in found} >= set(ALLOWED_UPWARD), "an exception is listed that is not needed"


def test_research_is_reached_in_one_place() -> None:
    """Also by name: a string that names the package would be an import that no parser sees."""
    found = set()
    for name, path in python_files("forerun").items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _names_research(node.value):
                found.add(name)
    assert found <= {BRIDGE}


def _names_research(text: str) -> bool:
    return re.search(r"forerun_research\.(\w|$)", text) is not None and "\n" not in text and " " not in text


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("forerun.cache.pool", "from forerun.models import config", True),
        ("forerun.cache.pool", "def f():\n    import forerun.engine.engine", True),
        ("forerun.engine.engine", "if TYPE_CHECKING:\n    from forerun.llm import LLM", True),
        ("forerun.llm", "class A:\n    def f(self):\n        from forerun_research.bench import common", True),
        (
            "forerun.engine.engine",
            "from forerun.cache.pool import PagePool\nfrom forerun.engine import scheduler",
            False,
        ),
        ("forerun.cli", "import json\nfrom forerun.commands import chat", False),
    ],
)
def test_the_import_rule_finds(module: str, source: str, wrong: bool) -> None:
    assert any(upward(entry) for entry in imports_of(module, source)) is wrong


# -- one name, one class -----------------------------------------------------------------------------------------------

# Class names that may stand in several modules, with the reason.
ALLOWED_TWICE: dict[str, str] = {}


def test_no_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for name, path in {**python_files("forerun"), **python_files("forerun_research")}.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert set(twice) == set(ALLOWED_TWICE), twice


# -- sizes -------------------------------------------------------------------------------------------------------------

MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
# Functions that may be longer, with the reason.
ALLOWED_LONG: dict[tuple[str, str], str] = {
    ("forerun.models.cuda.paged", "_attend"): "a kernel: one launch, and Triton has no helpers that share its tiles",
    ("forerun.models.cuda.skinny", "_skinny"): "a kernel",
}


@pytest.mark.parametrize("package", ["forerun", "forerun_research", "tests"])
def test_files_hold_one_idea(package: str) -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in python_files(package).items()}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_functions_fit_a_screen() -> None:
    found = {}
    for name, path in python_files("forerun").items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                found[name, node.name] = node.end_lineno - node.lineno + 1
    assert {place for place, lines in found.items() if lines > MAX_FUNCTION_LINES} == set(ALLOWED_LONG)


# -- words -------------------------------------------------------------------------------------------------------------

# Spelled in halves, so that this file passes its own test.
PERSONS = [
    *(f"{some}{body}" for some in ("no", "some", "any", "every") for body in ("body",)),
    *(f"{some}{one}" for some in ("some", "any", "every", "no ") for one in ("one",)),
    *("who" + end for end in ("ever", "mever", "m")),
    *("hi" + end for end in ("s", "m", "mself")),
]
PERSON = re.compile(rf"\b({'|'.join(PERSONS)})\b", re.IGNORECASE)
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".cu", ".js", ".html", ".css", ""}
# Texts for models to read, where people are people.
TEXTS = ("forerun/data/", "tests/data/", "tests/tiny.py", "LICENSE")


def test_no_person_stands_in_for_a_program() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = []
    for name in listing:
        path = ROOT / name
        if not path.is_file() or path.suffix not in SUFFIXES or name.startswith(TEXTS):
            continue
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if PERSON.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
