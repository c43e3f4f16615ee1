"""`forerun train drafter` from its arguments to a file: answers, training, measuring; each stage resumes by itself.

Refuses what cannot work (other tokens, a mask that is taken, no text) before anything long starts.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.models.fetch.store import resolve
from forerun.models.formats.adapter import AdaptedCheckpoint, DrafterFile
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.formats.fingerprint import fingerprint
from forerun.models.formats.hf_writer import hf_values
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.models.formats.pard import ParallelDrafting, write_pard
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.files import find_files
from forerun.prefill.calibration.resume import CalibrationState
from forerun.train.answers import collect_answers, count_answers, token_stream, write_answers
from forerun.train.block import BlockNetwork
from forerun.train.heads import HeadsNetwork
from forerun.train.loss import LOSS_IDS
from forerun.train.measure import (
    CONTEXT_LENGTHS,
    DraftFigure,
    at_context,
    held_out_prompts,
    run_figures,
    worth,
)
from forerun.train.parallel import DraftNetwork
from forerun.train.trainer import Trainer, TrainSettings

ANSWER_TOKENS = 256  # of each of the target's answers, at most
WRITERS = ("auto", "engine", "batch")
MEASURED_ROOM = 256  # tokens of context behind a measured prompt: its answer and drafts


@dataclass(frozen=True)
class TrainJob:
    target: str
    draft: str | None  # None: a drafter on the target's own hidden states
    out: Path
    texts: tuple[Path, ...] = ()
    answers: int = 0
    text_tokens: int = 2_000_000
    mask_token: int | None = None
    answer_minutes: float | None = None  # after which no further answers are begun
    writer: str = "auto"  # of the answers: the engine, or a batch of the dense network; auto: the latter on CUDA
    start: Path | None = None  # a drafter of the same kind and models whose training goes on
    deadline: float | None = None  # by the monotonic clock: training ends there, whatever its minutes are

    def batched(self, device: torch.device) -> bool:
        return self.writer == "batch" or (self.writer == "auto" and device.type == "cuda")


def choose_mask(target: Checkpoint, draft: Checkpoint, given: int | None) -> int:
    """An id that the draft's embedding has and its tokenizer never gives."""
    used = draft.tokenizer().vocab_size
    if given is None and used < draft.config.vocab_size:
        return used
    if given is None:
        hint = "name one that never occurs in your texts: --mask-token ID"
        raise BadRequest(f"every id of {draft.source} stands for some text, so none is free for a mask", hint)
    if not 0 <= given < draft.config.vocab_size:
        hint = "give another"
        raise BadRequest(f"--mask-token is {given}, {draft.source} has {draft.config.vocab_size} tokens", hint)
    return given


def open_pair(job: TrainJob) -> tuple[Checkpoint, Checkpoint]:
    """Both models, opened and checked against each other."""
    target, draft = (open_checkpoint(resolve(str(name))) for name in (job.target, job.draft))
    if not target.tokenizer().same_tokens(draft.tokenizer()):
        hint = "train a draft model of the same family"
        raise BadRequest(f"the tokens of {draft.source} are not those of {target.source}", hint)
    check_texts(job)
    return target, draft


def check_texts(job: TrainJob) -> None:
    if not job.texts and not job.answers:
        raise BadRequest("there is nothing to train on", "give --answers N, --text FILES, or both")
    missing = [path for path in job.texts if not path.exists()]
    if missing:
        raise BadRequest(f"cannot read {missing[0]}: there is no such file", "give files or folders of text")
    if job.texts and job.text_tokens:
        find_files(job.texts)  # raises where there is no text
    if job.writer not in WRITERS:
        raise BadRequest(f"the writer of answers is {job.writer!r}", f"use one of {', '.join(WRITERS)}")


@dataclass
class WholeDraft:
    """A draft model whose matrices were trained: written as a model folder in PARD's format."""

    base: Checkpoint
    made: DrafterFile
    kind = "parallel"

    def __post_init__(self) -> None:
        self.names, self.facts, self.parallel, self.tokens = (
            self.made.names,
            self.made.facts,
            replace(self.made.parallel, target=self.made.target),
            self.made.tokens,
        )

    def save(self, folder: Path) -> None:
        facts = {"names": self.names} | self.facts
        write_pard(AdaptedCheckpoint(self.base, self.made), self.parallel, folder, facts=facts)


