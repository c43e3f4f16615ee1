"""`forerun generate` with drafted prompts, as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.cli import main
from tests import tiny
from tests.prefill.test_engine_prefill import random_profile


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return left.value.code or 0  # type: ignore[return-value]


@pytest.fixture(scope="module")
def args(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("generate")
    random_profile("self", tiny_folder("qwen2")).save(home / "profile.safetensors")
    (home / "text.txt").write_text(tiny.TEXT * 7)
    model = ["--model", str(tiny_folder("qwen2")), "--dtype", "float32", "--threads", "1"]
    prompt = ["generate", "Who?", "--raw", "--file", str(home / "text.txt"), "--max-tokens", "8"]
    return [*prompt, *model, "--prefill-profile", str(home / "profile.safetensors")]


def test_speculative_and_provisional_say_what_they_did(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args, "--json") == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact["usage"]["prefill"] is None and exact["usage"]["prompt_tokens"] > 1200
    assert run(*args, "--prefill", "speculative", "--json") == 0
    report = json.loads(capsys.readouterr().out)["usage"]["prefill"]
    assert report["source"] == "self" and report["drafted"] > 1000 and 0 < report["cost"] < 1
    assert run(*args, "--prefill", "speculative", "--stats") == 0
    assert "prompt drafted by self · drafted" in capsys.readouterr().err
    assert run(*args, "--prefill", "provisional", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == exact["choices"][0]["text"] + "\n"  # no terminal: nothing provisional
    assert "first provisional token" in captured.err and "provisional tokens confirmed" in captured.err


def test_without_a_profile_it_says_what_to_do(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = args[:-2]
    assert run(*plain, "--prefill", "speculative") == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "needs a profile" in error and "--prefill-profile" in hint
    assert run(*plain, "--prefill", "speculative", "--allow-exact", "--stats") == 0
    assert "computed exactly after all" in capsys.readouterr().err
    assert run(*plain, "--budget", "0.4") == 1
    assert "--prefill speculative" in capsys.readouterr().err
