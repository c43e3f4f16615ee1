"""From an opened checkpoint to a decoder on a device: fuses matrices, chooses precision, shows progress.

The only place that knows both canonical tensor names and precisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from forerun.errors import BadRequest, CorruptModel
from forerun.models.attention import AttentionBackend, SdpaAttention
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, Layer
from forerun.models.linear import CPU_PRECISIONS, Linear, Norm, Precision
from forerun.progress import track

WEIGHTS = ("auto", "float32", "fp16", "bf16", "int8")


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise BadRequest(f"device is {device!r}", "use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadRequest("device is cuda, but torch sees no GPU here", "use device=cpu, or install a CUDA build of torch")
    return torch.device(device)


def choose_precision(weights: str, device: torch.device, quantised: bool) -> Precision:
    """`auto`: bf16 on CUDA; on CPU int8 for files that are quantised already, else float32 (bf16 if it is fast)."""
    if weights not in WEIGHTS:
        raise BadRequest(f"weights is {weights!r}", f"use one of {', '.join(WEIGHTS)}")
    if device.type == "cuda":
        dtypes = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
        if weights not in dtypes:
            raise BadRequest(f"weights {weights!r} need a CPU", "use bf16, fp16 or float32 on CUDA")
        return cuda_precision(dtypes[weights])
    if weights == "auto":
        weights = "int8" if quantised else "bf16" if fast_bf16() else "float32"
    if weights == "bf16":
        return Precision("bf16", Linear, torch.bfloat16)
    return CPU_PRECISIONS[weights]


def cuda_precision(dtype: torch.dtype) -> Precision:
    if dtype != torch.bfloat16:
        return Precision(str(dtype).removeprefix("torch."), Linear, dtype)
    from forerun.models.cuda.linear import SkinnyLinear

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
    checkpoint: Checkpoint, device: torch.device, weights: str, max_context: int, quiet: bool = False
) -> tuple[Decoder, Precision]:
    precision = choose_precision(weights, device, checkpoint.quantised)
    builder = _Builder(checkpoint, precision, device)
    config = checkpoint.config
    threads = torch.get_num_threads()
    with _workers(device) as pool:
        embedding = pool.submit(builder.embedding_and_head)  # the longest job goes first
        jobs = [pool.submit(builder.layer, i) for i in range(config.num_layers)]
        layers = [job.result() for job in track(jobs, "loading layers", quiet)]
        lookup, head = embedding.result()
    torch.set_num_threads(threads)  # the workers' setting would otherwise be what later threads start with
    decoder = Decoder(
        config=config,
        lookup=lookup,
        layers=layers,
        final_norm=builder.norm("final_norm"),
        head=head,
        attention=attention_backend(config, device, precision.dtype, max_context),
        dtype=precision.dtype,
        device=device,
    )
    checkpoint.release()
    return decoder, precision


def _workers(device: torch.device) -> ThreadPoolExecutor:
    """Packing weights runs on one core per matrix, so on a CPU whole layers are prepared side by side."""
    if device.type == "cuda":
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))


def attention_backend(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, max_context: int
) -> AttentionBackend:
    if device.type == "cuda" and dtype == torch.bfloat16:
        from forerun.models.cuda.attention import PagedAttention

        return PagedAttention(config, device, max_context)
    return SdpaAttention(config, device, max_context)


class _Builder:
    """Reads tensors by canonical name, checks their shapes, and makes linears and norms of them."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision, device: torch.device) -> None:
        self.checkpoint, self.precision, self.device = checkpoint, precision, device
        self.config = checkpoint.config

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CorruptModel(
                f"{self.checkpoint.source}: {name} has shape {tuple(tensor.shape)}, the configuration says {shape}",
                "the files do not belong together; fetch the model again",
            )
        return tensor

    def fused(self, names: list[str], rows: list[int], cols: int, biases: list[str] | None = None) -> Linear:
        parts = [self.tensor(name, (n, cols)) for name, n in zip(names, rows, strict=True)]
        weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)
        bias = None
        if biases:
            bias = torch.cat([self.tensor(b, (n,)).float() for b, n in zip(biases, rows, strict=True)])
            bias = bias.to(self.device, self.precision.dtype)
        del parts
        linear = self.precision.linear(self._cast(weight), bias)
        self.checkpoint.release()
        return linear

    def _cast(self, weight: Tensor) -> Tensor:
        # packed CPU linears read any float; plain ones hold the weight in the compute dtype
        return weight.to(self.precision.dtype) if self.precision.name in ("bf16", "float16", "float32") else weight

    def norm(self, name: str, size: int = 0) -> Norm:
        weight = self.tensor(name, (size or self.config.hidden_size,))
        return weight.float().to(self.device, self.precision.dtype), self.config.norm_eps

    def layer(self, i: int) -> Layer:
        c, p = self.config, f"layers.{i}."
        rows, hidden = [c.q_size, c.kv_size, c.kv_size], c.hidden_size
        biases = [p + b for b in ("q_bias", "k_bias", "v_bias")] if c.qkv_bias else None
        return Layer(
            attn_norm=self.norm(p + "attn_norm"),
            qkv=self.fused([p + "q", p + "k", p + "v"], rows, hidden, biases),
            o=self.fused([p + "o"], [hidden], c.q_size),
            mlp_norm=self.norm(p + "mlp_norm"),
            gate_up=self.fused([p + "gate", p + "up"], [c.intermediate_size] * 2, hidden),
            down=self.fused([p + "down"], [hidden], c.intermediate_size),
            qk_norms=(self.norm(p + "q_norm", c.head_dim), self.norm(p + "k_norm", c.head_dim)) if c.qk_norm else None,
            post_attn_norm=self.norm(p + "post_attn_norm") if c.post_norms else None,
            post_mlp_norm=self.norm(p + "post_mlp_norm") if c.post_norms else None,
        )

    def embedding_and_head(self) -> tuple[Callable[[Tensor], Tensor], Linear]:
        c = self.config
        shape = (c.vocab_size, c.hidden_size)
        head = self.precision.linear(
            self._cast(self.tensor("embed" if c.tie_embeddings else "head", shape).to(self.device)), None
        )
        if self.device.type == "cpu":
            # a row is read from the mapped file when its token comes: the table never takes memory of its own
            return lambda ids: self.checkpoint.rows("embed", ids), head
        table = head.weight if c.tie_embeddings else self.tensor("embed", shape).to(self.device, self.precision.dtype)
        return lambda ids: table.index_select(0, ids), head