Drafter = DrafterFile | HiddenDrafterWeights | WholeDraft


class ParallelRun:
    """A draft model that is changed: see `train_drafter`."""

    def __init__(self, job: TrainJob, settings: TrainSettings) -> None:
        self.job, self.settings = job, settings
        self.target, self.draft = open_pair(job)
        self.mask = choose_mask(self.target, self.draft, job.mask_token)
        self.prints = fingerprint(self.target), fingerprint(self.draft)
        self.inputs = {"target": self.prints[0], "draft": self.prints[1], "mask": self.mask}
        self.start = self._opened_start()

    def _opened_start(self) -> DrafterFile | None:
        """The drafter whose training goes on: of the same two models, and small enough to go into the changes."""
        if self.job.start is None:
            if self.settings.markov_only:
                raise BadRequest("training: markov_only goes on from a trained drafter", "name it: --start FILE")
            return None
        found = DrafterFile.load(self.job.start)
        found.check(self.target, self.draft)
        rank = max(len(a) for a, _ in found.low_rank.values())
        if self.settings.full or rank > self.settings.rank:
            problem = f"{self.job.start} has changes of rank {rank}, which cannot go on at rank {self.settings.rank}"
            raise BadRequest(problem, f"give --rank {rank} or more, and no --full")
        had = 0 if found.markov is None else found.markov[0].shape[1]
        if had not in (0, self.settings.markov):
            problem = f"{self.job.start} has a Markov head of rank {had}, which cannot go on at {self.settings.markov}"
            raise BadRequest(problem, f"give rank {had}")
        self.inputs["start"] = hashlib.sha256(self.job.start.read_bytes()).hexdigest()
        return found

    def network(self, teacher: DenseModel, stream: np.ndarray) -> DraftNetwork:
        s, rank = self.settings, None if self.settings.full else self.settings.rank
        made = DraftNetwork.open(self.draft, teacher.device, teacher.dtype, self.mask, rank, s.seed)
        if s.markov:
            made.add_markov(s.markov, s.seed)
        if self.start is not None:
            made.go_on_from(self.start.low_rank, self.start.mask, self.start.markov)
        if s.markov_only:
            made.freeze()
        return made

    def made(self, network: DraftNetwork, facts: dict[str, Any]) -> DrafterFile | WholeDraft:
        names = {"target": _name(self.job.target, self.target), "draft": _name(str(self.job.draft), self.draft)}
        parallel, mask, changes = ParallelDrafting(self.mask, self.settings.tokens), network.mask, network.changes()
        if self.settings.markov_only and self.start is not None:  # to the bit: profiles know the draft by its changes
            mask, changes = self.start.mask, self.start.low_rank
        whole = {name: value.detach().cpu() for name, value in network.whole.items()}
        made = DrafterFile("parallel", *self.prints, names, parallel, changes, mask.detach().cpu(), facts, whole=whole)
        made.markov = network.markov()
        return WholeDraft(self.draft, made) if whole else made

    def ways(self, out: Path) -> tuple[tuple[str, str, Checkpoint | None], ...]:
        """How figures are taken: name, drafter, and what is opened as the draft."""
        whole = out.is_dir()
        adapted = open_checkpoint(out) if whole else AdaptedCheckpoint(self.draft, DrafterFile.load(out))
        return ("plain", "off", None), ("untrained", "model", self.draft), ("parallel", "parallel", adapted)


