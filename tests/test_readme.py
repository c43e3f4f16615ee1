"""The README's commands and links: every command can be pasted, every file it names is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click import Context
from typer.main import get_command

from forerun.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line for line in re.findall(r"^forerun .*$", README, re.M) if not line.startswith("forerun_")]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_is_understood(line: str) -> None:
    """Subcommands and options exist, and the values parse; nothing is run."""
    words, command = shlex.split(line)[1:], get_command(app)
    while hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(Context(command), words)
    command.make_context("forerun", words)
    for word in words:
        if "/" in word and not word.startswith("http"):
            assert (ROOT / word).exists(), f"{word} is not in the repository"


def test_links_name_files_that_are_there() -> None:
    """On a package index only whole addresses work."""
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) > 10
    for target in targets:
        host = r"https://(?:github\.com|raw\.githubusercontent\.com)"
        match = re.fullmatch(host + r"/forerun/forerun/(?:blob/)?main/(.+)", target)
        assert match, f"{target} would not work on a package index"
        assert (ROOT / match[1]).exists(), f"{match[1]} is not in the repository"
