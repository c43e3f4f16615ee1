"""A trained drafter as one small file: low-rank changes to a draft model's matrices, and the embedding of its mask.

The file carries the fingerprints of the target it was trained for and of the draft model it changes, and a checksum;
it is refused where one differs. `AdaptedCheckpoint` is the draft model with the changes in it, so loaders, decoders
and drafters need not know. Trained drafters are found by the fingerprints of the models, without being named.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import BadDrafter
from forerun.models.cpu.quantise import quantise
from forerun.models.fetch.store import home, resolve
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from forerun.models.formats.dequant import as_stored
from forerun.models.formats.fingerprint import fingerprint, sampled_fingerprint
from forerun.models.formats.parallel import ParallelDrafting

if TYPE_CHECKING:
    from forerun.text.tokenizer import Tokenizer

log = logging.getLogger("forerun")

ADAPTER_VERSION = 1
NAME_DIGITS = 12  # of each model's sampled fingerprint in a file's name
_METADATA_KEY = "forerun_drafter"
_HINT = "train one: forerun train drafter --target ... --draft ... --out FILE"
_PACKAGE = Path(__file__).parents[2]


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

    def save(self, path: Path) -> None:
        """Matrices as int8 with a scale for each row: the changes are small, their rounding far smaller."""
        tensors = {"mask": self.mask.detach().float().cpu().contiguous()}
        for name, (a, b) in self.low_rank.items():
            for part, value in (("a", a), ("b", b)):
                scale = value.detach().float().cpu().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127.0
                tensors[f"{name}.{part}"] = (value.detach().float().cpu() / scale).round().to(torch.int8).contiguous()
                tensors[f"{name}.{part}_scale"] = scale[:, 0].contiguous()
        about: dict[str, Any] = {name: getattr(self, name) for name in ("kind", "target", "draft", "names", "facts")}
        about |= {"version": ADAPTER_VERSION, "parallel": asdict(self.parallel)}
        about["checksum"] = _checksum(tensors, about)
        part_path = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part_path, metadata={_METADATA_KEY: json.dumps(about)})
            part_path.chmod(0o644)
            part_path.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part_path.unlink()
            raise BadDrafter(f"cannot write the drafter {path}: {error}", "make room there, then try again") from None

    @classmethod
    def load(cls, path: Path) -> DrafterFile:
        if not path.is_file():
            raise BadDrafter(f"there is no drafter {path}", _HINT)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if _METADATA_KEY not in header:
                    raise BadDrafter(f"{path} holds tensors, but is not a trained drafter", _HINT)
                about = json.loads(header[_METADATA_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["version"] != ADAPTER_VERSION:
                raise BadDrafter(f"{path} is a drafter of version {about['version']}, this is {ADAPTER_VERSION}", _HINT)
            intact = about.pop("checksum") == _checksum(tensors, about)
            names = sorted({name.rsplit(".", 1)[0] for name in tensors if name != "mask"})
            low_rank = {name: (_read(tensors, f"{name}.a"), _read(tensors, f"{name}.b")) for name in names}
            parallel = ParallelDrafting(**about["parallel"])
            told = {name: about[name] for name in ("kind", "target", "draft", "names", "facts")}
            found = cls(**told, parallel=parallel, low_rank=low_rank, mask=tensors["mask"], path=path)
        except OSError as error:
            raise BadDrafter(f"cannot read {path}: {error.strerror or error}", "give a file that can be read") from None
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise BadDrafter(f"{path} is not a whole drafter: {error}", "copy it anew, or train again") from None
        if not intact:
            raise BadDrafter(f"{path} is damaged: its checksum does not fit", "copy it anew, or train again")
        return found

    def check(self, target: Checkpoint, draft: Checkpoint) -> None:
        """Raise unless it was trained for these models."""
        self.check_draft(draft)
        if self.target != fingerprint(target):
            raise BadDrafter(
                f"the drafter {self.path} was trained for {self.names.get('target')}, not for {target.source}", _HINT
            )

    def check_draft(self, draft: Checkpoint) -> None:
        """Raise unless this is the draft model that it changes."""
        self._check_shapes(draft)
        if self.draft != fingerprint(draft):
            raise BadDrafter(
                f"the drafter {self.path} changes {self.names.get('draft')}, not {draft.source}",
                f"use it with {self.names.get('draft')}, or {_HINT}",
            )

    def _check_shapes(self, draft: Checkpoint) -> None:
        config, shapes = draft.config, expected_shapes(draft.config)
        fits = self.parallel.mask_token < config.vocab_size and self.mask.shape == (config.hidden_size,)
        for name, (a, b) in self.low_rank.items():
            fits = fits and len(shapes.get(name, ())) == 2 and (b.shape[0], a.shape[1]) == shapes[name]
        if not fits:
            raise BadDrafter(
                f"the drafter {self.path} has other shapes or another vocabulary than {draft.source}: it changes "
                f"{self.names.get('draft')}",
                f"use it with {self.names.get('draft')}, or {_HINT}",
            )


def _read(tensors: dict[str, Tensor], name: str) -> Tensor:
    return tensors[name].float() * tensors[f"{name}_scale"][:, None]


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


class AdaptedCheckpoint:
    """A draft model with a trained drafter's changes in it; see `Checkpoint`."""

    def __init__(self, base: Checkpoint, drafter: DrafterFile) -> None:
        self.base, self.drafter = base, drafter
        self.config, self.quantised, self.parallel = base.config, base.quantised, drafter.parallel
        self.source = f"{base.source} (trained to draft in parallel)"
        self.files = base.files if drafter.path is None else (*base.files, drafter.path)

    def tensor(self, name: str) -> Tensor:
        value = self.base.tensor(name)
        if name == "embed":
            value = value.clone()
            value[self.parallel.mask_token] = self.drafter.mask.to(value.dtype)
        if name not in self.drafter.low_rank:
            return value
        a, b = self.drafter.low_rank[name]
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
        """Changed matrices in 8 bits where the file has blocks, so that they run in the same kernels as the others; the
        embedding as the file has it: `with_mask` puts the mask's row in."""
        if name not in self.drafter.low_rank:
            return self.base.stored(name)
        return quantise(self.tensor(name), 8) if self.quantised else as_stored(self.tensor(name))

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