class HiddenRun:
    """A drafter on the target's own hidden states."""

    def __init__(self, job: TrainJob, settings: TrainSettings) -> None:
        self.job, self.settings = job, settings
        self.target = open_checkpoint(resolve(job.target))
        check_texts(job)
        self.print = fingerprint(self.target)
        self.inputs = {"target": self.print}
        self.start = self._opened_start()

    def _opened_start(self) -> HiddenDrafterWeights | None:
        """The block whose training goes on: of the same target and of the same sizes, or with fewer layers."""
        if self.job.start is None:
            return None
        found, s = HiddenDrafterWeights.load(self.job.start), self.settings
        if s.kind != "block" or found.kind != "block":
            kinds = f"{self.job.start} is of kind {found.kind}, this is {s.kind}"
            raise BadRequest(f"training goes on from blocks and parallel drafters: {kinds}", "leave it out")
        found.check(self.target)
        had = {"tokens": found.tokens, "layers": found.layers.num_layers, "rank": found.config.get("markov_rank", 0)}
        had |= {"reuse": found.reuse, "head_rank": found.head_rank, "state_norms": bool(found.config.get("fc_norm"))}
        had |= {"state_input": bool(found.config.get("state_input"))}
        grows = had["layers"] < s.layers and s.reuse == "hidden"  # others read K/V of one layer of the target each
        other = {name: v for name, v in had.items() if getattr(s, name) != v and not (name == "layers" and grows)}
        if other:
            given = ", ".join(f"{name} is {getattr(s, name)}" for name in other)
            wanted = ", ".join(f"{name} {value}" for name, value in other.items())
            raise BadRequest(f"{self.job.start} cannot go on: {given}", f"it was trained with {wanted}")
        self.inputs["start"] = hashlib.sha256(self.job.start.read_bytes()).hexdigest()
        return found

    def network(self, teacher: DenseModel, stream: np.ndarray) -> HeadsNetwork | BlockNetwork:
        counts = np.bincount(stream, minlength=self.target.config.vocab_size)
        order = np.argsort(-counts, kind="stable")[: self.settings.vocab]
        ids = torch.from_numpy(np.sort(order[order < LOSS_IDS])) if self.start is None else self.start.draft_ids
        self.covered = float(counts[ids.numpy()].sum() / max(1, len(stream)))
        if self.settings.kind == "heads":
            return HeadsNetwork(teacher, ids, self.settings)
        mask = self._mask_token() if self.start is None else int(self.start.config["mask_token_id"])
        made = BlockNetwork(teacher, ids, self.settings, mask)
        if self.start is not None:
            made.go_on_from(self.start.tensors)
        return made

    def made(self, network: HeadsNetwork | BlockNetwork, facts: dict[str, Any]) -> HiddenDrafterWeights:
        config, tensors = network.saved()
        ids = network.ids.cpu()
        if len(ids) < self.target.config.vocab_size:
            tensors["d2t"] = ids - torch.arange(len(ids))
        architecture = hf_values(self.target.config)["architectures"]
        config["speculators_config"] = {
            "algorithm": config["speculators_model_type"],
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.settings.tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": _name(self.job.target, self.target), "architectures": architecture},
        }
        facts |= {"vocabulary": len(ids), "covered": round(self.covered, 4)}
        return HiddenDrafterWeights(config, tensors, self.job.out.name, self.print, facts, self.job.out)

    def _mask_token(self) -> int:
        """A special token, or one that no text uses, whose embedding is not zero: the mask is read from the target."""
        tokenizer, vocab = self.target.tokenizer(), self.target.config.vocab_size
        if self.job.mask_token is not None:
            return choose_mask(self.target, self.target, self.job.mask_token)
        special = sorted(set(tokenizer.special_ids) - set(tokenizer.eos_ids), reverse=True)
        possible = torch.tensor([*special, *range(tokenizer.vocab_size, vocab), vocab - 1])
        usable = self.target.rows("embed", possible).norm(dim=1) > 0.0
        return int(possible[usable][0])

    def ways(self, out: Path) -> tuple[tuple[str, str, HiddenDrafterWeights | None], ...]:
        kind = self.settings.kind
        return ("plain", "off", None), ("untrained", "lookup", None), (kind, kind, HiddenDrafterWeights.load(out))


