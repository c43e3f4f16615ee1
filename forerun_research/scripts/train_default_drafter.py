"""One command for one GPU: the drafters that are shipped, for the default model alone or for a target and its draft.

    python -m forerun_research.scripts.train_default_drafter --target smollm2-135m-instruct \\
        --out small.safetensors --ship
    python -m forerun_research.scripts.train_default_drafter --target qwen2.5-coder-1.5b-instruct \\
        --draft qwen2.5-coder-0.5b-instruct --out pair.safetensors --ship

The target answers prompts of many kinds and questions that it asks itself, and continues source code; then a block (or
heads) is trained on its hidden states, or with --draft that model's parallel drafting. Text is what is installed
anyway: Python's standard library and packages under free licences, and this package. No benchmark's prompts or answers.
--measure takes figures in the engine at the end. --ship puts the file where it is found without being named, if it is
small enough, and its card into the README beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from forerun.errors import BadRequest
from forerun.models.build import choose_device
from forerun.models.fetch.store import resolve
from forerun.models.formats.adapter import drafter_name
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.drafter_file import drafter_folders
from forerun.prefill.calibration.dense import DenseModel
from forerun.train.answers import MAX_ROWS, write_answers
from forerun.train.run import WRITERS, Drafter, TrainJob, train_drafter
from forerun.train.trainer import OPTIMIZERS, REUSES, TrainSettings

PACKAGES = ("numpy", "networkx", "sympy", "jax", "torch", "transformers")  # BSD, MIT and Apache licences
RATES = {"block": 8e-4, "heads": 1e-3, "parallel": 4e-4}
SAVING_S = 12.0  # of the whole time, for the file
MAX_PACKAGED_BYTES, MAX_ARTIFACT_BYTES = 12_000_000, 50_000_000  # of a file in the wheel, and under artifacts/
SIZES = (
    *("tokens", "rank", "markov", "markov_only", "layers", "vocab", "batch_tokens", "window", "long_window"),
    *("bits", "reuse", "state_norms", "state_input", "head_rank", "attention_window", "max_steps", "seed", "optimizer"),
)


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    known = TrainSettings()
    parser = argparse.ArgumentParser(description="Train a drafter that is shipped.")
    parser.add_argument("--target", required=True, help="a known name, or a model file")
    parser.add_argument("--draft", help="a smaller model of the family, which learns to draft in parallel")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=tuple(RATES), help="default: parallel with --draft, else block")
    parser.add_argument("--minutes", type=float, default=2.5, help="of training")
    parser.add_argument("--answer-minutes", type=float, default=1.0, help="of the target's answers before that")
    parser.add_argument("--answers", type=int, default=200_000, help="at most")
    parser.add_argument("--answers-only", action="store_true", help="write them to --out, lines of token ids, and end")
    parser.add_argument("--rows", type=int, default=MAX_ROWS, help="of a batch of --answers-only, at most")
    parser.add_argument("--seed", type=int, default=known.seed, help="of the prompts and of training")
    parser.add_argument("--max-steps", type=int, default=known.max_steps, help="of training; 0: any number")
    parser.add_argument("--tokens", type=int, help="drafted in one pass; default 5, with --draft 12")
    parser.add_argument("--rank", type=int, help="of a block's Markov head, default 32; of a draft's changes, 64")
    parser.add_argument("--markov", type=int, default=known.markov, help="rank of a draft's Markov head; 0: none")
    parser.add_argument("--markov-only", action="store_true", help="train nothing but that head, beside --start")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=12_288)
    parser.add_argument("--rate", type=float, help="of Adam, at its highest")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=known.optimizer)
    parser.add_argument("--start", type=Path, help="a drafter of the same kind and models whose training goes on")
    parser.add_argument("--writer", choices=WRITERS, default="auto", help="what makes the answers")
    parser.add_argument("--total-minutes", type=float, help="training ends so early that all of it takes so long")
    parser.add_argument("--reuse", choices=REUSES, default=known.reuse)
    parser.add_argument("--state-norms", action="store_true")
    parser.add_argument("--no-state-input", dest="state_input", action="store_false", help="rows start from masks")
    parser.add_argument("--head-rank", type=int, default=known.head_rank)
    parser.add_argument("--bits", type=int, choices=(5, 8), default=known.bits, help="of a block's layers")
    parser.add_argument("--attention-window", type=int, default=known.attention_window)
    parser.add_argument("--text-tokens", type=int, default=0, help="of the text itself, beside the target's answers")
    parser.add_argument("--batch-tokens", type=int, help="of one step; default 16,384, with --draft 12,288")
    parser.add_argument("--window", type=int, default=known.window)
    parser.add_argument("--long-window", type=int, default=known.long_window)
    parser.add_argument("--text", type=Path, action="append", help="in place of what is installed; may be repeated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--measure", action="store_true", help="take figures at the end, in the engine")
    parser.add_argument("--ship", action="store_true", help="put the file and its card where they are shipped")
    found = parser.parse_args(args)
    found.kind = found.kind or ("parallel" if found.draft else "block")
    found.tokens = found.tokens or (12 if found.draft else 5)
    found.rank = found.rank or (64 if found.draft else 32)
    found.batch_tokens = found.batch_tokens or (12_288 if found.draft else 16_384)
    found.rate = found.rate or RATES[found.kind]
    found.state_input = found.state_input and found.kind == "block" and found.reuse != "kv"
    return found


def installed_text() -> tuple[Path, ...]:
    """Source and documents that are on this machine anyway."""
    paths = sysconfig.get_paths()
    packages = [Path(paths["purelib"]) / name for name in PACKAGES]
    folders = [
        Path(__file__).parents[2] / "forerun",
        Path(__file__).parents[2] / "docs",
        Path(paths["stdlib"]),
        *packages,
    ]
    return tuple(folder for folder in folders if folder.is_dir())


def card(name: str, made: Drafter, size: int, minutes: float) -> str:
    """What stands in the README beside a shipped file."""
    facts: dict[str, Any] = made.facts
    settings = facts["settings"]
    data = f"{facts['answers']:,} greedy answers of the target, to made prompts, its own questions and excerpts"
    lines = [
        f"## {name}",
        "| | |",
        "|---|---|",
        *(f"| {role} | {model} |" for role, model in made.names.items()),
        f"| kind | `{made.kind}`: {made.tokens} tokens in one pass, {size / 1e6:.1f} MB |",
        f"| data | {data}; text of {', '.join(sorted(set(facts['text'])))}. No benchmark's prompts or answers. |",
        f"| training | {minutes:g} minutes on {facts['device']}: {facts['steps']:,} steps, "
        f"{facts['trained_tokens'] / 1e6:.1f} M tokens in windows of {settings['window']}, every fourth step "
        f"{settings['long_window']} |",
        f"| worth | {facts.get('worth', 'not measured here')} |",
        "| licence | Apache-2.0, as the models |",
    ]
    if "figures" in facts:
        lines += ["", "| kind of text | context | way | tokens a round | tokens/s |", "|---|---|---|---|---|"]
        lines += [
            f"| {f['kind']} | {f['context']} | {f['way']} | {f['tokens_per_round']:.2f} | {f['tokens_per_s']:.0f} |"
            for f in facts["figures"]
        ]
    return "\n".join(lines) + "\n"


def ship(out: Path, made: Drafter, name: str, minutes: float) -> Path:
    """The file under the name by which it is found, and its card in place of an earlier one."""
    packaged, artifacts, _ = drafter_folders()
    folder, limit = (artifacts, MAX_ARTIFACT_BYTES) if made.kind == "parallel" else (packaged, MAX_PACKAGED_BYTES)
    size = out.stat().st_size
    if size > limit:
        hint = "give a smaller --rank, --vocab or --layers"
        raise BadRequest(f"{out} has {size:,} bytes, at most {limit:,} are shipped in {folder.name}", hint)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(out, folder / name)
    readme = folder / "README.md"
    before = readme.read_text() if readme.exists() else "# Trained drafters\n"
    parts = [part for part in before.split("\n## ") if not part.startswith(name)]
    readme.write_text("\n## ".join(parts).rstrip("\n") + "\n\n" + card(name, made, size, minutes))
    return folder / name


def answer(args: argparse.Namespace, texts: tuple[Path, ...]) -> int:
    """The target's answers alone: several processes keep one GPU busy where one waits for its host."""
    target, device = open_checkpoint(resolve(args.target)), choose_device(args.device)
    model = DenseModel.from_checkpoint(target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    how = (args.seed, args.answer_minutes, args.rows)
    write_answers(model, target.tokenizer(), args.out, args.answers, texts, *how)
    return 0


def main(given: list[str] | None = None) -> int:
    args, begun = parse_args(given), time.monotonic()
    texts = tuple(args.text) if args.text else installed_text()
    if args.answers_only:
        return answer(args, texts)
    sizes = {name: getattr(args, name) for name in SIZES}
    settings = TrainSettings(kind=args.kind, minutes=args.minutes, rate=args.rate, **sizes)
    data = (args.answers, args.text_tokens)
    how: dict[str, Any] = {"writer": args.writer, "start": args.start}
    if args.total_minutes is not None:
        how["deadline"] = begun + 60.0 * args.total_minutes - SAVING_S
    job = TrainJob(args.target, args.draft, args.out, texts, *data, answer_minutes=args.answer_minutes, **how)
    made = train_drafter(job, settings, choose_device(args.device), measure=args.measure)
    models = [args.target] if args.draft is None else [args.target, args.draft]
    name = drafter_name(*(open_checkpoint(resolve(model)) for model in models))
    if args.ship:
        ship(args.out, made, name, args.minutes)
    facts = {key: value for key, value in made.facts.items() if key != "text"}
    print(json.dumps({"file": str(args.out), "bytes": args.out.stat().st_size, "found_as": name, "facts": facts}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
