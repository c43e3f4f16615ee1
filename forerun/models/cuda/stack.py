"""A whole decoder as one launch: all layers and the head for up to 16 or 32 rows, weights streaming without a pause.

Separate kernels leave memory idle at every boundary, about 3 us each and five a layer: more than a small model's
weights take to read. Here one program per multiprocessor runs all layers (stack.cu says how), and where several steps
are asked for, each step's likeliest tokens are the next step's input without the host in between. Rows, sequences and
steps are read on the device, so nothing is captured or compiled for a new batch shape. Decoders it does not fit (`fits`
says which) run kernel by kernel. Knows no request.

`ChainRunner` drafts so: the draft model reads the tokens it has not seen yet, then its own guesses one by one; their
K/V goes to the entries that follow, except the last guess's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.core import KV, HostBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda import nvrtc
from forerun.models.cuda.packing import MAX_STEPS, Packed, layout
from forerun.models.cuda.paged import LOG2_E, lanes_for
from forerun.models.decoder import Decoder, TokenEmbeddings

KERNEL_ROWS = (16, 32)  # of the kernels there are
SOURCES = ("stack_batch.cu", "stack_base.cu", "stack_attend.cu", "stack.cu", "stack_main.cu")
THREADS = 384
CHUNK_WEIGHTS = 256  # weights of a row per stage of the ring
STAGE_BYTES = 16 * (CHUNK_WEIGHTS * 2 + 16)
SHARED_BYTES = 232_448  # what a program may have on Hopper
MIN_STAGES = 3  # with fewer, kernel by kernel is faster
SLICE_COST_CHUNKS = 2  # what another slice of the down product costs, in chunks of one program (docs/log.md)
MAX_TAPPED_LAYERS = 64  # bits of TAPS in stack_main.cu
MAX_HIDDEN = 4096  # 16 rows of it must lie in shared memory beside the ring


class _Params(ctypes.Structure):
    """`Params` in stack_base.cu."""

    _pointers_ = (
        *("layers", "final_norm", "head", "embed", "rotations", "batch", "x", "y", "squares", "q", "attended", "gated"),
        *("part", "part_ml", "sums", "logits", "top", "top_sum", "top_at", "greedy", "probs", "chosen"),
        "states",
        *("joins", "arrived", "meeting"),
    )
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers_),
        ("head_tiles", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("eps", "scale_log2")),
    ]


@dataclass(frozen=True)
class Cut:
    """How a model is laid out on one chip."""

    rows: int
    programs: int
    down_split: int
    lanes: int
    room: int  # bytes of shared memory for activations
    stages: int

    @classmethod
    def of(cls, c: ModelConfig, programs: int, rows: int = KERNEL_ROWS[0]) -> Cut:
        split = _split(c, programs)
        return cls(rows, programs, split, lanes_for(c.num_kv_heads), _room(c, split, rows), _stages(c, split, rows))

    def shared_bytes(self) -> int:
        return _own(self.rows) + 16 * self.stages + self.room + self.stages * STAGE_BYTES


def _split(c: ModelConfig, programs: int) -> int:
    """Slices of the down product: the busiest program should have few chunks, and few slices need adding.

    The same for any number of rows: a row's sums must not depend on the others.
    """
    chunks, tiles = -(-c.intermediate_size // CHUNK_WEIGHTS), c.hidden_size // 16
    splits = [s for s in range(1, 17) if -(-chunks // s) * CHUNK_WEIGHTS <= MAX_HIDDEN]
    return min(splits, key=lambda s: -(-tiles * s // programs) * -(-chunks // s) + SLICE_COST_CHUNKS * s)


def _room(c: ModelConfig, split: int, rows: int) -> int:
    """Bytes for activations, or for attention's tiles."""
    chunks = -(-c.intermediate_size // CHUNK_WEIGHTS)
    widest = max(c.hidden_size, c.q_size, -(-chunks // split) * CHUNK_WEIGHTS)
    activations = rows * (-(-widest // CHUNK_WEIGHTS) * CHUNK_WEIGHTS * 2 + 16)
    attention = 2 * (2 * 64 + 16) * (c.head_dim + 8) * 2 + max(16 * 68, 32 * lanes_for(c.num_kv_heads)) * 4
    return -(-max(activations, attention) // 128) * 128


def _stages(c: ModelConfig, split: int, rows: int) -> int:
    return min(32, (SHARED_BYTES - _own(rows) - 16 * 32 - _room(c, split, rows)) // STAGE_BYTES)


def _own(rows: int) -> int:
    """Bytes of `Shared` without its barriers."""
    return 2 * 8 * rows * 17 * 4 + 4096


def fits(decoder: Decoder, page_size: int, rows: int = KERNEL_ROWS[0]) -> bool:
    """Whether this decoder, on this device, can run so many rows as one launch."""
    c = decoder.config
    if decoder.dtype != torch.bfloat16 or decoder.device.type != "cuda" or not nvrtc.available():
        return False
    plain = not c.qk_norm and not c.post_norms and not any(c.windows)
    sizes = c.head_dim in (64, 128) and max(c.hidden_size, c.q_size) <= MAX_HIDDEN
    whole = (
        page_size in (16, 32, 64)
        and c.hidden_size % 16 == 0
        and c.intermediate_size % 8 == 0
        and c.vocab_size % 16 == 0
    )
    if not (plain and sizes and whole) or torch.cuda.get_device_capability(decoder.device)[0] != 9:
        return False
    return Cut.of(c, _programs(decoder.device), rows).stages >= MIN_STAGES


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Stack:
    """The compiled launch with its input, output and scratch memory. One batch at a time.

    `head_rows`: only so many of the vocabulary, from its first, can be chosen. Without `keep_logits` there are no
    logits, only the likeliest tokens and their probabilities. `chosen`: where these tokens stay on the device, so that
    the next launch can read them; several launches may share it. `depths`: whose hidden states stay in `states`.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KV,
        max_context: int,
        page_size: int,
        rows: int = KERNEL_ROWS[0],
        head_rows: int | None = None,
        keep_logits: bool = True,
        chosen: Tensor | None = None,
        depths: Sequence[int] = (),
    ) -> None:
        c, self.device = decoder.config, decoder.device
        self.decoder, self.rows = decoder, rows
        self.cut = Cut.of(c, _programs(self.device), rows)
        sizes = tuple(f"-D{k}={v}" for k, v in self._sizes(c, page_size).items())
        code = nvrtc.compile_source(_source(), (*sizes, *([f"-DTAPS={taps_mask(depths)}ull"] if depths else [])))
        self.kernel = nvrtc.Kernel(code, "decode", self.cut.programs, THREADS, self.cut.shared_bytes())
        parts: list[list[Tensor | None]] = [
            [w.attn_norm[0], w.qkv.weight, w.qkv.bias, w.o.weight, w.mlp_norm[0], w.gate_up.weight, w.down.weight, k, v]
            for w, (k, v) in zip(decoder.layers, kv, strict=True)
        ]
        addresses = [[0 if t is None else t.data_ptr() for t in row] for row in parts]
        self.packed = Packed(layout(rows), rows * -(-max_context // page_size), max_context, page_size, self.device)
        self.logits = torch.zeros(rows, c.vocab_size, device=self.device) if keep_logits else None
        states = (len(depths), rows, c.hidden_size)
        self.states = torch.zeros(states, dtype=torch.bfloat16, device=self.device) if depths else None
        # written by the device straight into the host's memory: nothing to copy when a launch has ended
        self.greedy = torch.zeros(MAX_STEPS, rows, dtype=torch.int64).pin_memory()
        self.probs = torch.zeros(MAX_STEPS, rows).pin_memory()
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=self.device) if chosen is None else chosen
        table = embedding_table(decoder)
        self.looks_up = table is not None
        final_norm, eps = decoder.final_norm
        given: dict[str, Tensor | None] = {
            "layers": torch.tensor(addresses, dtype=torch.int64, device=self.device), "final_norm": final_norm,
            "head": decoder.head.weight, "embed": table,
            "rotations": decoder.attention.ropes[c.rope].table, "batch": self.packed.device, "logits": self.logits,
            "greedy": self.greedy, "probs": self.probs, "chosen": self.chosen, "states": self.states,
            **self._scratch(c),
        }  # fmt: skip
        self._kept = [parts, given]  # the launch knows addresses only
        self._x = given["x"]
        params = _Params(**{name: None if t is None else t.data_ptr() for name, t in given.items()})
        params.head_tiles = min(head_rows or c.vocab_size, c.vocab_size) // 16
        params.eps, params.scale_log2 = eps, c.scale * LOG2_E
        self.launch = self.kernel.prepare(params)

    def _sizes(self, c: ModelConfig, page_size: int) -> dict[str, int]:
        return {
            "TOKENS": self.rows, "HIDDEN": c.hidden_size, "INTER": c.intermediate_size, "HEADS": c.num_heads,
            "KV_HEADS": c.num_kv_heads, "HEAD_DIM": c.head_dim, "LAYERS": c.num_layers, "VOCAB": c.vocab_size,
            "PAGE": page_size, "GELU": int(c.activation == "gelu_tanh"), "DOWN_SPLIT": self.cut.down_split,
            "LANES": self.cut.lanes, "STAGES": self.cut.stages, "ROOM_BYTES": self.cut.room,
            "BATCH_BYTES": layout(self.rows).itemsize, "STEPS": MAX_STEPS,
            "OWN_BYTES": _own(self.rows) + 16 * self.cut.stages,
        }  # fmt: skip

    def _scratch(self, c: ModelConfig) -> dict[str, Tensor]:
        rows, pairs = self.rows, c.num_heads // c.num_kv_heads
        tiles = max(rows * -(-pairs // 16), -(-rows * pairs // 16))  # of as many sequences, or of one
        units = c.num_kv_heads * tiles * self.cut.lanes
        bf16: dict[str, tuple[int, ...]] = {
            "x": (rows, c.hidden_size),
            "y": (rows, c.hidden_size),
            "q": (rows, c.q_size),
            "attended": (rows, c.q_size),
            "gated": (rows, c.intermediate_size),
        }
        float32: dict[str, tuple[int, ...]] = {
            "part": (units, 16, c.head_dim),
            "part_ml": (units, 16, 2),
            "sums": (self.cut.down_split, c.hidden_size, rows),
            "squares": (rows, c.hidden_size // 16),
            "top": (self.cut.programs, rows),
            "top_sum": (self.cut.programs, rows),
        }
        int32: dict[str, tuple[int, ...]] = {
            "top_at": (self.cut.programs, rows),
            "joins": (units,),
            "arrived": (c.hidden_size // 16,),
            "meeting": (2,),
        }
        made = {torch.bfloat16: bf16, torch.float32: float32, torch.int32: int32}
        return {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for dtype, shapes in made.items()
            for name, shape in shapes.items()
        }

    @torch.inference_mode()
    def run(
        self,
        batch: HostBatch,
        masks: list[int] | None,
        steps: int = 1,
        least: Sequence[float] = (),
        out: int = 0,
        chosen_at: int = 0,
    ) -> None:
        """Enqueue a batch of at most `rows` tokens. The tokens chosen go to greedy[out] and, on the device, to `chosen`
        from `chosen_at` on; a token of the batch that is negative is the one at -1 - token there. Two batches may be on
        their way at once.

        With several steps, step i + 1 follows step i only where the guesses of a sequence up to there are all right
        with at least the probability least[i], as the model sees it; otherwise greedy[i + 1, 0] is negative.
        """
        if not 1 <= steps <= MAX_STEPS or len(batch.tokens) > self.rows:
            raise ValueError(f"{len(batch.tokens)} rows and {steps} steps, at most are {self.rows} and {MAX_STEPS}")
        used = self.packed.fill(batch, masks, steps, least, out, chosen_at)
        nvrtc.copy_to_device(self.packed.device.data_ptr(), self.packed.host_address, used)
        if not self.looks_up:
            if steps > 1:
                raise ValueError("several steps need a table of embeddings that the launch can read")
            assert self._x is not None
            tokens = self.packed.tokens[: len(batch.tokens)]
            if batch.tokens.min() < 0:
                tokens = torch.where(tokens < 0, self.chosen[(-1 - tokens).clamp_min_(0)], tokens)
            self._x[: len(batch.tokens)] = self.decoder.embed(tokens)
        self.launch()


def embedding_table(decoder: Decoder) -> Tensor | None:
    """What a launch can look tokens up in by itself, which saves the host two small launches; None where embeddings
    are changed on their way into the first layer."""
    plain = decoder.config.embed_scale == 1.0 and decoder.basis is None
    return decoder.lookup.weight if plain and isinstance(decoder.lookup, TokenEmbeddings) else None


def taps_mask(depths: Sequence[int]) -> int:
    """A bit for each depth; hidden states lie in the order of the depths, which rise."""
    assert list(depths) == sorted(set(depths)) and max(depths) < MAX_TAPPED_LAYERS
    return sum(1 << depth for depth in depths)


def _source() -> str:
    return "\n".join((Path(__file__).parent / name).read_text() for name in SOURCES)


@dataclass(frozen=True)
class Chains:
    """For each sequence of a batch the guesses made, and the draft model's probability of each."""

    tokens: list[list[int]]  # [S, steps], at most as many steps as were asked for
    probs: list[list[float]]  # [S, steps]


def can_chain(decoder: Decoder, page_size: int) -> bool:
    """Whether this decoder can draft so on this device; others draft step by step."""
    return fits(decoder, page_size) and embedding_table(decoder) is not None


class ChainRunner:
    """Chains of one draft model. `can_chain` says whether there can be one; CompileError: the driver is too old.

    `head_rows`: only tokens below this id are guessed. Vocabularies are sorted by frequency, so the first part of one
    holds nearly all that is ever guessed right, and reading less of the head makes a step shorter.
    """

    def __init__(
        self, decoder: Decoder, kv: KV, max_context: int, page_size: int, head_rows: int | None = None
    ) -> None:
        self.stack = Stack(decoder, kv, max_context, page_size, KERNEL_ROWS[0], head_rows, keep_logits=False)

    def run(self, batch: HostBatch, depth: int, least: Sequence[float] = ()) -> Chains:
        """Up to 16 rows, at least one of each sequence, the newest token last; causal. Up to MAX_STEPS guesses each.

        After i guesses, all sequences go on if any has a product of probabilities of at least least[i - 1]; without
        `least` there are `depth` guesses. Deciding this on the device costs nothing, so chains need not be cut short
        blindly. Pages must reach to where the last guess but one goes; a sequence whose pages end before that (or the
        model's context) gets worthless guesses from there on.
        """
        cu_seqlens = batch.cu_seqlens
        if batch.bits is not None or not 1 <= depth <= MAX_STEPS or len(least) > MAX_STEPS:
            raise ValueError(f"chains follow plain sequences and have 1 to {MAX_STEPS} tokens, not {depth}")
        if any(a == b for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)):
            raise ValueError("a sequence without tokens has no chain")
        self.stack.run(batch, None, depth, least)
        torch.cuda.current_stream().synchronize()
        return self._read(cu_seqlens, depth)

    def _read(self, cu_seqlens: list[int], depth: int) -> Chains:
        greedy, probs = self.stack.greedy.numpy(), self.stack.probs.numpy()
        depth = next((step for step in range(1, depth) if greedy[step, 0] < 0), depth)
        last = [end - 1 for end in cu_seqlens[1:]]  # of the first step; then a sequence has one row
        seqs = len(last)
        tokens = [greedy[0, last].tolist(), *greedy[1:depth, :seqs].tolist()]  # [depth][S]
        sure = [probs[0, last].tolist(), *probs[1:depth, :seqs].tolist()]
        return Chains([list(t) for t in zip(*tokens, strict=True)], [list(c) for c in zip(*sure, strict=True)])
