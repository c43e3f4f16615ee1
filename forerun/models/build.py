"""From an opened checkpoint to a decoder on a device: fuses matrices, chooses precision, shows progress.

The only place that knows both canonical tensor names and precisions.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.progress import counter, track
from forerun.core.usage import LoadReport
from forerun.errors import BadRequest
from forerun.models.attention import AttentionBackend, SdpaAttention
from forerun.models.config import ModelConfig
from forerun.models.cpu.attention import PagedCpuAttention
from forerun.models.cpu.block_linear import BlockLinear, PackedBlocks, set_threads
from forerun.models.cpu.block_linear import problem as block_problem
from forerun.models.cpu.choice import blocks_are_worth_it
from forerun.models.cpu.huge_pages import move_in_background
from forerun.models.cpu.importance import WeightPlan
from forerun.models.cpu.library import build_key, cpu_kind
from forerun.models.cpu.rows import BlockEmbeddings
from forerun.models.cpu.streaming import StreamedAttention, StreamedLinear
from forerun.models.decoder import Decoder, Layer, TokenEmbeddings
from forerun.models.execution.short_head import FREQUENT_IDS, ShortHead
from forerun.models.formats.checkpoint import Checkpoint, expected_shapes
from forerun.models.formats.dequant import EmbeddingRows
from forerun.models.formats.fingerprint import fingerprint
from forerun.models.linear import CPU_PRECISIONS, Int8Rows, Linear, Norm, PackedInt8, Precision, Rotation, int8_range
from forerun.models.packed_cache import LIMIT_VARIABLE, PackedFile, PackedKey, PackedWriter, folder
from forerun.models.packed_cache import load as load_packed

log = logging.getLogger("forerun")

MIN_KEPT_BYTES = 32_000_000  # of a model's files: fewer are packed in less time than a person notices
# What decides the bits of packed weights, beside the C library: a change of any of these files makes them anew
PACKING_CODE = (
    "build.py",
    "linear.py",
    "cpu/block_linear.py",
    "cpu/quantise.py",
    *(f"formats/{n}.py" for n in ("adapter", "dequant", "gguf_checkpoint", "hf")),
)

WEIGHTS = ("auto", "float32", "fp16", "bf16", "int8", "file")


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise BadRequest(f"device is {device!r}", "use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        hint = "use device=cpu, or install a CUDA build of torch"
        raise BadRequest("device is cuda, but torch sees no GPU here", hint)
    return torch.device(device)


def choose_precision(weights: str, device: torch.device, quantised: bool) -> Precision:
    """`auto`: bf16 on CUDA; on CPU a quantised file's own blocks (`build_decoder` falls back to int8), else float32
    (bf16 if it is fast)."""
    if weights not in WEIGHTS:
        raise BadRequest(f"weights is {weights!r}", f"use one of {', '.join(WEIGHTS)}")
    if device.type == "cuda":
        dtypes = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
        if weights not in dtypes:
            raise BadRequest(f"weights {weights!r} need a CPU", "use bf16, fp16 or float32 on CUDA")
        return cuda_precision(dtypes[weights])
    if weights == "auto":
        weights = "file" if quantised else "bf16" if fast_bf16() else "float32"
    if weights == "bf16":
        return Precision("bf16", Linear, torch.bfloat16)
    if weights == "file":
        return Precision("file", BlockLinear, torch.float32)
    return CPU_PRECISIONS[weights]


def cuda_precision(dtype: torch.dtype) -> Precision:
    if dtype != torch.bfloat16:
        return Precision(str(dtype).removeprefix("torch."), Linear, dtype)
    from forerun.models.cuda.fused import SkinnyLinear

    return Precision("bf16", SkinnyLinear, dtype)


def fast_bf16(rows: int = 64, size: int = 512) -> bool:
    """Whether bf16 products beat float32 on this CPU. Measured: some machines run them hundreds of times slower."""

    def seconds(dtype: torch.dtype) -> float:
        x, w = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
        return best

    return seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)


def build_decoder(
    checkpoint: Checkpoint,
    device: torch.device,
    weights: str,
    max_context: int,
    quiet: bool = False,
    is_draft: bool = False,
    batch_invariant: bool | None = None,
    report: LoadReport | None = None,
    plan: WeightPlan | None = None,
) -> tuple[Decoder, Precision]:
    """`is_draft`: a draft model: faster, where results may depend on the batch and rare tokens may be left out.
    `batch_invariant`: False allows only the former, in attention; None allows it on CUDA where batches or prompts are
    large. `plan`: bits of each layer, in place of `weights`."""
    precision = planned_precision(plan) if plan else _precision(checkpoint, weights, device, quiet)
    key = packed_key(checkpoint, precision, is_draft, quiet, always=plan is not None and plan.streamed > 0)
    if plan is not None and plan.streamed and key is not None:
        write_streamed(checkpoint, precision, plan, key, quiet)
    builder = LayerBuilder(checkpoint, precision, device, is_draft, key, plan)
    config = checkpoint.config
    threads = torch.get_num_threads()
    pool = _workers(device)
    try:
        ends = pool.submit(builder.head)  # the longest job goes first
        jobs = [pool.submit(builder.layer, i) for i in range(config.num_layers)]
        label = "loading layers" if builder.writer is None else "packing layers, kept for the next start"
        layers = [job.result() for job in track(jobs, label, quiet)]
        final_norm, head = ends.result()
        if builder.writer is not None:
            builder.writer.commit()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for layers that are no longer needed
        if builder.writer is not None:
            builder.writer.discard()
    if report is not None:
        kept = builder.packed or builder.writer
        report.packed_read = builder.packed is not None
        report.packed_bytes += 0 if kept is None else kept.bytes
    torch.set_num_threads(threads)  # the workers' setting would otherwise be what later threads start with
    if precision.linear is BlockLinear:
        set_threads(threads)
    checkpoint.release()  # before the embedding is opened, which stays mapped on a CPU
    decoder = Decoder(
        config=config,
        lookup=builder.lookup(head),
        layers=layers,
        final_norm=final_norm,
        head=head,
        attention=builder.attention(max_context, same_bits=False if is_draft else batch_invariant),
        dtype=precision.dtype,
        device=device,
        basis=builder.basis,
        final_scale=builder.norm("final_norm")[0] if builder.config.pooling else None,
    )
    builder.move_blocks()
    return decoder, precision


def _precision(checkpoint: Checkpoint, weights: str, device: torch.device, quiet: bool) -> Precision:
    """As asked for; int8 for a file whose own blocks cannot be computed here."""
    precision = choose_precision(weights, device, checkpoint.quantised)
    if precision.linear is not BlockLinear:
        return precision
    with counter(1, "compiling CPU kernels", quiet):  # at the first start of a version on a CPU
        why = _no_blocks(checkpoint, asked=weights == "file")
    if not why:
        return precision
    level = logging.WARNING if weights == "file" else logging.INFO
    log.log(level, "%s is computed in int8, not in its own blocks: %s", checkpoint.source, why)
    return CPU_PRECISIONS["int8"]


def checkpoint_bytes(checkpoint: Checkpoint) -> int:
    """Of its files; 0 where it has none, or not all of them any more."""
    try:
        return sum(file.stat().st_size for file in checkpoint.files)
    except OSError:
        return 0


def planned_precision(plan: WeightPlan) -> Precision:
    return Precision("mixed", BlockLinear, torch.float32, plan=plan.text)


def write_streamed(checkpoint: Checkpoint, precision: Precision, plan: WeightPlan, key: PackedKey, quiet: bool) -> None:
    """Layers that are read from disk at every step have to be there before: each is made, written and dropped."""
    builder = LayerBuilder(checkpoint, precision, torch.device("cpu"), False, key, WeightPlan(plan.bits))
    if builder.writer is None:
        return
    try:
        for i in track(range(checkpoint.config.num_layers), "packing layers, to be read at every step", quiet):
            builder.layer(i)  # in their order, which is the order of the file
        builder.head()
        builder.writer.commit()
    finally:
        builder.writer.discard()
    if not builder.writer.bytes:
        raise BadRequest(
            f"{plan.streamed} layers do not fit into memory, and they cannot be read from disk: {folder()} has no room "
            f"for them, or {LIMIT_VARIABLE} allows no more",
            f"make room, raise {LIMIT_VARIABLE}, or give more memory",
        )


def packed_key(
    checkpoint: Checkpoint, precision: Precision, is_draft: bool, quiet: bool, always: bool = False
) -> PackedKey | None:
    """Under which packed weights are kept; None where they are not: no file, few bytes (unless `always`), or no packing
    of ours."""
    small = checkpoint_bytes(checkpoint) < MIN_KEPT_BYTES
    if precision.name not in ("int8", "file", "mixed") or (small and not always):
        return None
    try:
        code = hashlib.blake2b(f"{torch.__version__} {int8_range()}".encode(), digest_size=16)
        for name in PACKING_CODE:
            code.update((Path(__file__).parent / name).read_bytes())
    except OSError:
        return None
    if precision.linear is BlockLinear:
        code.update(build_key().encode())
    use = f"{precision.name} of a draft model" if is_draft else precision.identity
    return PackedKey(fingerprint(checkpoint, quiet), use, cpu_kind(), code.hexdigest())


def _no_blocks(checkpoint: Checkpoint, asked: bool) -> str:
    """Why a model's matrices are not multiplied in the format of its file; empty where they are."""
    return block_problem_of(checkpoint) or ("" if asked or blocks_are_worth_it() else "int8 is faster on this CPU")


