"""`forerun serve` as a process: it says where it is, answers, and leaves in peace on SIGTERM."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from forerun.cli import main
from forerun.commands.serve import ServerOptions
from forerun.serve.config import LOCAL_HOSTS, ServeConfig


def test_it_answers_and_leaves(tiny_folder: Callable[[str], Path]):
    folder = tiny_folder("qwen3")
    command = [sys.executable, "-m", "forerun.cli", "serve", "-m", str(folder), "--port", "0", "--threads", "1"]
    with subprocess.Popen([*command, "--name", "mine"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        watchdog = threading.Timer(120, process.kill)  # a line that never comes must not hang the suite
        watchdog.start()
        try:
            ready = (re.search(r"mine is ready at (http://\S+)/v1", line) for line in process.stderr)
            where = next(found[1] for found in ready if found)
            body = {"model": "mine", "prompt": "The secret lamp", "temperature": 0}
            answer = httpx.post(f"{where}/v1/completions", json=body, timeout=30).json()
            assert answer["usage"]["completion_tokens"] > 0
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0
    assert "/v1/completions 200" in rest and "secret lamp" not in rest and "Traceback" not in rest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--cors", "example.org"], "CORS origin"),
        (["--timeout", "0"], "max_request_s is 0"),
        (["--api-keys", "no-such-file"], "cannot read the API keys"),
        (["--allowed-host", "http://a.example"], "allowed host"),
        (["--max-body", "inf"], "--max-body is inf"),
        (["--session-ttl", "nan"], "max_session_ttl is nan"),
        (["--disk-bytes", "1G"], "--disk"),
    ],
)
def test_mistakes_are_told_before_a_model_is_opened(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main(["serve", "-m", "there-is-no-such-model", *options])
    assert left.value.code == 1 and words in capsys.readouterr().err


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORERUN_API_KEYS", "ann my-plain-key")
    with pytest.raises(SystemExit):
        main(["serve", "-m", "there-is-no-such-model"])
    told = capsys.readouterr().err
    assert "FORERUN_API_KEYS, line 1" in told and "my-plain-key" not in told


def test_keys_are_read_again_while_the_model_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`systemctl reload` may come at any time: a signal that nothing handles would end the process."""
    keys, found, before = tmp_path / "keys.txt", list[str](), signal.getsignal(signal.SIGHUP)
    keys.write_text(f"ann {'0' * 64}\n")

    def opening(opened: object, server: ServerOptions, config: ServeConfig) -> None:
        keys.write_text(f"bob {'1' * 64}\n")
        signal.raise_signal(signal.SIGHUP)
        assert config.keys is not None
        found.extend(key.name for key in config.keys.keys)

    monkeypatch.setattr("forerun.commands.serve._run", opening)
    try:
        with contextlib.suppress(SystemExit):
            main(["serve", "--api-keys", str(keys)])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == ["bob"]


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (ServerOptions(), LOCAL_HOSTS),
        (ServerOptions(host="::1", allowed_host=["Box.example"]), (*LOCAL_HOSTS, "box.example")),
        (ServerOptions(host="0.0.0.0"), ("*",)),
        (ServerOptions(host="0.0.0.0", allowed_host=["box.example"]), (*LOCAL_HOSTS, "box.example")),
    ],
)
def test_a_server_for_this_machine_answers_to_its_names_only(options: ServerOptions, hosts: tuple[str, ...]):
    assert options.config("some-model").allowed_hosts == hosts
