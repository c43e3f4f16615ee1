"""The page that lists every module must list every module, and examples in the documents must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.decode.drafters.base import _REGISTRY
from forerun_research.scripts import structure

ROOT = Path(__file__).parent.parent


def test_structure_has_a_line_for_every_module() -> None:
    page = structure.PAGE.read_text()
    listed = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", page, re.MULTILINE)
    assert len(listed) > 300 and all(line for _, line in listed)
    for section in page.split("\n## ")[1:]:
        folder, _, text = section.partition("\n")
        assert not text.strip().startswith("|"), f"{folder} is not introduced by a sentence"
    assert page == structure.render(page).rstrip() + "\n", "run `python -m forerun_research.scripts.structure`"


def test_the_research_readme_lists_every_study_and_script() -> None:
    package = ROOT / "forerun_research"
    page = (package / "README.md").read_text()
    names = [path.stem for path in (*package.glob("studies/*.yaml"), *package.glob("scripts/[a-z]*.py"))]
    assert len(names) > 20 and [name for name in names if not re.search(rf"\b{name}\b", page)] == []


EXAMPLES = [
    example
    for page in ("speculation.md", "structured.md")
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_two_pages_run(example: str, smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = dict(_REGISTRY)
    exec(compile(example, "example", "exec"), {})
    _REGISTRY.clear()
    _REGISTRY.update(known)
    assert capsys.readouterr().out.strip()


def test_the_log_names_modules_that_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs" / "log.md").read_text())
    assert len(named) > 50
    assert [path for path in named if not (ROOT / "forerun" / path).exists() and not (ROOT / path).exists()] == []
