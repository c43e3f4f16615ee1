"""`forerun draft serve` as a process: it says where it is, drafts, and leaves in peace on SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.cli import main


def test_it_drafts_and_leaves(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("llama"))
    command = [sys.executable, "-m", "forerun.cli", "draft", "serve", "-m", folder, "--port", "0", "--threads", "1"]
    params = SamplingParams(temperature=0.05, seed=1, max_tokens=16, ignore_eos=True)
    with subprocess.Popen([*command, "--dtype", "float32"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        watchdog = threading.Timer(120, process.kill)  # a line that never comes must not hang the suite
        watchdog.start()
        try:
            ready = (re.search(r"drafts for targets at (remote:\S+)", line) for line in process.stderr)
            address = next(found[1] for found in ready if found)
            with LLM(folder, dtype="float32", quiet=True, max_model_len=256, threads=1) as llm:
                plain = llm.generate("The keeper counts", params, speculation="off")[0]
                with all_drafts_verified(llm.engine):
                    drafted = llm.generate("The keeper counts", params, speculation=address)[0]
        finally:
            watchdog.cancel()
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0 and "Traceback" not in rest
    assert drafted.token_ids == plain.token_ids and drafted.usage.drafters[address].accepted > 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft-model", "smollm2-135m-instruct"], "--draft-model is about answers"),
        (["--host-bytes", "2G"], "leave --host-bytes out"),
        (["--max-body", "-1"], "--max-body is -1"),
        (["--log-format", "xml"], "use text or json"),
        (["--api-keys", "/nowhere/keys"], "cannot read the API keys"),
    ],
)
def test_mistakes_are_told_before_a_model_is_opened(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["draft", "serve", *options])
    assert ended.value.code != 0 and words in " ".join(capsys.readouterr().err.split())
