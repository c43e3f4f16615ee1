"""`forerun train drafter` from its arguments to a file: answers, training, measuring; each stage resumes by itself.

Refuses what cannot work (other tokens, a mask that is taken, no text) before anything long starts.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.models.fetch.store import resolve
from forerun.models.formats.adapter import AdaptedCheckpoint, DrafterFile
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.formats.fingerprint import fingerprint
from forerun.models.formats.pard import ParallelDrafting
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.files import find_files
from forerun.prefill.calibration.resume import CalibrationState
from forerun.train.answers import collect_answers, token_stream
from forerun.train.measure import (
    LONG_CONTEXT_TOKENS,
    DraftFigure,
    after_long_text,
    as_records,
    held_out_prompts,
    run_figures,
    worth,
)
from forerun.train.network import DraftNetwork
from forerun.train.trainer import Trainer, TrainSettings

ANSWER_TOKENS = 256  # of each of the target's answers, at most
MEASURED_CONTEXT = LONG_CONTEXT_TOKENS + 1024  # tokens that a measured request may hold


@dataclass(frozen=True)
class TrainJob:
    target: str
    draft: str
    out: Path
    texts: tuple[Path, ...] = ()
    answers: int = 0
    text_tokens: int = 2_000_000
    mask_token: int | None = None


def choose_mask(target: Checkpoint, draft: Checkpoint, given: int | None) -> int:
    """An id that the draft's embedding has and its tokenizer never gives."""
    used = draft.tokenizer().vocab_size
    if given is None and used < draft.config.vocab_size:
        return used
    if given is None:
        raise BadRequest(
            f"every id of {draft.source} stands for some text, so none is free for a mask",
            "name one that never occurs in your texts: --mask-token ID",
        )
    if not 0 <= given < draft.config.vocab_size:
        raise BadRequest(
            f"--mask-token is {given}, {draft.source} has {draft.config.vocab_size} tokens", "give another"
        )
    return given


def open_pair(job: TrainJob) -> tuple[Checkpoint, Checkpoint]:
    """Both models, opened and checked against each other."""
    target, draft = (open_checkpoint(resolve(name)) for name in (job.target, job.draft))
    if not target.tokenizer().same_tokens(draft.tokenizer()):
        raise BadRequest(
            f"the tokens of {draft.source} are not those of {target.source}", "train a draft model of the same family"
        )
    if not job.texts and not job.answers:
        raise BadRequest("there is nothing to train on", "give --answers N, --text FILES, or both")
    if job.texts:
        find_files(job.texts)  # raises where there is no text
    return target, draft


def train_drafter(job: TrainJob, settings: TrainSettings, device: torch.device, measure: bool = True) -> DrafterFile:
    target, draft = open_pair(job)
    mask = choose_mask(target, draft, job.mask_token)
    prints = fingerprint(target), fingerprint(draft)
    inputs = {"target": prints[0], "draft": prints[1], "mask": mask}
    inputs |= {name: value for name, value in asdict(settings).items() if name != "minutes"}
    state = CalibrationState(job.out, inputs)
    answers = job.out.with_name(job.out.name + ".answers.jsonl")
    if job.answers:
        with LLM(target, device=device.type, max_model_len=2048, max_num_seqs=256) as llm:
            collect_answers(llm, answers, job.answers, job.texts, ANSWER_TOKENS, settings.seed)
        _free(llm)
    stream = token_stream(target.tokenizer(), answers, job.texts, job.text_tokens, settings.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = DraftNetwork.open(draft, device, dtype, mask, settings.rank, settings.seed)
    teacher = DenseModel.from_checkpoint(target, device, dtype)
    trainer = Trainer(network, teacher, stream, settings, mask)
    if "trainer" in state.values:
        trainer.load(state.values["trainer"])
    with state.defer_interrupt():
        trainer.run(state, float(state.values.get("spent_s", 0.0)))
    facts = {
        "settings": asdict(settings),
        "steps": trainer.steps,
        "trained_tokens": trainer.trained_tokens,
        "stream_tokens": len(stream),
        "answers": job.answers,
        "text": [path.name for path in job.texts],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    names = {"target": _name(job.target, target), "draft": _name(job.draft, draft)}
    drafter = DrafterFile(
        "parallel",
        *prints,
        names,
        ParallelDrafting(mask, settings.tokens),
        network.changes(),
        network.mask.detach().cpu(),
        facts,
    )
    drafter.save(job.out)
    del trainer, network, teacher
    _free()
    if measure:
        figures = measure_drafter(target, draft, DrafterFile.load(job.out), device)
        drafter.facts |= {"figures": as_records(figures), "worth": worth(figures)[1]}
        drafter.save(job.out)
    state.remove()
    return drafter


def measure_drafter(
    target: Checkpoint, draft: Checkpoint, drafter: DrafterFile, device: torch.device
) -> list[DraftFigure]:
    """The trained drafter beside plain decoding and the untrained draft, at two lengths of context."""
    figures: list[DraftFigure] = []
    ways: tuple[tuple[str, str, Checkpoint | None], ...] = (
        ("plain", "off", None),
        ("untrained", "model", draft),
        ("parallel", "parallel", AdaptedCheckpoint(draft, drafter)),
    )
    for way, name, model in ways:
        context = min(MEASURED_CONTEXT, target.config.max_context)
        with LLM(target, draft_model=model, device=device.type, max_model_len=context, quiet=True) as llm:
            short = held_out_prompts(llm)
            room = context - 256 - max(len(ids) for found in short.values() for ids in found)
            for prompts in (short, after_long_text(llm, short, min(LONG_CONTEXT_TOKENS, room))):
                figures += run_figures(llm, way, name, drafter.parallel.tokens, prompts, _show_progress)
        _free(llm)
    return figures


def _show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _name(given: str, checkpoint: Checkpoint) -> str:
    """A name by which others may open it: not a path of this machine."""
    return checkpoint.source if Path(given).exists() else given


def _free(*_: object) -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