def drafter_folders() -> tuple[Path, ...]:
    """Where drafters lie that are found without being named: in the package, in its checkout, in the user's cache."""
    return _PACKAGE / "data" / "drafters", _PACKAGE.parent / "artifacts" / "drafters", home() / "drafters"


def drafter_name(target: Checkpoint, draft: Checkpoint) -> str:
    """The file name under which a drafter for these models is found."""
    digits = [sampled_fingerprint(model)[:NAME_DIGITS] for model in (target, draft)]
    return f"{digits[0]}-{digits[1]}.safetensors"


def find_drafter(target: Checkpoint, draft: Checkpoint) -> DrafterFile | None:
    """The drafter trained for these two models, if there is one: samples of their weights name the file, all of their
    weights decide."""
    folders = [folder for folder in drafter_folders() if folder.is_dir()]
    if not folders:
        return None
    name = drafter_name(target, draft)
    for folder in folders:
        if (folder / name).is_file():
            try:
                found = DrafterFile.load(folder / name)
                found.check(target, draft)
                return found
            except BadDrafter as error:  # it was not asked for: the draft model works without it
                log.warning("a trained drafter for %s is left out: %s", target.source, error)
    return None


def open_draft(model: str | Path | Checkpoint, target: Checkpoint, search: bool = True) -> Checkpoint:
    """A draft model by name, with the drafter trained for it and the target where there is one, or a trained drafter's
    file. An opened checkpoint stays as it is. `search`: False leaves drafters that are not named out."""
    if not isinstance(model, (str, Path)):
        return model
    if str(model).endswith(".safetensors"):
        drafter = DrafterFile.load(Path(model))
        base = open_checkpoint(resolve(drafter.names["draft"]))
        drafter.check(target, base)
        return AdaptedCheckpoint(base, drafter)
    checkpoint = open_checkpoint(resolve(str(model)))
    if not search or getattr(checkpoint, "parallel", None) is not None:
        return checkpoint
    found = find_drafter(target, checkpoint)
    return checkpoint if found is None else AdaptedCheckpoint(checkpoint, found)
