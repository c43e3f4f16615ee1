"""Ctrl-C of the command: exit code 130 and one line, soon, also in an import, in C code and where it is caught."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.prefill.calibration.common import write_pair, write_text

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parent.parent
SOON_S = 4.0  # promised is one; tests also run beside other work, and what failed took 19 and more

COMMAND = "from forerun.__main__ import main; main()\n"
START = "import forerun.interrupt as interrupt, sys; interrupt.answer_interrupts()\n"
READY = "print('ready', flush=True)\n"
IN_C = """
def endless():
    import hashlib
    while True:
        try:
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in which no Python code runs
        except KeyboardInterrupt:
            pass
"""


def start(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    return subprocess.Popen(command, text=True, errors="replace", env=os.environ | {"PYTHONPATH": str(ROOT)}, **given)


def interrupted(process: subprocess.Popen[str], times: int = 1) -> list[str]:
    """Lines on stderr of a process that is interrupted as soon as it prints something."""
    assert process.stdout is not None and process.stdout.read(1)
    begin = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
        took = time.monotonic() - begin
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()  # one that did not end must not run on beside the tests that follow
    assert process.returncode == 130 and took < SOON_S, (took, err)
    return err.splitlines()


def test_in_an_import_that_would_catch_it(tmp_path: Path) -> None:
    body = READY + "while True:\n  try:\n    sum(range(1000))\n  except BaseException:\n    pass\n"
    (tmp_path / "slow_module.py").write_text(body)
    process = start(START + f"sys.path.insert(0, {str(tmp_path)!r}); import slow_module")
    assert interrupted(process) == ["interrupted"]


def test_within_c_code() -> None:
    assert interrupted(start(START + IN_C + "endless()")) == ["interrupted"]


def test_where_the_exception_is_caught() -> None:
    code = "import time\nwhile True:\n  try:\n    print('ready', flush=True)\n    time.sleep(60)\n"
    assert interrupted(start(START + code + "  except KeyboardInterrupt:\n    pass\n")) == ["interrupted"]


def test_what_is_being_written_becomes_whole(tmp_path: Path) -> None:
    code = f"""
with interrupt.shield, open({str(tmp_path / "file")!r}, "w") as file:
    import time
    end = time.monotonic() + interrupt.GRACE_S + 0.5
    while time.monotonic() < end:
        try:
            print("ready", flush=True)
            while time.monotonic() < end:
                file.write("x")
        except KeyboardInterrupt:
            pass
    file.write(" whole")
endless()
"""
    assert interrupted(start(START + IN_C + code)) == ["interrupted"]
    assert (tmp_path / "file").read_text().endswith("x whole")


def test_a_program_with_an_answer_of_its_own_continues() -> None:
    code = """
interrupt.only_raise()
import time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(interrupt.GRACE_S + 0.3)
    sys.exit("continued")
"""
    process = start(START + code)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "continued\n" and process.returncode == 1


def test_where_it_is_ignored_it_stays_ignored() -> None:
    code = START + READY + "assert not interrupt.answered(); print(sys.stdin.read())"
    process = start(
        code, stdin=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate("still here", timeout=60)[0] == "still here\n" and process.returncode == 0


def test_a_bar_leaves_no_hidden_cursor() -> None:
    code = """
from forerun.core.progress import track
for item in track(range(9), "working"):
    endless()
"""
    ours, theirs = pty.openpty()
    process = start(START + IN_C + code, stderr=theirs)
    os.close(theirs)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    shown = b""
    while b"?25l" not in shown:  # a bar hides it
        shown += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    shown += os.read(ours, 10_000)
    os.close(ours)
    assert shown.rfind(b"?25h") > shown.rfind(b"?25l") and shown.endswith(b"interrupted\r\n")


def test_generate_several_times_at_once(tiny_folder: Callable[[str], Path]) -> None:
    args = ["generate", "fog", "--threads", "1", "--model", tiny_folder("llama"), "--max-tokens", "400"]
    args += ["--regex", "[a-z ]{350}", "--speculation", "off"]  # an answer that does not end before
    assert interrupted(start(COMMAND, *args), times=3) == ["interrupted"]


def test_calibrate_in_a_long_step(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    text, out = write_text(tmp_path / "text", files=4), tmp_path / "a.profile"
    given = ["calibrate", "--target", target, "--draft-model", draft, "--text", text, "--out", out, "--device", "cpu"]
    given += ["--window", 416, "--rank", 16, "--tokens", 6000, "--steps", 2]
    endless = "from forerun.prefill.calibration import distill\ndistill.Distiller.step = lambda *_: endless()\n"
    lines = interrupted(start(IN_C + endless + COMMAND, *given))
    assert lines[-1] == f"stopped; the same command resumes from {out}.state"
    assert not out.exists()


def test_a_bench_ends_with_its_processes() -> None:
    told = """
import forerun_research.bench.sides as sides
receive = sides.SideProcess._receive
def told(self):
    print("ready", flush=True)
    return receive(self)
sides.SideProcess._receive = told
"""
    bench = ["bench", "decode", "--random-shape", "tiny", "--device", "cpu", "--threads", "1", "--runs", "1000000"]
    process = start(told + COMMAND, *bench)
    assert process.stdout is not None
    for _ in range(4):  # both sides are open and at work
        assert process.stdout.readline() == "ready\n"
    sides = psutil.Process(process.pid).children(recursive=True)
    assert len(sides) >= 2
    *progress, line = interrupted(process)
    assert line == "interrupted" and all(" of " in one for one in progress)
    _, alive = psutil.wait_procs(sides, timeout=60)
    assert not alive
