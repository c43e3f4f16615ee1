"""The command as a user meets it: exit statuses, one-line errors, help that teaches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams, __version__
from forerun.cli import main
from forerun.commands import options

COMMANDS = [
    ["generate"],
    ["chat"],
    ["demo"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "info"],
    ["models", "rm"],
    ["bench", "decode"],
    ["bench", "prefill"],
    ["bench", "batch"],
    ["bench", "forward"],
    ["bench", "speculate"],
    ["bench", "load"],
    ["check", "model"],
    ["train", "drafter"],
    ["train", "pard"],
]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return left.value.code or 0  # type: ignore[return-value]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"forerun {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_teaches_with_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Example" in out
    assert out.count(f"forerun {' '.join(command)}") >= 2  # once in the usage line, once as an example


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench", "decode"], ["models", "list"]], ids=" ".join)
def test_unknown_options_are_errors(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--no-such-option") == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_generate_needs_something_to_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate") == 2
    assert "PROMPT" in capsys.readouterr().err


def test_errors_are_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--top-p", "7") == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: top_p is 7.0") and lines[1].startswith("hint: ")
    assert len(lines) == 2 and captured.out == ""


@pytest.mark.parametrize("args", [("--debug", "generate", "hi"), ("generate", "hi", "--debug")])
def test_debug_shows_a_traceback_wherever_it_stands(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args, "--top-p", "7") == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_after_a_bare_dash_dash_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--top-p", "7", "--", "--debug") == 1
    assert "Traceback" not in capsys.readouterr().err


def test_silent_options_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--choices", "3") == 1
    assert "at temperature 0" in capsys.readouterr().err
    assert run("generate", "hi", "--choices", "3", "--sampling", "model", "--temperature", "0") == 1
    assert "at temperature 0" in capsys.readouterr().err
    assert run("generate", "hi", "--logprobs", "2") == 1
    assert "--json" in capsys.readouterr().err


def test_old_options_work_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--weights=float32", "--max-context", "64", "--model", "no-such-model") == 1
    err = capsys.readouterr().err
    assert "warning: --weights is now --dtype" in err and "warning: --max-context is now --max-model-len" in err
    assert "no-such-model" in err
    assert run("check", "model", "--weights", "float32", "--model", "no-such-model") == 1
    assert "warning: --weights is now --dtype" in capsys.readouterr().err
    assert run("generate", "--model", "no-such-model", "--", "--weights") == 1
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hi", "--model", "no-such-model", "--draft", "d"),
        ("calibrate", "--target", "no-such-model", "--text", "/no/such", "--out", "x.profile", "--draft", "d"),
        ("bench", "prefill", "--draft", "d", "--profile", "p", "--weights", "int8"),
        ("lab", "run", "no-such-study", "--draft", "d", "--profile", "p", "--weights", "int8"),
    ],
)
def test_all_commands_know_an_option_by_one_name(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command) == 1
    err = capsys.readouterr().err
    for old, new in (("--draft", "--draft-model"), ("--profile", "--prefill-profile"), ("--weights", "--dtype")):
        assert (f"warning: {old} is now {new};" in err) == (old in command)
    today = [
        {"--draft": "--draft-model", "--profile": "--prefill-profile", "--weights": "--dtype"}.get(a, a)
        for a in command
    ]
    assert run(*today) == 1
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("new", ["--dtype", "-w"])
def test_an_option_under_both_its_names_is_an_error(new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--weights", "int8", new, "float32") == 1
    assert f"error: --weights and {new} are the same option" in capsys.readouterr().err


def test_research_is_listed_and_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "forerun_research", None)
    for name in [name for name in sys.modules if name.startswith("forerun_research.")]:
        monkeypatch.delitem(sys.modules, name)
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "bench" in out and "lab" in out
    assert run("bench", "decode") == 1
    assert 'hint: pip install "forerun[research]"' in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*args: object, **more: object) -> None:
        raise ModuleNotFoundError("No module named 'uvicorn.config'", name="uvicorn.config")

    monkeypatch.setattr(options.ModelOptions, "open", missing)
    assert run("generate", "hi") == 1
    err = capsys.readouterr().err
    assert "needs uvicorn.config, which is not installed" in err and 'hint: pip install "forerun[serve]"' in err


def test_unknown_model_names_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--model", "no-such-model") == 1
    err = capsys.readouterr().err
    assert "'no-such-model'" in err and "hint: " in err


def test_unexpected_errors_point_to_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options.ModelOptions, "open", lambda *args, **more: 1 / 0)
    assert run("generate", "hi") == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "--debug" in err and "Traceback" not in err


def test_ctrl_c_leaves_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options.ModelOptions, "open", interrupt)
    assert run("generate", "hi") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_generate_prints_what_the_api_returns(
    tiny_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_folder("llama"))
    file = tmp_path / "note.txt"
    file.write_text("The lamp turns")
    with LLM(model, dtype="float32", threads=1, quiet=True) as llm:
        expected = llm.generate("The lamp turns\n\ntwelve times", SamplingParams(max_tokens=12))[0]
    args = [
        "generate",
        "twelve times",
        "--file",
        str(file),
        "--raw",
        "--threads",
        "1",
        "--model",
        model,
        "--max-tokens",
        "12",
    ]
    assert run(*args, "--dtype", "float32", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == expected.text + "\n"
    assert f"prompt {len(expected.prompt_ids)} tokens" in captured.err
    assert run(*args, "--dtype", "float32", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["choices"][0]["token_ids"] == expected.token_ids
    assert record["usage"]["completion_tokens"] == len(expected.token_ids)


def test_generate_logprobs_are_json(tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "generate",
        "fog",
        "--threads",
        "1",
        "--model",
        str(tiny_folder("llama")),
        "--max-tokens",
        "3",
        "--logprobs",
        "2",
        "--json",
    ]
    assert run(*args) == 0
    choice = json.loads(capsys.readouterr().out)["choices"][0]
    assert len(choice["logprobs"]) == len(choice["token_ids"]) and len(choice["logprobs"][0]["top"]) == 2


def test_generate_several_choices(tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "generate",
        "fog",
        "--threads",
        "1",
        "--model",
        str(tiny_folder("llama")),
        "--max-tokens",
        "4",
        "--choices",
        "2",
    ]
    assert run(*args, "--temperature", "1", "--seed", "1") == 0
    out = capsys.readouterr().out
    assert out.startswith("[1] ") and "\n[2] " in out


def test_guessing_ahead_does_not_change_the_answer(
    tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_folder("llama"))
    args = ["generate", "fog", "--threads", "1", "--model", model, "--max-tokens", "24", "--dtype", "float32"]
    found = {}
    for name in ("off", "lookup+suffix", "model"):
        draft = ["--draft-model", model] if name == "model" else []
        assert run(*args, *draft, "--speculation", name, "--json") == 0
        found[name] = json.loads(capsys.readouterr().out)
    answers = [record["choices"][0]["token_ids"] for record in found.values()]
    assert answers[0] == answers[1] == answers[2]
    assert found["off"]["usage"]["drafted"] == 0 and found["off"]["usage"]["accepted_length"] == 1.0
    assert {"draft_s", "verify_s", "other_s", "lengths", "verifier"} <= set(found["model"]["usage"])


def test_an_answer_takes_the_shape_asked_for(
    tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "fog", "--threads", "1", "--model", str(tiny_folder("llama")), "--max-tokens", "24"]
    assert run(*args, "--regex", "[0-9]{4}-[0-9]{2}", "--stats") == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}\n", captured.out)
    assert len(captured.err.splitlines()) == 4  # what loading and the answer cost, what became of drafts, threads


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--speculation", "telepathy"), "telepathy"),
        (("--speculation", "model"), "draft"),
        (("--verify", "hope"), "hope"),
        (("--verify", "typical"), "bound"),
        (("--json-schema", "{"), "schema"),
        (("--regex", "("), "regex"),
        (("--json-object", "--lark", "start: A"), "--lark"),
    ],
    ids=str,
)
def test_guesses_and_shapes_that_cannot_be_are_errors(
    wrong: tuple[str, ...], named: str, tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "fog", "--threads", "1", "--model", str(tiny_folder("llama")), "--max-tokens", "4"]
    assert run(*args, *wrong) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and named in captured.err and "hint: " in captured.err


def test_system_needs_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--raw", "--system", "be brief") == 2
    assert "--system" in capsys.readouterr().err


def shell(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "forerun.cli", *args]
    return subprocess.run(command, capture_output=True, timeout=60, **options)


def test_help_does_not_wait_for_torch():
    code = "import sys; from forerun import cli; import forerun.models.fetch.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_answer_imports_nothing_it_does_not_need(tiny_folder: Callable[[str], Path]) -> None:
    """A start is mostly imports: what only other commands, other devices or a terminal need comes when it is needed."""
    code = "import sys; from forerun.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    args = ["generate", "fog", "--threads", "1", "--model", str(tiny_folder("llama")), "--max-tokens", "2", "--stats"]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0 and "loaded in" in done.stderr, done.stderr
    imported = set(done.stdout.split())
    unwanted = {
        "fastapi",
        "huggingface_hub",
        "llguidance",
        "matplotlib",
        "rich",
        "sympy",
        "torch._dynamo",
        "transformers",
    }
    unwanted |= {"torch._inductor", "triton", "forerun_research", "forerun.serve", "forerun.checks", "forerun.recipes"}
    assert "torch" in imported and imported & unwanted == set()


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_an_error(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", prompt) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: the prompt is empty") and captured.out == ""


def test_standard_input_may_be_closed_or_no_text() -> None:
    closed = shell("generate", "-", preexec_fn=lambda: os.close(0))
    assert closed.returncode == 1 and closed.stderr.startswith(b"error: the prompt is empty")
    garbage = shell(
        "generate", "-", input=b"\xff\xfe", env=os.environ | {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
    )
    assert garbage.returncode == 1 and garbage.stderr.startswith(b"error: cannot read standard input")


def test_what_a_terminal_cannot_show_is_replaced(tiny_folder: Callable[[str], Path]) -> None:
    args = ["generate", "fog", "--threads", "1", "--model", str(tiny_folder("llama")), "--max-tokens", "12"]
    args += ["--temperature", "1.5", "--seed", "3"]  # a random model: half of what it says is no ASCII
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = shell(*args, "--stats", env=ascii_only)
    assert shown.returncode == 0 and shown.stdout.isascii() and b" - total " in shown.stderr, shown.stderr
    assert b"\\x" not in shown.stderr and b"?" not in shown.stderr
    record = json.loads(shell(*args, "--json", env=ascii_only).stdout)
    assert not record["choices"][0]["text"].isascii()


def test_an_error_before_the_first_token_leaves_no_empty_line(
    tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "fog " * 500, "--threads", "1", "--model", str(tiny_folder("llama")), "--max-model-len", "64"]
    assert run(*args) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "the context holds 64" in captured.err


def test_stop_strings_know_line_breaks() -> None:
    assert options.stop_strings(["\\n\\n", "end"]) == ("\n\n", "end") and options.stop_strings(None) == ()
