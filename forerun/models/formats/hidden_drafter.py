"""Drafters that read the target's hidden states, as files: one of our own, or a folder of the `speculators` package.

Both have the same content: config.json and tensors as that package writes them (EAGLE-3, DFlash, DSpark), so that
what is trained here can be written as a folder and read by vLLM. `heads` (Medusa) is a kind of our own files alone.
Refuses what was made for another target before anything is computed. Knows shapes; runs nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import BadDrafter, CorruptModel, UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.cpu.quantise import quantise
from forerun.models.formats.checkpoint import Checkpoint, checked
from forerun.models.formats.dequant import dequantise
from forerun.models.formats.drafter_file import TRAIN_HINT, not_whole, read_drafter, write_drafter
from forerun.models.formats.fingerprint import fingerprint
from forerun.models.formats.hf_config import read_config
from forerun.models.formats.signed_file import restored, rounded

KINDS = {"eagle3": "eagle3", "dflash": "block", "dspark": "block", "heads": "heads"}  # by speculators_model_type
MAX_BLOCK_TOKENS = 32
Q5_COLUMNS = 32  # of a block of five-bit values
_DEPTH_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_LEFT_OUT = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass
class HiddenDrafterWeights:
    config: dict[str, Any]  # config.json of a `speculators` folder
    tensors: dict[str, Tensor]  # by that package's names; embed_tokens and lm_head may be left out: the target's
    source: str
    target: str = ""  # fingerprint of the target's weights; empty: folders do not name one
    facts: dict[str, Any] = field(default_factory=dict)  # how it was made: data, minutes, figures
    path: Path | None = None

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return KINDS[self.config["speculators_model_type"]]

    @cached_property
    def layers(self) -> ModelConfig:
        """Its own layers, over the target's vocabulary."""
        return read_config(self.config["transformer_layer_config"], {}, self.source)

    @property
    def target_name(self) -> str:
        verifier = self.config.get("speculators_config", {}).get("verifier", {})
        return str(verifier.get("name_or_path") or "another model")

    @property
    def identity(self) -> str:
        """Equal for equal weights: what was measured of one drafter must not be read for another."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        if self.path is not None and self.path.is_file():  # a fifth of the bytes
            digest.update(self.path.read_bytes())
            return digest.hexdigest()
        for name, value in sorted(self.tensors.items()):
            digest.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def outcomes(self) -> dict[str, list[list[float]]]:
        """Kind of text -> accepted and tried by depth, as measured when it was trained; empty: not measured."""
        found = self.facts.get("outcomes", {})
        return found if isinstance(found, dict) else {}

    @property
    def names(self) -> dict[str, str]:
        return {"target": self.target_name}

    def depths(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's layers whose inputs it reads; as many as the target has layers: the last one's output."""
        if self.kind == "heads":
            return (target.num_layers,)
        if self.reuse == "kv":
            return ()
        found = next((self.config[key] for key in _DEPTH_KEYS if self.config.get(key)), None)
        return tuple(found) if found else (2, target.num_layers // 2, target.num_layers - 3)

    @property
    def reuse(self) -> str:
        """What a block reads of the tokens before it: hidden states, the target's K/V of its last layers, or both."""
        return str(self.config.get("reuse", "hidden"))

    def kv_layers(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's layers whose K/V it reads, one for each of its own."""
        last = target.num_layers
        return () if self.reuse == "hidden" else tuple(range(last - self.layers.num_layers, last))

    @property
    def head_rank(self) -> int:
        """Of a block's own head; 0: it is as wide as its layers, or the target's."""
        return int(self.config.get("head_rank", 0))

    @property
    def samples_anchor(self) -> bool:
        """Of a block: whether the row of the last token predicts too, or masks alone do."""
        return bool(self.config.get("sample_from_anchor", self.config["speculators_model_type"] == "dspark"))

    @property
    def tokens(self) -> int:
        """Drafted in one pass; of EAGLE-3, in as many rounds."""
        if self.kind == "block":
            return int(self.config["block_size"]) - (not self.samples_anchor)
        methods = self.config.get("speculators_config", {}).get("proposal_methods") or [{}]
        return int(methods[0].get("speculative_tokens") or 4)

    @cached_property
    def draft_ids(self) -> Tensor:
        """[draft vocabulary] ids of the target's that it can draft."""
        offsets = self.tensors.get("d2t")
        size = len(offsets) if offsets is not None else self.layers.vocab_size
        ids = torch.arange(size)
        return ids if offsets is None else ids + offsets.long()

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, target: Checkpoint) -> None:
        """Raise unless it can draft for this model."""
        size, own = target.config.vocab_size, self.layers.vocab_size
        if own != size:
            raise BadDrafter(
                f"the drafter {self.source} has a vocabulary of {own} tokens, {target.source} has {size}: it was made "
                f"for {self.target_name}",
                TRAIN_HINT,
            )
        if self.target and self.target != fingerprint(target):
            raise BadDrafter(
                f"the drafter {self.source} was trained for {self.target_name}, not for {target.source}", TRAIN_HINT
            )
        depths, layers = self.depths(target.config), target.config.num_layers
        if self.layers.hidden_size != target.config.hidden_size or not all(0 <= d <= layers for d in depths):
            raise BadDrafter(
                f"the drafter {self.source} reads hidden states of {self.layers.hidden_size} values at depths "
                f"{', '.join(map(str, depths))}; {target.source} has {target.config.hidden_size} and {layers} layers",
                TRAIN_HINT,
            )
        if self.reuse != "hidden" and not _same_keys(self.layers, target.config):
            problem = f"the drafter {self.source} reads K/V of other heads or another rope than {target.source} has"
            raise BadDrafter(problem, TRAIN_HINT)
        for name, shape in self.shapes(target.config).items():
            have = tuple(self.tensors[name].shape) if name in self.tensors else None
            if have != shape:
                problem = "is missing" if have is None else f"has shape {list(have)}, expected {list(shape)}"
                raise BadDrafter(f"the drafter {self.source}: {name} {problem}", "copy it anew, or train again")
        ids = self.draft_ids
        if not (int(ids.min()) >= 0 and int(ids.max()) < size and len(ids.unique()) == len(ids)):
            raise BadDrafter(f"the drafter {self.source} drafts tokens that do not exist", "copy it anew")

    def shapes(self, target: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Of every tensor that it cannot do without."""
        c, hidden, vocab = self.layers, self.layers.hidden_size, len(self.draft_ids)
        if self.kind == "heads":
            return {f"heads.{j}.weight": (hidden, hidden) for j in range(self.tokens)}
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,)}
        taps = len(self.depths(target))
        if taps:
            shapes["fc.weight"] = (hidden, taps * hidden)
        if self.config.get("fc_norm"):
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(taps)}
        for i in range(c.num_layers):
            wide = hidden * (2 if self.kind == "eagle3" and i == 0 else 1)
            p = f"layers.{i}."
            shapes |= {p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,)}
            shapes[p + "self_attn.q_proj.weight"] = (c.q_size, wide)
            shapes[p + "self_attn.o_proj.weight"] = (hidden, c.q_size)
            shapes |= {p + f"self_attn.{n}_proj.weight": (c.kv_size, wide) for n in "kv"}
            shapes |= {p + f"mlp.{n}_proj.weight": (c.intermediate_size, hidden) for n in ("gate", "up")}
            shapes |= {p + "mlp.down_proj.weight": (hidden, c.intermediate_size)}
            if c.qk_norm:
                shapes |= {p + f"self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
        if self.kind == "eagle3":
            return shapes | {"layers.0.hidden_norm.weight": (hidden,)}
        if taps:
            shapes |= {"hidden_norm.weight": (hidden,)}
        if self.config.get("state_input"):
            shapes |= {"state_in.weight": (hidden, hidden), "depth_embed.weight": (self.tokens, hidden)}
        low = self.head_rank
        if low:
            shapes |= {"head_down.weight": (low, hidden), "lm_head.weight": (vocab, low)}
        rank = int(self.config.get("markov_rank", 0) or 0)
        if rank:
            shapes["markov_head.markov_w1.weight"] = (c.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (vocab, rank)
        if self.config.get("enable_confidence_head"):
            wide = (low or hidden) + (rank if self.config.get("confidence_head_with_markov", True) else 0)
            shapes |= {"confidence_head.proj.weight": (1, wide), "confidence_head.proj.bias": (1,)}
        if self.config.get("confidence_odds"):
            shapes |= {"confidence_head.odds": (1,)}
        return shapes

    # -- files ---------------------------------------------------------------------------------------------------------

    def with_adapter(self, learnt: dict[str, Tensor], stats: dict[str, int]) -> HiddenDrafterWeights:
        """The same with what was learnt while serving, in place of what an earlier process had learnt."""
        kept = {name: value for name, value in self.tensors.items() if not name.startswith("adapter.")}
        return replace(self, tensors=kept | learnt, facts=self.facts | {"adapted": stats}, path=None)

    def save(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, value in self.tensors.items():
            if value.ndim != 2 or not value.is_floating_point():
                tensors[name] = value.detach().cpu().contiguous()
            elif self.config.get("bits") == 5 and name.startswith("layers.") and value.shape[1] % Q5_COLUMNS == 0:
                tensors[name] = quantise(value.detach().cpu(), 5)[1]
            else:
                tensors |= rounded(name, value)
        about = {"kind": self.kind, "target": self.target, "config": self.config, "facts": self.facts}
        write_drafter(path, tensors, about)

    @classmethod
    def of(cls, path: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> HiddenDrafterWeights:
        """What `read_drafter` found."""
        try:
            whole = {name: _opened_tensor(tensors, name) for name in tensors if not name.endswith("_scale")}
            made = cls(about["config"], whole, path.name, about["target"], about["facts"], path)
            return _opened(made)
        except BadDrafter:
            raise
        except (KeyError, TypeError, ValueError, CorruptModel) as error:
            raise not_whole(path, error) from None

    @classmethod
    def load(cls, path: Path) -> HiddenDrafterWeights:
        """Of a file, or of a `speculators` folder."""
        return read_speculators(path) if path.is_dir() else cls.of(path, *read_drafter(path))


def _opened_tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Of a file: matrices of layers may be blocks of five bits, others are int8."""
    value = tensors[name]
    return dequantise(value, "Q5_0") if value.dtype == torch.uint8 else restored(tensors, name)


def is_speculators(path: Path) -> bool:
    config = path / "config.json"
    return path.is_dir() and config.is_file() and "speculators_model_type" in config.read_text(encoding="utf-8")


def read_speculators(folder: Path) -> HiddenDrafterWeights:
    from forerun.models.formats.hf import read_json

    config: dict[str, Any] = read_json(folder / "config.json")
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {n: handle.get_tensor(n) for n in handle.keys() if n not in _LEFT_OUT}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BadDrafter(f"{folder.name}: {file.name} is truncated or damaged ({error})", "copy it anew") from None
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    for name, value in tensors.items():
        if value.is_floating_point():
            checked(value, name, folder.name)
    return _opened(HiddenDrafterWeights(config, tensors, folder.name, path=folder))


def _opened(made: HiddenDrafterWeights) -> HiddenDrafterWeights:
    """Refuses kinds and options that would draft nonsense."""
    config, kind = made.config, made.config.get("speculators_model_type")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UnsupportedModel(f"{made.source} is a {kind!r} drafter, which is not supported", f"supported are {known}")
    markov = config.get("markov_head_type", "vanilla")
    if int(config.get("markov_rank", 0) or 0) and markov != "vanilla":
        raise UnsupportedModel(f"{made.source} has a {markov!r} Markov head", "use a drafter with a vanilla one")
    if made.reuse not in ("hidden", "kv", "both"):
        raise UnsupportedModel(f"{made.source} reads {made.reuse!r} of its target", "use a drafter of another kind")
    if not 1 <= made.tokens <= MAX_BLOCK_TOKENS:
        hint = f"1 to {MAX_BLOCK_TOKENS} are possible"
        raise BadDrafter(f"{made.source} drafts {made.tokens} tokens in a pass", hint)
    made.layers  # noqa: B018 (raises where the configuration cannot be read)
    return made


def _same_keys(own: ModelConfig, target: ModelConfig) -> bool:
    """Whether the target's K/V can stand beside the drafter's own."""
    shape = (own.num_kv_heads, own.head_dim) == (target.num_kv_heads, target.head_dim)
    return shape and own.rope == target.rope and target.local_rope is None


def write_speculators(made: HiddenDrafterWeights, target: Checkpoint, folder: Path) -> None:
    """A block drafter as a DSpark folder: with the target's head over its vocabulary; the package reads embeddings, the
    mask's among them, from the target."""
    if made.kind != "block":
        hint = "train one with --kind block"
        raise UnsupportedModel(f"a drafter of kind {made.kind!r} has no form in the `speculators` format", hint)
    foreign = [f"--reuse {made.reuse}"] if made.reuse != "hidden" else []
    foreign += ["norms of its hidden states"] if made.config.get("fc_norm") else []
    foreign += ["rows that start from a hidden state"] if made.config.get("state_input") else []
    if foreign:
        problem = f"the `speculators` format has no place for {' and '.join(foreign)} of a block"
        raise UnsupportedModel(problem, "train one with --reuse hidden, without --state-norms and --state-input")
    made.check(target)
    config, tensors = dict(made.config), dict(made.tensors)
    for own in ("reuse", "head_rank", "bits", "fc_norm", "state_input", "confidence_odds"):
        config.pop(own, None)
    if "head_down.weight" in tensors:
        down, sure = tensors.pop("head_down.weight").float(), tensors["confidence_head.proj.weight"].float()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].float() @ down
        tensors["confidence_head.proj.weight"] = torch.cat((sure[:, : len(down)] @ down, sure[:, len(down) :]), 1)
    head = "embed" if target.config.tie_embeddings else "head"
    tensors.setdefault("lm_head.weight", target.rows(head, made.draft_ids))
    if "d2t" in tensors:
        drafted = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        drafted[made.draft_ids] = True
        tensors["t2d"] = drafted
    folder.mkdir(parents=True, exist_ok=True)
    stored = {n: v.to(torch.bfloat16) if v.dtype == torch.float32 else v for n, v in tensors.items()}
    save_file({n: v.contiguous() for n, v in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
