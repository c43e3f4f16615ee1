"""One command for one GPU: a drafter for a target without a small sibling, such as the default model.

    python -m forerun_research.scripts.train_default_drafter --target smollm2-135m-instruct --out drafter.safetensors

The target answers questions that it asks itself and continues source code; then a block (or heads) is trained on its
hidden states. Text is what is installed anyway: Python's standard library and packages under free licences, and this
package. No benchmark's prompts or answers. At the end it prints the name under which the file is found without being
named, and with --measure what it is worth on this machine.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

from forerun.models.build import choose_device
from forerun.models.fetch.store import resolve
from forerun.models.formats.adapter import drafter_name
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.train.run import TrainJob, train_drafter
from forerun.train.trainer import TrainSettings

PACKAGES = ("numpy", "networkx", "sympy", "jax", "torch", "transformers")  # BSD, MIT and Apache licences
RATES = {"block": 8e-4, "heads": 1e-3}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a drafter on a target's hidden states.")
    parser.add_argument("--target", required=True, help="a known name, or a model file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=tuple(RATES), default="block")
    parser.add_argument("--minutes", type=float, default=2.5, help="of training")
    parser.add_argument("--answer-minutes", type=float, default=1.0, help="of the target's answers before that")
    parser.add_argument("--answers", type=int, default=30_000, help="at most")
    parser.add_argument("--tokens", type=int, default=8, help="drafted in one pass")
    parser.add_argument("--rank", type=int, default=64, help="of a block's Markov head")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=16_384)
    parser.add_argument("--text-tokens", type=int, default=4_000_000)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, action="append", help="in place of what is installed; may be repeated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--measure", action="store_true", help="take figures at the end, in the engine")
    return parser.parse_args()


def installed_text() -> tuple[Path, ...]:
    """Source and documents that are on this machine anyway."""
    paths = sysconfig.get_paths()
    packages = [Path(paths["purelib"]) / name for name in PACKAGES]
    folders = [Path(__file__).parents[2] / "forerun", Path(paths["stdlib"]), *packages]
    return tuple(folder for folder in folders if folder.is_dir())


def main() -> int:
    args = parse_args()
    texts = tuple(args.text) if args.text else installed_text()
    sizes = {name: getattr(args, name) for name in ("tokens", "rank", "layers", "vocab", "batch_tokens", "window")}
    settings = TrainSettings(kind=args.kind, minutes=args.minutes, rate=RATES[args.kind], **sizes)
    job = TrainJob(
        args.target, None, args.out, texts, args.answers, args.text_tokens, answer_minutes=args.answer_minutes
    )
    made = train_drafter(job, settings, choose_device(args.device), measure=args.measure)
    name = drafter_name(open_checkpoint(resolve(args.target)))
    facts = {key: value for key, value in made.facts.items() if key != "text"}
    print(json.dumps({"file": str(args.out), "bytes": args.out.stat().st_size, "found_as": name, "facts": facts}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
