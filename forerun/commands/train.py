"""`forerun train`: train drafters that draft several tokens in one pass, measure them, write them for other engines."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.commands.screen import print_table
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.train.run import Drafter

app = typer.Typer(no_args_is_help=True, help="Train drafters for a model, on this machine.")

KINDS = ("parallel", "block", "heads")
RATES = {"parallel": 4e-4, "block": 8e-4, "heads": 1e-3}  # of Adam, at its highest
JOB_OPTIONS = ("answers", "text_tokens", "mask_token", "answer_minutes", "writer", "start")
FULL_RATE = 3e-5  # of `parallel` where the weights themselves are trained


@dataclass(frozen=True)
class TrainOptions:
    """What a drafter is trained on, and how; see `TrainJob` and `TrainSettings`."""

    kind: str | None = opt.shown(
        None,
        help="parallel: --draft learns to draft by masks. block: small layers on the target's hidden states. "
        "heads: a matrix for each token (Medusa). Default: parallel with --draft, else block.",
    )
    text: list[Path] | None = opt.shown(
        None, help="UTF-8 text, .jsonl with a `text` field, or a folder of such; may be repeated."
    )
    answers: int = opt.shown(2000, min=0, help="Answers of the target itself to train on, made first.")
    answer_minutes: float | None = opt.shown(None, help="Stop making answers after this time.")
    writer: str = opt.shown(
        "auto",
        help="What makes the answers: engine, or batch (prompts of many kinds, all at once: fast on a GPU, slow on a "
        "CPU). auto: batch on a GPU.",
    )
    start: Path | None = opt.shown(
        None, help="A trained drafter of the same models whose training goes on: parallel, or block."
    )
    text_tokens: int = opt.shown(2_000_000, min=0, help="Most tokens of --text used.")
    minutes: float = opt.shown(30.0, help="Time for training, beside answers and measuring.")
    tokens: int = opt.shown(10, min=2, max=32, help="Tokens drafted in one forward.")
    rank: int = opt.shown(32, min=1, help="Of the changes, or of a block's Markov head: the file grows with it.")
    markov: int = opt.shown(
        0, min=0, help="parallel: rank of a head that corrects a draft by the token before (32). Not in PARD folders."
    )
    markov_only: bool = opt.shown(
        False, "--markov-only", help="parallel: train nothing but that head; what --start has stays as it is."
    )
    optimizer: str = opt.shown(
        "adam", help="adam, or muon for the matrices of a block's layers (and of --full): more is learnt in a step."
    )
    bits: int = opt.shown(8, help="block: of its layers' weights in the file, 8 or 5; trained as they are rounded.")
    full: bool = opt.shown(
        False, "--full", help="parallel: train the draft's own matrices; --out is a model folder in PARD's format."
    )
    layers: int = opt.shown(1, min=1, max=3, help="Layers of a block.")
    reuse: str = opt.shown(
        "hidden", help="What a block reads of the tokens before it: hidden (states), kv (the target's), or both."
    )
    state_norms: bool = opt.shown(
        False, "--state-norms", help="block: a norm for each hidden state. Not for other engines."
    )
    state_input: bool = opt.shown(
        False, "--state-input", help="block: rows start from the hidden state before them. Not for other engines."
    )
    head_rank: int = opt.shown(0, min=0, help="block: rank of a head of its own. 0: the target's head.")
    vocab: int = opt.shown(16384, min=64, help="Tokens that a block or heads can draft: the most frequent ones.")
    attention_window: int = opt.shown(512, min=16, help="Tokens before it that a block reads.")
    window: int = opt.shown(512, min=32, help="Tokens of a training window.")
    long_window: int = opt.shown(4096, min=32, help="Tokens of the windows of every fourth step.")
    batch_tokens: int = opt.shown(8192, min=32, help="Tokens of a training step.")
    mask_token: int | None = opt.shown(None, help="Id of the mask. Default: one that no text uses.")
    no_measure: bool = opt.shown(False, "--no-measure", help="Leave the figures at the end out.")
    seed: int = opt.shown(0, help="Decides which text is used, and in which order.")


@app.command()
@opt.grouped
def drafter(
    target: Annotated[str, typer.Option("--target", help="The model whose answers are to be drafted.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The drafter's file; FILE.state lies beside it until done.")],
    how: TrainOptions,
    draft: Annotated[
        str | None, typer.Option("--draft", "-d", help="A smaller model of the same family, which is trained.")
    ] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Train a drafter that drafts several tokens in one pass, and measure in the engine what it is worth.

    With --draft a smaller model of the family learns it (PARD); without, small layers or heads are trained on the
    target's own hidden states. The file is used with: --draft-model FILE. Ctrl-C leaves a state beside it: the same
    command resumes from there.

    Example: forerun train drafter --target qwen2.5-coder-1.5b-instruct --draft qwen2.5-coder-0.5b-instruct
    --text src/ --answers 4000 --minutes 60 --out coder.safetensors
    """
    kind = how.kind or ("block" if draft is None else "parallel")
    if kind not in KINDS:
        raise BadRequest(f"--kind is {kind!r}", f"use one of {', '.join(KINDS)}")
    if (kind == "parallel") != (draft is not None):
        need = "changes a draft model, and --draft is not given" if draft is None else "reads the target alone"
        raise BadRequest(f"--kind {kind} {need}", "use --kind parallel with --draft, block or heads without")
    if how.full and kind != "parallel":
        raise BadRequest(f"--full is for --kind parallel, this is {kind}", "leave --full out")
    if how.full == (out.suffix == ".safetensors"):
        form = "a folder, without .safetensors" if how.full else "a file that ends in .safetensors"
        raise BadRequest(f"--out is {out}", f"give {form}")
    import torch

    from forerun.models.build import choose_device
    from forerun.train.run import TrainJob, train_drafter
    from forerun.train.trainer import TrainSettings

    if threads is not None:
        torch.set_num_threads(threads)
    common = {name: getattr(how, name) for name in JOB_OPTIONS}
    job = TrainJob(target, draft, out, tuple(how.text or ()), **common)
    known = {field.name for field in fields(TrainSettings)} - {"kind"}
    same = {field.name: getattr(how, field.name) for field in fields(how) if field.name in known}
    settings = TrainSettings(kind=kind, rate=FULL_RATE if how.full else RATES[kind], **same)
    made = train_drafter(job, settings, choose_device(device), measure=not how.no_measure)
    if as_json:
        print(json.dumps(_record(made, out)))
    else:
        _show(made, out)