def train_drafter(job: TrainJob, settings: TrainSettings, device: torch.device, measure: bool = True) -> Drafter:
    run: Any = ParallelRun(job, settings) if settings.kind == "parallel" else HiddenRun(job, settings)
    inputs = run.inputs | {name: value for name, value in asdict(settings).items() if name != "minutes"}
    state = CalibrationState(job.out, inputs)
    drafter = _train(run, job, settings, device, state)
    _free()
    if measure:
        figures, outcomes = measure_drafter(run.target, run.ways(job.out), settings.tokens, device)
        if isinstance(drafter, HiddenDrafterWeights):
            drafter.facts["outcomes"] = outcomes
        else:
            drafter.parallel = replace(drafter.parallel, outcomes=outcomes)
        drafter.facts |= {"figures": [asdict(figure) for figure in figures], "worth": worth(figures, settings.kind)[1]}
        drafter.save(job.out)
    state.remove()
    return drafter


def _train(run: Any, job: TrainJob, settings: TrainSettings, device: torch.device, state: CalibrationState) -> Drafter:
    """Answers, then training; leaves the drafter's file."""
    target, dtype = run.target, torch.bfloat16 if device.type == "cuda" else torch.float32
    answers = job.out.with_name(job.out.name + ".answers.jsonl")
    teacher = DenseModel.from_checkpoint(target, device, dtype) if job.batched(device) else None
    if job.answers and teacher is not None:
        told = (answers, job.answers, job.texts, settings.seed, job.answer_minutes)
        write_answers(teacher, target.tokenizer(), *told)
        _free()
    elif job.answers:
        options: dict[str, Any] = {"max_model_len": min(2048, target.config.max_context), "max_num_seqs": 256}
        with LLM(target, device=device.type, **options) as llm:
            collect_answers(llm, answers, job.answers, job.texts, ANSWER_TOKENS, settings.seed, job.answer_minutes)
        _free(llm)
    stream = token_stream(target.tokenizer(), answers, job.texts, job.text_tokens, settings.seed)
    teacher = teacher or DenseModel.from_checkpoint(target, device, dtype)
    network = run.network(teacher, stream)
    trainer = Trainer(network, teacher, stream, settings)
    if "trainer" in state.values:
        trainer.load(state.values["trainer"])
    about = {"stream_tokens": len(stream), "answers": count_answers(answers), "text": [p.name for p in job.texts]}

    def save() -> Drafter:
        facts = about | {"steps": trainer.steps, "trained_tokens": trainer.trained_tokens, "device": _device(device)}
        facts["agreement"] = [round(hits / max(1.0, rows), 3) for hits, rows in trainer.agreement.tolist()]
        made: Drafter = run.made(network, facts | {"settings": asdict(settings)})
        made.save(job.out)
        return made

    with state.defer_interrupt():
        trainer.run(state, float(state.values.get("spent_s", 0.0)), job.deadline, save)
    return save()


def measure_drafter(
    target: Checkpoint, ways: Sequence[tuple[str, str, Any]], depth: int, device: torch.device
) -> tuple[list[DraftFigure], dict[str, list[list[float]]]]:
    """The trained drafter beside plain decoding and what there was before, at two lengths of context; and how often the
    trained one's tokens were accepted, by kind of text and depth."""
    figures: list[DraftFigure] = []
    outcomes: dict[str, list[list[float]]] = {}
    for way, name, draft in ways:
        context = min(max(CONTEXT_LENGTHS) + MEASURED_ROOM, target.config.max_context)
        with LLM(target, draft_model=draft, device=device.type, max_model_len=context, quiet=True) as llm:
            short = held_out_prompts(llm)
            for length in CONTEXT_LENGTHS:
                prompts = at_context(llm, short, min(length, context - MEASURED_ROOM))
                figures += run_figures(llm, way, name, depth, prompts, _show_progress)
            kinds = llm.engine.speculator.controller.acceptance.records[name].kinds
            outcomes = {kind: known.depths for kind, known in kinds.items() if known.total[1]}
        _free(llm)
    return figures, outcomes


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def _show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _name(given: str, checkpoint: Checkpoint) -> str:
    """A name by which others may open it: not a path of this machine."""
    return checkpoint.source if Path(given).exists() else given


def _free(*_: object) -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