def block_problem_of(checkpoint: Checkpoint) -> str:
    """Why they cannot be. What a trained drafter changes is in 5-bit blocks, so the file that it changes decides."""
    checkpoint = getattr(checkpoint, "base", checkpoint)
    looked_up = set() if checkpoint.config.tie_embeddings else {"embed"}
    shapes = expected_shapes(checkpoint.config)
    return block_problem({checkpoint.stored(n)[0] for n, s in shapes.items() if len(s) == 2 and n not in looked_up})


def _workers(device: torch.device) -> ThreadPoolExecutor:
    """Packing weights runs on one core per matrix, so on a CPU whole layers are prepared side by side."""
    if device.type == "cuda":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))


def attention_backend(
    config: ModelConfig, device: torch.device, precision: Precision, max_context: int, same_bits: bool | None
) -> AttentionBackend:
    if device.type == "cuda" and precision.dtype == torch.bfloat16:
        from forerun.models.cuda.attention import PagedAttention

        return PagedAttention(config, device, max_context, same_bits)
    if precision.linear is BlockLinear and not PagedCpuAttention.problem(config):
        return PagedCpuAttention(config, device, max_context)
    rounds = precision.name in ("int8", "file", "mixed")  # where a difference in the last bit would grow
    return SdpaAttention(config, device, max_context, same_bits=same_bits is not False and rounds)


