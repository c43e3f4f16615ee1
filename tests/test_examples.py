"""Every program in examples/ runs as a user would run it and prints what its docstring promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = {"buggy.py"}  # read by a command of the README
EXPECTED = {  # a piece of text that only a run that worked prints
    "async_handler.py": ["first: ", "third: the prompt has", "impatient client leaves"],
    "batch.py": ["What is 11 plus 5?", "6 answers"],
    "documents.py": ["prompt tokens cached"],
    "earlier_first_token.py": ["exact        first token", "speculative  first token", "of the work", "provisional  "],
    "edit_file.py": ["used: ", "tokens written"],
    "extraction.py": ["years  <-  The lamp at Skerry", "drafted tokens accepted"],
    "own_drafter.py": ["drafted tokens accepted", "the same answer as plain decoding"],
    "rollouts.py": ["tokens computed"],
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} - DATA == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_runs(name: str, smollm2: Path) -> None:
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(ROOT / "examples" / name)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout, done.stdout
    assert "failed" not in done.stderr and "0 of 0 drafted" not in done.stdout, done.stderr
