"""A whole decoder as one launch: all layers and the head for up to 16 rows, weights streaming without a pause.

Separate kernels leave memory idle at every boundary, about 3 us each and five a layer: more than a small model's
weights take to read. Here one program per multiprocessor runs all layers (stack.cu says how).
Decoders it does not fit (`fits` says which) run kernel by kernel. Knows no request and no graph; what it needs of a
batch is a few device tensors that may change between replays.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.attention import KV
from forerun.models.config import ModelConfig
from forerun.models.cuda import nvrtc
from forerun.models.cuda.paged import LOG2_E, lanes_for
from forerun.models.decoder import Decoder

MAX_ROWS = 16
SOURCES = ("stack_base.cu", "stack_attend.cu", "stack.cu", "stack_main.cu")
THREADS = 384
CHUNK = 256  # weights of a row per stage of the ring
STAGE_BYTES = 16 * (CHUNK * 2 + 16)
SHARED_BYTES = 232_448  # what a program may have on Hopper
MAX_HIDDEN = 4096  # 16 rows of it must lie in shared memory beside the ring


class _Params(ctypes.Structure):
    """`Params` in stack_base.cu."""

    _pointers_ = (
        *("layers", "final_norm", "head", "rotations", "positions", "slots", "seen", "starts", "tables", "x", "y"),
        *("squares", "q", "attended", "gated", "part", "part_ml", "sums", "logits", "top", "top_at", "greedy", "joins"),
        *("arrived", "meeting"),
    )
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _pointers_),
        *((name, ctypes.c_int) for name in ("rows", "seqs", "table_stride", "page_stride")),
        *((name, ctypes.c_float) for name in ("eps", "scale_log2")),
    ]


@dataclass(frozen=True)
class Cut:
    """How a model is laid out on one chip."""

    programs: int
    down_split: int
    lanes: int
    room: int  # bytes of shared memory for activations
    stages: int

    @classmethod
    def of(cls, c: ModelConfig, programs: int) -> Cut:
        lanes = lanes_for(c.num_kv_heads)
        chunks, tiles = -(-c.intermediate_size // CHUNK), c.hidden_size // 16
        splits = [s for s in range(1, 17) if -(-chunks // s) * CHUNK <= MAX_HIDDEN]
        split = min(splits, key=lambda s: -(-tiles * s // programs) * -(-chunks // s))  # the busiest program's chunks
        widest = max(c.hidden_size, c.q_size, -(-chunks // split) * CHUNK)
        rows = MAX_ROWS * (-(-widest // CHUNK) * CHUNK * 2 + 16)
        attention = 2 * (2 * 64 + 16) * (c.head_dim + 8) * 2 + max(16 * 68, 32 * lanes) * 4
        room = -(-max(rows, attention) // 128) * 128
        own = 2 * 8 * 16 * 17 * 4 + 2048 + 16 * 32
        return cls(programs, split, lanes, room, min(32, (SHARED_BYTES - own - room) // STAGE_BYTES))

    def shared_bytes(self) -> int:
        return 2 * 8 * 16 * 17 * 4 + 2048 + 16 * self.stages + self.room + self.stages * STAGE_BYTES


def fits(decoder: Decoder, page_size: int) -> bool:
    """Whether this decoder, on this device, can run as one launch."""
    c = decoder.config
    if decoder.dtype != torch.bfloat16 or decoder.device.type != "cuda" or not nvrtc.available():
        return False
    plain = not c.qk_norm and not c.post_norms and all(c.window(i) is None for i in range(c.num_layers))
    sizes = c.head_dim in (64, 128) and max(c.hidden_size, c.q_size) <= MAX_HIDDEN
    whole = (
        page_size in (16, 32, 64)
        and c.hidden_size % 16 == 0
        and c.intermediate_size % 8 == 0
        and c.vocab_size % 16 == 0
    )
    return plain and sizes and whole and torch.cuda.get_device_capability(decoder.device)[0] == 9


class Stack:
    """The compiled launch and the scratch memory that all of a decoder's batch shapes share."""

    def __init__(self, decoder: Decoder, kv: KV, page_size: int) -> None:
        c, self.device = decoder.config, decoder.device
        self.decoder = decoder
        programs = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.cut = Cut.of(c, programs)
        source = "\n".join((Path(__file__).parent / name).read_text() for name in SOURCES)
        sizes = {
            "HIDDEN": c.hidden_size, "INTER": c.intermediate_size, "HEADS": c.num_heads, "KV_HEADS": c.num_kv_heads,
            "HEAD_DIM": c.head_dim, "LAYERS": c.num_layers, "VOCAB": c.vocab_size, "PAGE": page_size,
            "GELU": int(c.activation == "gelu_tanh"), "DOWN_SPLIT": self.cut.down_split, "LANES": self.cut.lanes,
            "STAGES": self.cut.stages, "ROOM_BYTES": self.cut.room,
        }  # fmt: skip
        code = nvrtc.compile_source(source, [f"-D{name}={value}" for name, value in sizes.items()])
        self.kernel = nvrtc.Kernel(code, "decode", programs, THREADS, self.cut.shared_bytes())
        rows = [
            [w.attn_norm[0], w.qkv.weight, w.qkv.bias, w.o.weight, w.mlp_norm[0], w.gate_up.weight, w.down.weight, k, v]
            for w, (k, v) in zip(decoder.layers, kv, strict=True)
        ]
        addresses = [[0 if t is None else t.data_ptr() for t in row] for row in rows]
        self.layers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self._kept: list[Tensor | None] = [t for row in rows for t in row]
        self._scratch = self._make_scratch(c)

    def _make_scratch(self, c: ModelConfig) -> dict[str, Tensor]:
        pairs = c.num_heads // c.num_kv_heads
        tiles = max(MAX_ROWS * -(-pairs // 16), -(-MAX_ROWS * pairs // 16))  # of 16 sequences, or of one
        units = c.num_kv_heads * tiles * self.cut.lanes
        bf16: dict[str, tuple[int, ...]] = {
            "y": (MAX_ROWS, c.hidden_size),
            "q": (MAX_ROWS, c.q_size),
            "attended": (MAX_ROWS, c.q_size),
            "gated": (MAX_ROWS, c.intermediate_size),
        }
        float32: dict[str, tuple[int, ...]] = {
            "part": (units, 16, c.head_dim),
            "part_ml": (units, 16, 2),
            "sums": (self.cut.down_split, c.hidden_size, MAX_ROWS),
            "squares": (MAX_ROWS, c.hidden_size // 16),
            "top": (self.cut.programs, MAX_ROWS),
        }
        int32: dict[str, tuple[int, ...]] = {
            "top_at": (self.cut.programs, MAX_ROWS),
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

    def run(
        self,
        x: Tensor,  # [rows, hidden] embeddings, overwritten
        positions: Tensor,  # [rows] int32, as all indices here
        slots: Tensor,  # [rows]
        seen: Tensor,  # [rows]
        starts: Tensor,  # [seqs + 1]
        tables: Tensor,  # [seqs, pages], any strides
        logits: Tensor,  # [rows, vocab] float32, written
        greedy: Tensor,  # [rows] int64, written
    ) -> None:
        """One forward of all rows, on the current stream. A sequence's tokens are its last entries, in order."""
        rows, decoder = x.shape[0], self.decoder
        final_norm, eps = decoder.final_norm
        assert final_norm is not None
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows, one launch takes at most {MAX_ROWS}")
        given = {
            "layers": self.layers, "final_norm": final_norm, "head": decoder.head.weight,
            "rotations": decoder.attention.ropes[decoder.config.rope].table, "positions": positions, "slots": slots,
            "seen": seen, "starts": starts, "tables": tables, "x": x, "logits": logits, "greedy": greedy,
        }  # fmt: skip
        params = _Params(**{name: tensor.data_ptr() for name, tensor in (given | self._scratch).items()})
        params.rows, params.seqs = rows, starts.numel() - 1
        params.table_stride, params.page_stride = tables.stride()
        params.eps = eps
        params.scale_log2 = decoder.config.scale * LOG2_E
        self.kernel.launch(params)