class LayerBuilder:
    """Reads tensors by canonical name (opening checked their shapes) and makes linears and norms of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        device: torch.device,
        is_draft: bool,
        key: PackedKey | None = None,
        plan: WeightPlan | None = None,
    ) -> None:
        self.plan = plan
        self.packed: PackedFile | None = None if key is None else load_packed(key)
        self.writer: PackedWriter | None = None
        if key is not None and self.packed is None:
            self.writer = PackedWriter(key, checkpoint.source, checkpoint.files)
        self.checkpoint, self.precision, self.device = checkpoint, precision, device
        self.config = checkpoint.config
        self.is_draft = is_draft
        self.made_blocks: list[Tensor] = []  # of this start; those of a packed file are in it
        self.short = is_draft and device.type == "cpu" and self.config.vocab_size > 2 * FREQUENT_IDS
        # norms after a block act in the model's own basis, so models that have them cannot be rotated
        rotated = precision.rotated and not self.config.post_norms
        self.basis = Rotation(self.config.hidden_size) if rotated else None

    def weights(self, *names: str) -> Tensor:
        """Matrices one above the other, on the device."""
        parts = [self.checkpoint.tensor(name, self.device) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear(
        self, name: str, weight: Callable[[], Tensor], bias: Tensor | None = None, kind: type[Linear] | None = None
    ) -> Linear:
        """`weight` is called where the packed form of `name` is not at hand."""
        kind = kind or self.precision.linear
        if issubclass(kind, PackedInt8):
            linear: Linear = kind(self._int8_rows(name, kind, weight), bias)
            if self.packed is not None:
                self.packed.release()  # the kernel has a copy of its own
        else:
            made = weight()
            linear = kind(made.to(self._dtype(made)), bias)
        self.checkpoint.release()
        return linear

    def _int8_rows(self, name: str, kind: type[PackedInt8], weight: Callable[[], Tensor]) -> Int8Rows:
        if self.packed is not None:
            return Int8Rows(self.packed[f"{name} levels"], self.packed[f"{name} scales"])
        rows = kind.quantise(weight())
        if self.writer is not None:
            self.writer.add(f"{name} levels", rows.levels)
            self.writer.add(f"{name} scales", rows.scales)
        return rows

    def _dtype(self, weight: Tensor) -> torch.dtype:
        # packed kinds read any float and choose for themselves; plain ones hold the weight in the compute dtype
        return weight.dtype if self.precision.linear.packs else self.precision.dtype

    def norm(self, name: str) -> Norm:
        return self.checkpoint.tensor(name).float().to(self.device, self.precision.dtype), self.config.norm_eps

    def file_linear(self, *names: str, bias: Tensor | None = None, rows: int | None = None) -> Linear:
        """Matrices one above the other in the file's own blocks, or as planned; of one alone the first `rows` if
        given."""
        blocks = [self._blocks(name, rows) for name in names]
        streamed = self.plan is not None and self.plan.streams(names[0])
        linear = StreamedLinear(blocks, bias, self.packed, names) if streamed else BlockLinear(blocks, bias)
        self.checkpoint.release()
        return linear

    def _blocks(self, name: str, rows: int | None) -> PackedBlocks:
        if self.packed is not None:
            format, count, cols = self.packed.about(name)
            return PackedBlocks.packed_before(format, count, cols, self.packed[name])
        if self.plan is None:
            format, raw = self.checkpoint.stored(name)
            blocks = PackedBlocks(format, raw[:rows])
        else:
            blocks = PackedBlocks.quantised(self.checkpoint.tensor(name)[:rows], self._bits(name))
        self.made_blocks.append(blocks.packed)
        if self.writer is not None:
            self.writer.add(name, blocks.packed, [blocks.format, blocks.rows, blocks.cols])
        return blocks

    def move_blocks(self) -> None:
        """Into huge pages, once all of them are there; not what is read from its file at every step."""
        if self.precision.linear is BlockLinear and not (self.plan is not None and self.plan.streamed):
            move_in_background(self.made_blocks if self.packed is None else [self.packed.all_tensors])

    def reading(self, norm: str, *names: str, bias: Tensor | None = None) -> tuple[Norm, Linear]:
        """A matrix that reads the residual stream, and the norm before it."""
        scale, eps = self.norm(norm)
        if self.precision.linear is BlockLinear:
            return (scale, eps), self.file_linear(*names, bias=bias)
        basis = self.basis
        if basis is None or scale is None:
            return (scale, eps), self.linear("+".join(names), lambda: self.weights(*names), bias)
        return (None, eps), self.linear("+".join(names), lambda: basis.apply(self.weights(*names), scale), bias)

    def writing(self, name: str, kind: type[Linear] | None = None) -> Linear:
        """A matrix that adds to the residual stream."""
        if self.precision.linear is BlockLinear:
            return self.file_linear(name)

        def weight() -> Tensor:
            made = self.weights(name)
            return made if self.basis is None else self.basis.apply_output(made.float())

        return self.linear(name, weight, kind=kind)

    def layer(self, i: int) -> Layer:
        c, p = self.config, f"layers.{i}."
        bias = self.weights(p + "q_bias", p + "k_bias", p + "v_bias") if c.qkv_bias else None
        bias = None if bias is None else bias.to(self.precision.dtype)
        attn_norm, qkv = self.reading(p + "attn_norm", p + "q", p + "k", p + "v", bias=bias)
        mlp_norm, gate_up = self.reading(p + "mlp_norm", p + "gate", p + "up")
        return Layer(
            attn_norm=attn_norm,
            qkv=qkv,
            o=self.writing(p + "o"),
            mlp_norm=mlp_norm,
            gate_up=gate_up,
            down=self.writing(p + "down", None if self.is_draft else self.precision.down),
            qk_norms=(self.norm(p + "q_norm"), self.norm(p + "k_norm")) if c.qk_norm else None,
            post_attn_norm=self.norm(p + "post_attn_norm") if c.post_norms else None,
            post_mlp_norm=self.norm(p + "post_mlp_norm") if c.post_norms else None,
        )

    def _bits(self, name: str) -> int:
        assert self.plan is not None
        return self.plan.bits[int(name.split(".")[1]) if name.startswith("layers.") else -1]

    def attention(self, max_context: int, same_bits: bool | None) -> AttentionBackend:
        if self.plan is not None and self.plan.streamed and not PagedCpuAttention.problem(self.config):
            assert self.packed is not None
            return StreamedAttention(self.config, self.device, max_context, self.packed, self.plan.streamed)
        return attention_backend(self.config, self.device, self.precision, max_context, same_bits)

    def lookup(self, head: Linear) -> Callable[[Tensor], Tensor]:
        """Token ids to embeddings."""
        if self.device.type == "cpu":
            kind = BlockEmbeddings if self.precision.linear is BlockLinear else EmbeddingRows
            rows = kind(*self.checkpoint.stored("embed"))
            return getattr(self.checkpoint, "with_mask", lambda plain: plain)(rows)
        tied = self.config.tie_embeddings
        return TokenEmbeddings(head.weight if tied else self.weights("embed").to(self.precision.dtype))

    def head(self) -> tuple[Norm, Linear]:
        """The last norm and the head: like `reading`, but some rows at a time, since whole and rotated copies of the
        largest matrix would double the peak."""
        name = "embed" if self.config.tie_embeddings else "head"
        scale, eps = self.norm("final_norm")
        rotated = self.basis is not None and scale is not None
        norm: Norm = (None, eps) if rotated else (scale, eps)

        def rows(ids: Tensor) -> Tensor:
            weight = self.checkpoint.rows(name, ids)
            return weight if self.basis is None or scale is None else self.basis.apply(weight, scale)

        if self.precision.linear is BlockLinear:
            head = self.file_linear(name, rows=FREQUENT_IDS if self.short else None)
            return norm, ShortHead(head, self.config.vocab_size, rows) if self.short else head

        def weight() -> Tensor:
            if not rotated and not self.short:
                return self.weights(name)
            size = FREQUENT_IDS if self.short else self.config.vocab_size
            made = torch.empty(size, self.config.hidden_size)
            for ids in torch.arange(size).split(8192):
                made[ids[0] : ids[-1] + 1] = rows(ids)
            return made

        head = self.linear("head", weight)
        return norm, ShortHead(head, self.config.vocab_size, rows) if self.short else head
