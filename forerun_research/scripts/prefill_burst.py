"""The evidence about speculative prefill on a GPU that is lent for minutes: many studies side by side, each in a
process of its own, ended when the seconds are up with what they have.

    python -m forerun_research.scripts.prefill_burst studies --seconds 220 --models MODELS --data DATA --texts TEXTS \\
        --out OUT [--device cuda] [--go-on OUT/evidence.tar.gz] [--only tasks] [--prompts 2]
    python -m forerun_research.scripts.prefill_burst models --seconds 460 ...
    python -m forerun_research.scripts.prefill_burst gather --go-on OUT/evidence.tar.gz --out FOLDER

`studies`: whether the draft is worth anything, tasks, baselines, failures by kind of token, free-running answers,
facts across chunks, the gate. `models`: a 10x pair and two drafts trained on the spot (`trained_pair`), the matrix of
kinds of text, a draft of another tokenizer, layers of two families and of maps without distillation. MODELS is a
folder with the GGUF files of the pair, of the default model and of another one to draft with; TEXTS one of
`profile_texts`. Nothing here is timed: the processes wait for each other. OUT/evidence.tar.gz has all records and logs
and is written anew every few seconds; `--go-on` begins from such a file. `gather` joins the parts of each study in it
and prints the commands that make their tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import BadRequest
from forerun_research.studies.results import FILE

ARCHIVE = "evidence.tar.gz"
ARCHIVE_EVERY_S = 20.0
ENDING_S = 8.0  # at the end: for processes to go, and for the last archive
THREADS = 2  # of each process
TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
DEFAULT, OTHER = "smollm2-135m-instruct-q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
SCRIPTS = "forerun_research.scripts"


@dataclass(frozen=True)
class Job:
    """Commands that run one after the other, in a folder of their own."""

    name: str
    commands: tuple[tuple[str, ...], ...]


class JobPlan:
    """The jobs of a burst, for the paths and seconds that are given."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args, self._work = args, work
        self._target, self._draft, self._default, self._other = (
            str(args.models / name) for name in (TARGET, DRAFT, DEFAULT, OTHER)
        )
        self._device = ("--device", args.device)

    def studies(self) -> list[Job]:
        jobs = [
            self._pair("ablation", "prefill_ablation_pair"),
            *(self._pair("tasks", "prefill_tasks_context", part=(k, 5)) for k in range(1, 6)),
            *(self._pair("free", "prefill_free", part=(k, 2)) for k in (1, 2)),
            self._pair("baselines", "prefill_baselines"),
            self._pair("chunks", "prefill_chunk_facts"),
            self._pair("gate", "prefill_bins:90", "prefill_trust"),
        ]
        own = self._evidence("default", ("prefill_trust_default:100", "prefill_ablation"), ("--model", self._default))
        return [*jobs, own]

    def models(self) -> list[Job]:
        ridge, texts = "ridge.safetensors", str(self._args.texts)
        pair = ("--target", self._target, "--draft-model", self._draft, *self._device)
        fit = (*_forerun("calibrate"), *pair, "--text", texts, "--no-distill", "--tokens", "1000000")
        trained = (*_module("trained_pair"), "--out", ".", *self._device, "--data", str(self._args.data))
        trained += ("--seconds", str(self._args.seconds - 2 * ENDING_S))
        others = f"{self._draft},{self._default},{self._other}"
        other = (*_module("other_tokenizer"), texts, "--target", self._target, "--drafts", others, *self._device)
        matrix = (*_module("profile_matrix"), texts, *pair, "--out", "matrix.jsonl")
        layers = self._pair("layers", "prefill_layers")
        ridged = self._pair("layers-ridge", "prefill_layers", more=("--prefill-profile", ridge))
        own = self._evidence("layers-default", ("prefill_layers_default",), ("--model", self._default))
        return [
            Job("trained", (trained,)),
            Job("matrix", (matrix,)),
            Job("tokenizer", ((*other, "--out", "tokenizer.jsonl"),)),
            layers,
            Job(ridged.name, ((*fit, "--force", "--out", ridge), *ridged.commands)),
            own,
        ]

    def _pair(self, name: str, *studies: str, part: tuple[int, int] | None = None, more: tuple[str, ...] = ()) -> Job:
        return self._evidence(name, studies, ("--model", self._target, "--draft-model", self._draft, *more), part)

    def _evidence(
        self, name: str, studies: tuple[str, ...], models: tuple[str, ...], part: tuple[int, int] | None = None
    ) -> Job:
        command = (*_module("prefill_evidence"), *studies, *models, *self._device, "--data", str(self._args.data))
        command += ("--out", ".", "--seconds", str(self._args.seconds - 2 * ENDING_S), "--kv-cache-tokens", "40000")
        if part is not None:
            name, command = f"{name}-{part[0]}of{part[1]}", (*command, "--part", f"{part[0]}/{part[1]}")
        if self._args.prompts is not None:
            command += ("--prompts", str(self._args.prompts))
        return Job(name, (command,))