@app.command()
def pard(
    drafter: Annotated[Path, typer.Argument(help="A file of `forerun train drafter`.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    draft: Annotated[str | None, typer.Option("--draft", "-d", help="The draft model, if not found by name.")] = None,
) -> None:
    """Write a trained drafter as a whole model folder in PARD's format, which vLLM reads too.

    Example: forerun train pard coder.safetensors coder-pard/
    """
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.adapter import AdaptedCheckpoint, DrafterFile
    from forerun.models.formats.checkpoint import open_checkpoint
    from forerun.models.formats.pard import write_pard

    made = DrafterFile.load(drafter)
    base = open_checkpoint(resolve(draft or made.names["draft"]))
    made.check_draft(base)
    write_pard(AdaptedCheckpoint(base, made), made.parallel, folder)
    print(f"{folder}: drafts {made.parallel.tokens} tokens in one forward for {made.names['target']}")


@app.command()
def speculators(
    drafter: Annotated[Path, typer.Argument(help="A file of `forerun train drafter --kind block`.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the folder.")],
    target: Annotated[str | None, typer.Option("--target", help="The target, if not found by name.")] = None,
) -> None:
    """Write a trained block drafter as a DSpark folder of the `speculators` package, which vLLM reads too.

    Example: forerun train speculators block.safetensors block-dspark/
    """
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint
    from forerun.models.formats.hidden_drafter import HiddenDrafterWeights, write_speculators

    made = HiddenDrafterWeights.load(drafter)
    write_speculators(made, open_checkpoint(resolve(target or made.target_name)), folder)
    print(f"{folder}: drafts {made.tokens} tokens in one pass for {made.target_name}")


def _record(made: Drafter, out: Path) -> dict[str, Any]:
    about = {"drafter": str(out), "kind": made.kind, "names": made.names, "bytes": _bytes(out)}
    return about | {"tokens": made.tokens, "facts": made.facts}


def _bytes(out: Path) -> int:
    return sum(file.stat().st_size for file in out.iterdir()) if out.is_dir() else out.stat().st_size


def _show(made: Drafter, out: Path) -> None:
    if "figures" in made.facts:
        rows = [
            (r["kind"], str(r["context"]), r["way"], f"{r['tokens_per_round']:.2f}", f"{r['tokens_per_s']:.1f}")
            for r in made.facts["figures"]
        ]
        title = f"{made.names['target']}, drafted by {made.names.get('draft', made.kind)}"
        print_table(("kind", "context", "way", "tokens a round", "tokens/s"), rows, title=title)
        print(made.facts["worth"])
    print(f"{out}: {_bytes(out) / 1e6:.1f} MB")
