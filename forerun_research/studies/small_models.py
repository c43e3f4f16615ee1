"""Small models trained from nothing within minutes, for questions that no published pair answers: one tokenizer, shapes
and data that are known.

Code, of which a part is made to repeat itself and to state facts again (`practice`): what a long prompt is used for,
and what makes a model look back at all. Written as transformers writes a model, so that it opens like any other.
"""

from __future__ import annotations

import json
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from forerun.models.config import ModelConfig
from forerun.train.muon import Muon
from forerun_research.studies.prefill_recall import facts
from forerun_research.studies.prefill_texts import held_out

CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FACTS = 8  # of a row that states facts
REPEATS, REPEATED = 8, (24, 160)  # spans of a row that repeats itself, and how long they are
PLAIN, REPEATING = 0.4, 0.3  # shares of the rows; the rest states facts
ROW_TOKENS, ROWS = 4096, 8  # of one step
WARMUP, DECAY = 0.05, 0.5  # shares of the time: until the rate is whole, and from the end on in which it falls
RATE = 1e-3  # of Adam and Muon alike, for a width of 1,024; narrower models take larger steps
EVERY_STEPS = 50  # between two lines of progress
Encode = Callable[[str], list[int]]


def code_texts(limit: int, seed: int = 0) -> list[str]:
    """Python files that are installed, without those that studies measure on; at most so many characters."""
    stdlib, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    files = [path for path in sorted(stdlib.glob("*.py")) if not held_out(path)]
    files += sorted(packages.rglob("*.py"))
    random.Random(seed).shuffle(files)
    found, size = [], 0
    for path in files:
        if size >= limit:
            break
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 1000:
            found.append(text)
            size += len(text)
    return found


def make_tokenizer(texts: Sequence[str], vocab: int, folder: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE in a model's folder, with a chat format."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END, START, STOP], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": STOP, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": CHATML}))
    return backend


def as_stream(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """All texts as one row of tokens, each ended."""
    rows = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.concatenate([np.array([*row.ids, 0], dtype=np.uint16) for row in rows])


def practice(row: list[int], draw: random.Random, encode: Encode) -> list[int]:
    """The row as it is, with spans that stand there twice, or with facts that are stated again later."""
    kind, length = draw.random(), len(row)
    if kind < PLAIN:
        return row
    if kind < PLAIN + REPEATING:
        for _ in range(REPEATS):
            size = min(draw.randint(*REPEATED), length // 4)
            at = draw.randrange(length - 2 * size)
            to = draw.randrange(at + size, length - size + 1)
            row[to : to + size] = row[at : at + size]
        return row
    said = [encode(what + value) for what, value in facts(draw, FACTS)]
    for first, last in ((0, length // 2), (length // 2, length)):
        for ids in draw.sample(said, len(said)):
            at = draw.randrange(first, last)
            row[at:at] = ids
    return row[:length]


def batches(stream: np.ndarray, encode: Encode, length: int, rows: int, seed: int) -> Iterator[Tensor]:
    """[rows, length] from random places of the stream, for ever."""
    draw = random.Random(seed)
    while True:
        places = [draw.randrange(len(stream) - length) for _ in range(rows)]
        made = [practice(stream[at : at + length].tolist(), draw, encode) for at in places]
        yield torch.tensor(made, dtype=torch.int64)


def network(config: ModelConfig) -> PreTrainedModel:
    """A model of this shape with weights drawn at random."""
    made = CONFIGS[config.family](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    return model.float()


def rate_at(done: float) -> float:
    """Of the highest rate, after this share of the time."""
    return min(1.0, done / WARMUP, math.sqrt(max(0.0, 1.0 - done) / DECAY))


def train(
    config: ModelConfig, stream: np.ndarray, encode: Encode, folder: Path, seconds: float, device: torch.device
) -> dict[str, float]:
    """For so many seconds; the model is in the folder, beside its tokenizer, when it returns."""
    end = time.monotonic() + seconds
    model = network(config).to(device)
    if device.type == "cuda":
        torch._dynamo.config.suppress_errors = True  # a layer that does not compile runs as it is
        for layer in model.model.layers:
            layer.compile()
    matrices = [value for value in model.model.layers.parameters() if value.ndim == 2]
    others = [value for value in model.parameters() if value.ndim != 2 or value.shape[0] == config.vocab_size]
    rate = RATE * (1024 / config.hidden_size) ** 0.5
    adam = torch.optim.AdamW(others, rate, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    optimizers: list[torch.optim.Optimizer] = [adam, Muon(matrices, rate)]
    length = min(ROW_TOKENS, config.max_context, len(stream) // 4)
    step, start, loss = 0, time.monotonic(), torch.zeros(())
    for tokens in batches(stream, encode, length, ROWS, seed=config.hidden_size):
        left = end - time.monotonic()
        if left <= 0:
            break
        factor = rate_at(1.0 - left / seconds)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        tokens = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % EVERY_STEPS == 0:
            print(f"{folder.name}: step {step}, loss {float(loss):.3f}, {time.monotonic() - start:.0f} s", flush=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    return {"steps": step, "tokens": step * ROWS * length, "loss": float(loss), "weights": model.num_parameters()}