def _module(script: str) -> tuple[str, ...]:
    return sys.executable, "-m", f"{SCRIPTS}.{script}"


def _forerun(command: str) -> tuple[str, ...]:
    return sys.executable, "-m", "forerun", command


def run(jobs: list[Job], work: Path, out: Path, seconds: float) -> dict[str, int | None]:
    """All at once, until they are done or the time is up. Exit codes; None: ended by the time."""
    start = saved = time.monotonic()
    waiting = {job.name: list(job.commands) for job in jobs}
    running = {name: _started(work / name, commands.pop(0)) for name, commands in waiting.items()}
    codes: dict[str, int | None] = {}
    while running and time.monotonic() - start < seconds - ENDING_S:
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            print(f"{time.monotonic() - start:6.1f} s  {name} ended with {process.returncode}", flush=True)
            codes[name] = process.returncode
            del running[name]
            if waiting[name] and process.returncode == 0:
                running[name] = _started(work / name, waiting[name].pop(0))
        if time.monotonic() - saved > ARCHIVE_EVERY_S:
            archive(work, out)
            saved = time.monotonic()
    for name, process in running.items():
        os.killpg(process.pid, signal.SIGTERM)
        codes[name] = None
    for process in running.values():
        try:
            process.wait(ENDING_S / 4)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    archive(work, out)
    return codes


def _started(folder: Path, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).parents[2]
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def archive(work: Path, out: Path) -> None:
    """Records and logs; no models."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz", compresslevel=3) as file:
        for path in sorted(work.rglob("*")):
            if path.is_file() and path.suffix in (".jsonl", ".json", ".txt", ".yaml"):
                file.add(path, path.relative_to(work))
    part.replace(out / ARCHIVE)


def gather(path: Path, out: Path) -> None:
    """The records of a study's parts as one file, in OUT/STUDY, and the commands that make their tables."""
    with tarfile.open(path) as file:
        file.extractall(out / "parts", filter="data")
    commands: dict[str, str] = {}
    for found in sorted((out / "parts").rglob(FILE)):
        study, job = found.parent.name, found.parts[-3]
        name = f"{study}-ridge" if job.endswith("-ridge") else study
        joined = out / name / FILE
        joined.parent.mkdir(parents=True, exist_ok=True)
        with joined.open("a", encoding="utf-8") as file:
            file.writelines(_anywhere(line) for line in found.read_text(encoding="utf-8").splitlines())
        own = found.parents[1] / f"{study}.yaml"
        commands[name] = f"forerun lab run {own if own.exists() else study} --report-only --out {joined.parent}"
    print(*commands.values(), sep="\n")


def _anywhere(text: str) -> str:
    """A line of results without what it says of the models' and profiles' files, which lie on the other machine."""
    line = json.loads(text)
    if "parts" in line:
        line["parts"] = {
            name: digest for name, digest in line["parts"].items() if name.split()[0] in ("setting", "measure")
        }
    return json.dumps(line) + "\n"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Evidence about speculative prefill, many studies side by side.")
    parser.add_argument("burst", choices=("studies", "models", "gather"))
    parser.add_argument("--seconds", type=float, default=220.0)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--texts", type=Path, default=Path("texts"))
    parser.add_argument("--out", type=Path, required=True, help="where the archive goes")
    parser.add_argument("--work", type=Path, help="for records while they are made; default: OUT/work")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--go-on", type=Path, metavar="ARCHIVE")
    parser.add_argument("--only", default="", help="jobs whose names begin so, by commas")
    parser.add_argument("--prompts", type=int, help="of each measure, in place of the studies' counts")
    args = parser.parse_args(given)
    for name in ("models", "data", "texts", "out"):
        setattr(args, name, getattr(args, name).absolute())
    if args.burst == "gather":
        gather(args.go_on, args.out)
        return 0
    work = (args.work or args.out / "work").absolute()
    if args.go_on is not None:
        with tarfile.open(args.go_on) as file:
            file.extractall(work, filter="data")
    jobs: list[Job] = getattr(JobPlan(args, work), args.burst)()
    wanted = tuple(filter(None, args.only.split(",")))
    jobs = [job for job in jobs if not wanted or job.name.startswith(wanted)]
    if not jobs:
        raise BadRequest(f"no job begins with {args.only!r}", "leave --only out to see the names")
    codes = run(jobs, work, args.out, args.seconds)
    print({name: "ended by the time" if code is None else code for name, code in codes.items()})
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-gpu=name,memory.used", "--format=csv"], check=False)
    return 0 if all(code in (0, None) for code in codes.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
