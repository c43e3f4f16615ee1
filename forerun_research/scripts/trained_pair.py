"""A 10x pair of one family, and a draft of another architecture beside it, trained on the spot: does drafting hold at
a ratio that no published pair has, and does the draft have to be built as its target is?

    python -m forerun_research.scripts.trained_pair --out FOLDER --seconds 440 --data DATA [--device cuda]

One tokenizer and one stream of installed code; target and drafts are trained at the same time (`small_models`), a
profile of each pair is made by `forerun calibrate`, and agreement, copying and recall are measured on code that none
has seen, with both pairs side by side. Everything is within the seconds. FOLDER/SHAPE.json says how a model was
trained; `forerun lab run FOLDER/DRAFT.yaml --report-only --out FOLDER/DRAFT` makes the tables. `--shapes` names target
and drafts of `bench/shapes.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers

from forerun.models.build import choose_device
from forerun_research.bench.shapes import SHAPES
from forerun_research.studies.small_models import as_stream, code_texts, make_tokenizer, train

TRAINED, CALIBRATED = 0.52, 0.75  # of the seconds: when training and calibration end
CALIBRATION_CHARS = 8_000_000
SETTINGS = ("5%", "10%", "20%")
STREAM = "stream.npy"


def prepare(out: Path, vocab: int, chars: int, names: list[str]) -> None:
    """The tokenizer in every model's folder, the stream, and the text that maps are fitted on."""
    texts = code_texts(chars)
    backend = make_tokenizer(texts[: max(1, len(texts) // 8)], vocab, out / names[0])
    for name in names[1:]:
        (out / name).mkdir(parents=True, exist_ok=True)
        for file in (out / names[0]).iterdir():
            (out / name / file.name).write_bytes(file.read_bytes())
    np.save(out / STREAM, as_stream(backend, texts))
    size = 0
    for number, text in enumerate(texts):
        size += len(text)
        if size > CALIBRATION_CHARS:
            break
        path = out / "text" / f"{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def train_one(out: Path, shape: str, seconds: float, device: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(out / folder_of(shape) / "tokenizer.json"))
    config = replace(SHAPES[shape], vocab_size=backend.get_vocab_size())
    found = train(
        *(config, np.load(out / STREAM), lambda text: backend.encode(text).ids, out / folder_of(shape), seconds),
        choose_device(device),
    )
    print(json.dumps({"model": shape, **found}), flush=True)
    (out / f"{folder_of(shape)}.json").write_text(json.dumps(found))


def folder_of(shape: str) -> str:
    return shape.replace(" ", "-")


def together(commands: list[list[str]], out: Path, names: list[str]) -> None:
    """Side by side; what fails is in its log, and said."""
    started = []
    for name, command in zip(names, commands, strict=True):
        with (out / f"{name}.txt").open("ab") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ))
    for name, process in zip(names, started, strict=True):
        if process.wait():
            print(f"{name} failed: see {name}.txt", flush=True)


def write_study(out: Path, target: str, draft: str, prompts: int, length: int) -> Path:
    about = f"prompts: {prompts}, length: {length}"
    lines = [f"title: {target} drafted by {draft}", f"model: {out / target}", f"draft: {out / draft}"]
    lines += [f"profile: {out / draft}.profile", "settings:", "  - {name: default}"]
    lines += [f"  - {{name: {s}, source: draft, share: {int(s[:-1]) / 100}, deepen: false}}" for s in SETTINGS]
    lines += ["measures:", f"  - agreement: {{{about}, texts: [stdlib]}}"]
    lines += [f"  - copy: {{{about}}}", f"  - recall: {{{about}}}"]
    path = out / f"{draft}.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A 10x pair and a draft of another architecture, trained on the spot.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", default="250m,25m,25m deep")
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--chars", type=int, default=110_000_000, help="of code")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=384, help="of the maps, which cost as much as the draft otherwise")
    parser.add_argument("--train", metavar="SHAPE", help="only this one, of what is prepared in FOLDER")
    args = parser.parse_args(given)
    start, out = time.monotonic(), args.out.absolute()
    if args.train is not None:
        train_one(out, args.train, args.seconds, args.device)
        return 0
    shapes = args.shapes.split(",")
    target, *drafts = [folder_of(shape) for shape in shapes]
    out.mkdir(parents=True, exist_ok=True)
    prepare(out, args.vocab, args.chars, [target, *drafts])
    print(f"prepared after {time.monotonic() - start:.0f} s", flush=True)

    def left(until: float) -> float:
        return until * args.seconds - (time.monotonic() - start)

    module = [sys.executable, "-m", "forerun_research.scripts.trained_pair", "--out", str(out)]
    own = [*module, "--device", args.device, "--seconds", str(left(TRAINED))]
    together([[*own, "--train", shape] for shape in shapes], out, [f"{folder_of(s)}-training" for s in shapes])
    calibrate = [sys.executable, "-m", "forerun", "calibrate", "--target", str(out / target), "--device", args.device]
    calibrate += ["--text", str(out / "text"), "--window", str(args.length), "--rank", str(args.rank), "--force"]
    calibrate += ["--minutes", str(max(0.5, left(CALIBRATED) / 60))]
    pairs = [
        [*calibrate, "--draft-model", str(out / draft), "--out", str(out / f"{draft}.profile")] for draft in drafts
    ]
    together(pairs, out, [f"{draft}-profile" for draft in drafts])
    studies = {draft: write_study(out, target, draft, args.prompts, args.length) for draft in drafts}
    evidence = [sys.executable, "-m", "forerun_research.scripts.prefill_evidence", "--device", args.device]
    evidence += ["--out", str(out), "--seconds", str(left(0.97)), "--kv-cache-tokens", "20000"]
    evidence += [] if args.data is None else ["--data", str(args.data)]
    together([[*evidence, str(path)] for path in studies.values()], out, [f"{draft}-study" for draft in drafts])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
