"""The page that lists every module must list every module, and examples in the documents must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.decode.drafters.base import _REGISTRY

ROOT = Path(__file__).parent.parent


def test_structure_lists_every_module() -> None:
    listed, folder = set(), ""
    for line in (ROOT / "docs" / "structure.md").read_text().splitlines():
        if heading := re.match(r"## (forerun/\S*)", line):
            folder = heading[1]
        elif entry := re.match(r"\| `([\w/]+\.py)`", line):
            listed.add(folder + entry[1])
    package = ROOT / "forerun"
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py") if "documents" not in path.parts}
    worth_a_line = {name for name in modules if not name.endswith("__init__.py")} | {"forerun/__init__.py"}
    assert listed == worth_a_line


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "speculation.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_speculation_page_run(example: str, smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = dict(_REGISTRY)
    exec(compile(example, "example", "exec"), {})
    _REGISTRY.clear()
    _REGISTRY.update(known)
    assert capsys.readouterr().out.strip()
