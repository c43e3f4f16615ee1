"""What answers are judged by: ROUGE-L, intervals, areas under curves, and programs in a process of their own."""

from __future__ import annotations

import math
import time
from pathlib import Path

import psutil
import pytest

from forerun_research.studies.intervals import auc, bootstrap, relative, wilson
from forerun_research.studies.prefill_code import Edits, HumanEvalLong, code_of
from forerun_research.studies.prefill_measure import StudyCase
from forerun_research.studies.rouge import common_subsequence, rouge_l
from forerun_research.studies.sandbox import run_program


def test_rouge_l_on_cases_done_by_hand() -> None:
    assert rouge_l("police killed the gunman", "police kill the gunman") == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", "police kill the gunman") == pytest.approx(0.5)
    # 3 words in common, 4 and 6 words: precision 3/4, recall 1/2
    assert rouge_l("a b x c", "a y b z c w") == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l("Same, WORDS!", "same words") == 1.0
    assert rouge_l("", "") == 1.0 and rouge_l("", "a") == 0.0 and rouge_l("b", "a") == 0.0


def test_a_subsequence_keeps_its_order() -> None:
    assert common_subsequence("abcbdab", "bdcaba") == 4
    assert common_subsequence("abc", "cba") == 1 and common_subsequence("", "abc") == 0


def test_wilson_intervals() -> None:
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)
    assert wilson(16, 16)[1] == 1.0 and 0.8 < wilson(16, 16)[0] < 0.81
    assert wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_holds_the_mean_and_shrinks() -> None:
    few, many = [0.0, 1.0] * 10, [0.0, 1.0] * 200
    (low, high), (nearer_low, nearer_high) = bootstrap([few]), bootstrap([many])
    assert low < nearer_low < 0.5 < nearer_high < high
    assert all(math.isnan(end) for end in bootstrap([[1.0]]))


def test_scores_relative_to_exact() -> None:
    share, low, high = relative([1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert share == 0.75 and low < share <= high
    assert relative([0.5, 1.0], [0.5, 1.0]) == (1.0, 1.0, 1.0)  # prompt by prompt the same: nothing is uncertain
    assert math.isnan(relative([1.0, 0.0], [0.0, 0.0])[0])


def test_area_under_the_curve() -> None:
    assert auc([0.1, 0.2, 0.8, 0.9], [False, False, True, True]) == 1.0
    assert auc([0.9, 0.8, 0.2, 0.1], [False, False, True, True]) == 0.0
    assert auc([0.5, 0.5], [True, False]) == 0.5 and auc([0.1, 0.3, 0.2], [False, False, True]) == 0.5
    assert math.isnan(auc([0.1, 0.2], [True, True]))


def test_programs_pass_fail_and_are_stopped() -> None:
    assert run_program("assert 1 + 1 == 2").passed
    failed = run_program("assert 1 + 1 == 3, 'no'")
    assert not failed.passed and failed.error == "AssertionError: no"
    start = time.monotonic()
    late = run_program("while True: pass", seconds=1.0)
    assert late.timed_out and not late.passed and time.monotonic() - start < 30.0


def test_programs_are_fenced_in(tmp_path: Path) -> None:
    assert "MemoryError" in run_program("x = bytearray(8 << 30)").error
    large = run_program("open('x', 'wb').write(b'0' * (8 << 20))")
    assert not large.passed
    # its own empty folder, no input, nothing of the environment, and children end with it
    assert run_program("import os\nassert os.listdir() == ['program.py'] and 'HOME' not in os.environ").passed
    marker = tmp_path / "pid"
    child = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, '-c', {child!r}], stderr=subprocess.DEVNULL)
while not os.path.exists({str(marker)!r}) or not open({str(marker)!r}).read():
    time.sleep(0.01)
"""
    assert run_program(program).passed
    left = int(marker.read_text())
    deadline = time.monotonic() + 60.0
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the program's child outlives it"
        time.sleep(0.01)


def test_code_is_taken_from_the_longest_block() -> None:
    assert code_of("Here:\n```python\nx = 1\n```\nand\n```\ny = 1\nz = 2\n```\n") == "y = 1\nz = 2\n"
    assert code_of("```python\ncut = 1") == "cut = 1" and code_of("plain = 1") == "plain = 1"


def test_completions_and_edits_are_judged_by_their_tests() -> None:
    more = {"prompt": "def double(x):\n", "test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "double"}
    case = StudyCase("HumanEval/0", [1], more)
    measure = HumanEvalLong()
    assert measure.judge(case, "    return 2 * x\n", "")["score"] == 1.0
    wrong = measure.judge(case, "    return x\n", "")
    assert wrong["score"] == 0.0 and wrong["error"].startswith("AssertionError")
    edit = StudyCase("Python/0", [1], {"prompt": "import math\n\ndef f(x):\n", "test": "assert f(4) == 2"})
    answer = "Fixed:\n```python\ndef f(x):\n    return math.isqrt(x)\n```"
    assert Edits().judge(edit, answer, answer) == {"score": 1.0, "error": "", "same": True}
