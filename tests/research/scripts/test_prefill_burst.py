"""Many studies side by side: what ends, what is ended, and what is gathered of them."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from pathlib import Path

import pytest

from forerun.errors import BadRequest
from forerun_research.scripts import prefill_burst, prefill_evidence
from forerun_research.scripts.prefill_burst import ARCHIVE, Job, JobPlan, gather, run
from forerun_research.studies.study import find, load

FOLDERS = ("models", "data", "texts", "out")


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", code


def names(path: Path) -> set[str]:
    with tarfile.open(path) as file:
        return set(file.getnames())


def test_jobs_run_side_by_side_until_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_burst, "ENDING_S", 0.5)
    wrote = "open('results.jsonl', 'a').write('{}\\n'); open('weights.safetensors', 'w')"
    jobs = [
        Job("done", (python(wrote), python("open('after.txt', 'w').write('then')"))),
        Job("broken", (python("raise SystemExit(3)"), python("open('never.txt', 'w')"))),
        Job("slow", (python(f"{wrote}; import time; time.sleep(60)"),)),
    ]
    start = time.monotonic()
    assert run(jobs, tmp_path / "work", tmp_path / "out", 3.0) == {"done": 0, "broken": 3, "slow": None}
    assert time.monotonic() - start < 20.0
    found = names(tmp_path / "out" / ARCHIVE)
    assert {"done/results.jsonl", "done/after.txt", "slow/results.jsonl", "broken/log.txt"} <= found
    assert not {name for name in found if name.endswith(".safetensors")} and "broken/never.txt" not in found


def write_records(folder: Path, study: str, cases: list[str], parts: dict[str, str]) -> None:
    path = folder / study / "results.jsonl"
    path.parent.mkdir(parents=True)
    lines: list[dict[str, object]] = [{"study": study, "parts": parts}]
    about: dict[str, object] = {"variant": "", "measure": "m", "condition": "exact", "record": {"kl": 0}}
    lines += [about | {"case": case} for case in cases]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_parts_of_a_study_are_gathered_without_the_other_machines_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"measure tasks": "aa", "setting default": "bb", "profile of the pair": "cc"}
    for number, cases in ((1, ["one"]), (2, ["two", "three"])):
        write_records(tmp_path / "work" / f"tasks-{number}of2", "prefill_tasks_context", cases, parts)
    for job in ("layers", "layers-ridge", "trained"):
        write_records(tmp_path / "work" / job, "25m" if job == "trained" else "prefill_layers", ["one"], parts)
    (tmp_path / "work" / "trained" / "25m.yaml").write_text("title: a pair\n")
    prefill_burst.archive(tmp_path / "work", tmp_path)
    out = tmp_path / "gathered"
    gather(tmp_path / ARCHIVE, out)
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "prefill_tasks_context" / "results.jsonl").read_text().splitlines()]
    assert [line["case"] for line in lines if "case" in line] == ["one", "two", "three"]
    kept = {"measure tasks": "aa", "setting default": "bb"}
    assert [line["parts"] for line in lines if "parts" in line] == [kept, kept]
    assert f"lab run prefill_tasks_context --report-only --out {out / 'prefill_tasks_context'}\n" in said
    assert f"lab run prefill_layers --report-only --out {out / 'prefill_layers-ridge'}\n" in said
    assert f"25m.yaml --report-only --out {out / '25m'}\n" in said  # a study of its own, which no package has


@pytest.mark.parametrize("burst", ["studies", "models"])
def test_every_job_names_what_there_is(tmp_path: Path, burst: str) -> None:
    args = argparse.Namespace(**{name: tmp_path / name for name in FOLDERS}, seconds=100.0, device="cpu", prompts=None)
    jobs: list[Job] = getattr(JobPlan(args, tmp_path), burst)()
    assert len({job.name for job in jobs}) == len(jobs)
    evidence = f"{prefill_burst.SCRIPTS}.{Path(prefill_evidence.__file__).stem}"
    modules = Path(prefill_burst.__file__).parent
    for job in jobs:
        for command in job.commands:
            assert command[0] == sys.executable and command[1] == "-m"
            assert command[2] == "forerun" or (modules / f"{command[2].rpartition('.')[2]}.py").exists()
            if command[2] == evidence:
                studies = command[3 : next(i for i, word in enumerate(command) if word.startswith("--"))]
                assert studies and all(load(find(study.partition(":")[0])).measures for study in studies)


def test_a_job_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no job begins with 'taks'"):
        prefill_burst.main(["studies", "--out", str(tmp_path), "--only", "taks"])
