"""A trained drafter as one small file: low-rank changes to a draft model's matrices, and the embedding of its mask.

The file carries the fingerprints of the target it was trained for and of the draft model it changes, and a checksum;
it is refused where one differs. `AdaptedCheckpoint` is the draft model with the changes in it, so loaders, decoders
and drafters need not know. Trained drafters are found by the fingerprints of the models, without being named.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import BadDrafter
from forerun.models.cpu.quantise import quantise
from forerun.models.fetch.store import resolve
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from forerun.models.formats.dequant import as_stored
from forerun.models.formats.drafter_file import (
    TRAIN_HINT,
    drafter_folders,
    not_whole,
    read_drafter,
    write_drafter,
)
from forerun.models.formats.fingerprint import fingerprint, sampled_fingerprint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights, is_speculators
from forerun.models.formats.pard import ParallelDrafting
from forerun.models.formats.signed_file import restored, rounded
from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun")

# Of matrices that a drafter changes. A 0.5B on HumanEval: 3.75 tokens a round of depth 4 and 4.75 of depth 10, with 8
# bits 3.70 and 5.00; a round of one row takes 10.6 ms instead of 16.8.
CHANGED_BITS = 5
MARKOV = ("markov_previous", "markov_following")  # in a file
NAME_DIGITS = 12  # of each model's sampled fingerprint in a file's name


@dataclass
class DrafterFile:
    kind: str  # parallel
    target: str  # fingerprint of the target's weights
    draft: str  # fingerprint of the weights that are changed
    names: dict[str, str]  # target, draft -> name of the checkpoint
    parallel: ParallelDrafting
    low_rank: dict[str, tuple[Tensor, Tensor]]  # matrix -> what is added to it is b @ a: a [r, in], b [out, r]
    mask: Tensor  # [hidden] the mask's embedding
    facts: dict[str, Any] = field(default_factory=dict)  # how it was made: data, minutes, figures
    path: Path | None = None
    whole: dict[str, Tensor] = field(default_factory=dict)  # trained matrices in place of changes; never in a file
    markov: tuple[Tensor, Tensor] | None = None  # [tokens, r] of the token before and of the one that follows

    @property
    def tokens(self) -> int:
        """Drafted in one forward."""
        return self.parallel.tokens

    def save(self, path: Path) -> None:
        tensors = {"mask": self.mask.detach().float().cpu().contiguous()}
        for name, (a, b) in self.low_rank.items():
            tensors |= rounded(f"{name}.a", a) | rounded(f"{name}.b", b)
        for name, value in zip(MARKOV, self.markov or (), strict=False):
            tensors |= rounded(name, value)
        about = {name: getattr(self, name) for name in ("kind", "target", "draft", "names", "facts")}
        write_drafter(path, tensors, about | {"parallel": asdict(self.parallel)})

    @classmethod
    def load(cls, path: Path) -> DrafterFile:
        return cls.of(path, *read_drafter(path))

    @classmethod
    def of(cls, path: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> DrafterFile:
        """What `read_drafter` found."""
        try:
            changes = (name for name in tensors if name != "mask" and not name.startswith("markov"))
            names = sorted({name.rsplit(".", 1)[0] for name in changes})
            markov = [restored(tensors, name) for name in MARKOV if name in tensors]
            low_rank = {name: (restored(tensors, f"{name}.a"), restored(tensors, f"{name}.b")) for name in names}
            parallel = ParallelDrafting(**about["parallel"])
            told = {name: about[name] for name in ("kind", "target", "draft", "names", "facts")}
            made = cls(**told, parallel=parallel, low_rank=low_rank, mask=tensors["mask"], path=path)
            made.markov = (markov[0], markov[1]) if len(markov) == 2 else None
            return made
        except (KeyError, TypeError, ValueError) as error:
            raise not_whole(path, error) from None

    def check(self, target: Checkpoint, draft: Checkpoint) -> None:
        """Raise unless it was trained for these models."""
        self.check_draft(draft)
        if self.target != fingerprint(target):
            problem = f"the drafter {self.path} was trained for {self.names.get('target')}, not for {target.source}"
            raise BadDrafter(problem, TRAIN_HINT)

    def check_draft(self, draft: Checkpoint) -> None:
        """Raise unless this is the draft model that it changes."""
        self._check_shapes(draft)
        if self.draft != fingerprint(draft):
            hint = f"use it with {self.names.get('draft')}, or {TRAIN_HINT}"
            raise BadDrafter(f"the drafter {self.path} changes {self.names.get('draft')}, not {draft.source}", hint)

    def _check_shapes(self, draft: Checkpoint) -> None:
        config, shapes = draft.config, expected_shapes(draft.config)
        fits = self.parallel.mask_token < config.vocab_size and self.mask.shape == (config.hidden_size,)
        for name, (a, b) in self.low_rank.items():
            fits = fits and len(shapes.get(name, ())) == 2 and (b.shape[0], a.shape[1]) == shapes[name]
        if self.markov is not None:
            one, two = self.markov
            fits = fits and one.shape == two.shape and len(one) <= config.vocab_size
        if not fits:
            raise BadDrafter(
                f"the drafter {self.path} has other shapes or another vocabulary than {draft.source}: it changes "
                f"{self.names.get('draft')}",
                f"use it with {self.names.get('draft')}, or {TRAIN_HINT}",
            )


class AdaptedCheckpoint:
    """A draft model with a trained drafter's changes in it; see `Checkpoint`."""

    def __init__(self, base: Checkpoint, drafter: DrafterFile) -> None:
        self.base, self.drafter = base, drafter
        self.config, self.quantised, self.parallel = base.config, base.quantised, drafter.parallel
        self.source, self.markov = f"{base.source} (trained to draft in parallel)", drafter.markov
        self.files = base.files if drafter.path is None else (*base.files, drafter.path)

    def hash_parts(self) -> str:
        """Of the draft model and of the changes; see `fingerprint`."""
        digest = hashlib.sha256(fingerprint(self.base).encode())
        for name, parts in sorted(self.drafter.low_rank.items()):
            digest.update(name.encode() + b"".join(part.numpy().tobytes() for part in parts))
        return digest.hexdigest()

    def tensor(self, name: str, device: torch.device | None = None) -> Tensor:
        value = self.base.tensor(name, device)
        if name == "embed":
            value = value.clone()
            value[self.parallel.mask_token] = self.drafter.mask.to(value.dtype)
        if name in self.drafter.whole:
            return self.drafter.whole[name].to(value.device)
        if name not in self.drafter.low_rank:
            return value
        a, b = (part.to(value.device) for part in self.drafter.low_rank[name])
        return torch.addmm(value.float(), b, a)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        value = self.base.rows(name, ids)
        if name in self.drafter.low_rank:
            a, b = self.drafter.low_rank[name]
            value = torch.addmm(value, b[ids], a)
        if name == "embed":
            value[ids == self.parallel.mask_token] = self.drafter.mask
        return value

    def stored(self, name: str) -> tuple[str, Tensor]:
        """Changed matrices in CHANGED_BITS where the file has blocks, to run in the same kernels as the others; the
        embedding as the file has it: `with_mask` puts the mask's row in."""
        if name not in self.drafter.low_rank:
            return self.base.stored(name)
        return quantise(self.tensor(name), CHANGED_BITS) if self.quantised else as_stored(self.tensor(name))

    def with_mask(self, lookup: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Embeddings by token id, the mask's among them."""
        mask_token, row = self.parallel.mask_token, self.drafter.mask

        def rows(ids: Tensor) -> Tensor:
            found, masks = lookup(ids), ids == mask_token
            return torch.where(masks[..., None], row.to(found.dtype), found) if bool(masks.any()) else found

        return rows

    def tokenizer(self) -> Tokenizer:
        return self.base.tokenizer()

    def release(self) -> None:
        self.base.release()


# -- finding one -------------------------------------------------------------------------------------------------------


def drafter_name(*models: Checkpoint) -> str:
    """The file name under which a drafter for these models, the target first, is found."""
    return "-".join(sampled_fingerprint(model)[:NAME_DIGITS] for model in models) + ".safetensors"


def find_drafter(target: Checkpoint, draft: Checkpoint | None = None) -> DrafterFile | HiddenDrafterWeights | None:
    """The drafter trained for these models, if there is one: samples of their weights name the file, all of their
    weights decide."""
    folders = [folder for folder in drafter_folders() if folder.is_dir() and any(folder.iterdir())]
    if not folders:
        return None
    name = drafter_name(target) if draft is None else drafter_name(target, draft)
    for folder in folders:
        if (folder / name).is_file():
            try:
                return _load_checked(folder / name, target, draft)
            except BadDrafter as error:  # it was not asked for: the models work without it
                log.warning("a trained drafter for %s is left out: %s", target.source, error)
    return None


def adapted_draft(draft: Checkpoint, wanted: str) -> AdaptedCheckpoint | None:
    """The draft model with the changes of a trained drafter that give it this fingerprint, whatever its target is."""
    name = f"*-{sampled_fingerprint(draft)[:NAME_DIGITS]}.safetensors"
    for path in (path for folder in drafter_folders() if folder.is_dir() for path in sorted(folder.glob(name))):
        with suppress(BadDrafter):  # it was not asked for
            about, tensors = read_drafter(path)
            if about.get("kind") == "parallel":
                found = AdaptedCheckpoint(draft, DrafterFile.of(path, about, tensors))
                if fingerprint(found) == wanted:
                    return found
    return None


def draft_for_any(model: str | Path | Checkpoint) -> Checkpoint:
    """A draft model whose targets are elsewhere: by name, with a drafter trained for it where there is one, whatever
    target that was for; or a trained drafter's file. Of several the first file counts."""
    if not isinstance(model, (str, Path)):
        return model
    if str(model).endswith(".safetensors"):
        made = DrafterFile.load(Path(model))
        draft = open_checkpoint(resolve(made.names.get("draft", "")))
        made.check_draft(draft)
        return AdaptedCheckpoint(draft, made)
    draft = open_checkpoint(resolve(str(model)))
    if getattr(draft, "parallel", None) is not None:
        return draft
    folders = [folder for folder in drafter_folders() if folder.is_dir() and any(folder.iterdir())]
    name = f"*-{sampled_fingerprint(draft)[:NAME_DIGITS]}.safetensors" if folders else ""
    for path in (path for folder in folders for path in sorted(folder.glob(name))):
        try:
            made = DrafterFile.load(path)
            made.check_draft(draft)
            return AdaptedCheckpoint(draft, made)
        except BadDrafter as error:  # it was not asked for: the model drafts without it
            log.warning("a trained drafter of %s is left out: %s", draft.source, error)
    return draft


def _load_checked(path: Path, target: Checkpoint, draft: Checkpoint | None) -> DrafterFile | HiddenDrafterWeights:
    about, tensors = read_drafter(path)
    if about.get("kind") != "parallel":
        hidden = HiddenDrafterWeights.of(path, about, tensors)
        hidden.check(target)
        return hidden
    found = DrafterFile.of(path, about, tensors)
    found.check(target, draft or open_checkpoint(resolve(found.names["draft"])))
    return found


def open_draft(
    model: str | Path | Checkpoint | HiddenDrafterWeights | None, target: Checkpoint, search: bool = True
) -> Checkpoint | HiddenDrafterWeights | None:
    """What drafts for a target: a draft model by name, with the drafter trained for both where there is one; a trained
    drafter's file; a folder of the `speculators` package; without a name, a drafter trained for the target alone. What
    is open stays as it is. `search`: False leaves drafters that are not named out."""
    if model is None:
        found = find_drafter(target) if search else None
        return found if isinstance(found, HiddenDrafterWeights) else None
    if not isinstance(model, (str, Path)):
        return model
    if is_speculators(Path(model)):
        hidden = HiddenDrafterWeights.load(Path(model))
        hidden.check(target)
        return hidden
    if str(model).endswith(".safetensors"):
        drafter = _load_checked(Path(model), target, None)
        if isinstance(drafter, HiddenDrafterWeights):
            return drafter
        return AdaptedCheckpoint(open_checkpoint(resolve(drafter.names["draft"])), drafter)
    checkpoint = open_checkpoint(resolve(str(model)))
    parallel: ParallelDrafting | None = getattr(checkpoint, "parallel", None)
    if parallel is not None and parallel.target not in ("", fingerprint(target)):
        problem = f"the drafter {checkpoint.source} was trained for another model than {target.source}"
        raise BadDrafter(problem, TRAIN_HINT)
    if not search or parallel is not None:
        return checkpoint
    found = find_drafter(target, checkpoint)
    return AdaptedCheckpoint(checkpoint, found) if isinstance(found, DrafterFile) else checkpoint
