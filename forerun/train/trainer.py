"""Trains a drafter of any kind for a given time on a stream of tokens, and resumes where an earlier run stopped.

Windows of two lengths are cut from the stream: short ones with masks everywhere, and every fourth step long ones, so
that drafts are as good after a long prompt. Knows no files: the state is handed in.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadRequest
from forerun.models.config import ModelConfig
from forerun.options import check_number
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.calibration.resume import CalibrationState
from forerun.train.layout import RowLayout
from forerun.train.loss import Outcome, Teaching, backward, teach
from forerun.train.muon import Muon

LINE_INTERVAL_S = 5.0  # between two lines of progress
KEEP_INTERVAL_S = 100.0  # between two files of an unfinished run
QUICK = 10.0  # times the rate, of what has a row for each token: most rows are met in few steps
LONG_EVERY = 4  # steps: one of so many has long windows
REUSES = ("hidden", "kv", "both")
OPTIMIZERS = ("adam", "muon")  # muon: of the matrices of layers


class TrainableDrafter(Protocol):
    """What the loop needs of a kind of drafter."""

    device: torch.device
    config: ModelConfig
    ids: Tensor  # [columns] token ids that the loss compares
    extra_columns: int  # of the head, for what must never be drafted
    depths: tuple[int, ...]  # at which the target's hidden states are read
    kv_layers: tuple[int, ...]  # of the target, whose K/V is read
    learned: Tensor | None  # [columns, r] trained beside the head, on the last r values of a row

    def parameters(self) -> list[Tensor]: ...

    def quick(self) -> list[Tensor]:
        """Those of the parameters that learn QUICK times as fast."""
        ...

    def matrices(self) -> list[Tensor]:
        """Those of the parameters that Muon may change: matrices of layers."""
        ...

    def layout(self, length: int, tokens: int, generator: torch.Generator) -> RowLayout: ...

    def rows(self, tokens: Tensor, teaching: Teaching, layout: RowLayout) -> Tensor:
        """What the head reads, [B, rows, width], of windows [B, length] and what the target computed of them."""
        ...

    def head(self) -> Tensor:
        """[columns, width], not trained."""
        ...

    def learn_confidence(self, rows: Tensor, outcome: Outcome) -> None:
        """Add the gradient of what predicts acceptance, if there is such a thing."""
        ...


@dataclass(frozen=True)
class TrainSettings:
    kind: str = "parallel"
    tokens: int = 10  # drafted in one forward
    rank: int = 32  # of the changes to a draft's matrices; of a block's Markov head
    markov: int = 0  # rank of a Markov head beside a draft's masks; 0: none. A block's is `rank`
    markov_only: bool = False  # what is started from stays as it is, and gets a Markov head
    full: bool = False  # train a draft's matrices themselves, not changes of low rank
    layers: int = 1  # of a block
    reuse: str = "hidden"  # what a block reads of the tokens before it: hidden states, the target's K/V, or both
    state_norms: bool = False  # of a block: a norm for each hidden state before they are joined
    state_input: bool = False  # of a block: rows start from the vector of the token before them
    head_rank: int = 0  # of a block's own head; 0: the target's head
    bits: int = 8  # of a block's layers in its file; 5: rounded so in training, too
    vocab: int = 16384  # tokens that heads and blocks can draft: the text's most frequent ones
    attention_window: int = 512  # of a block: tokens before it that it reads
    minutes: float = 30.0
    max_steps: int = 0  # after which training ends, if its time is not over before; 0: any number
    rate: float = 4e-4  # of Adam, at its highest
    optimizer: str = "adam"
    warmup: float = 0.03  # share of the time
    batch_tokens: int = 8192  # of one step
    window: int = 512
    long_window: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"tokens": (2, 32), "rank": (1, 512), "window": (32, 32768), "batch_tokens": (32, 1 << 20)}
        limits |= {"layers": (1, 3), "vocab": (64, 1 << 20), "attention_window": (16, 32768)}
        limits |= {"markov": (0, 512), "head_rank": (0, 4096), "long_window": (32, 32768), "max_steps": (0, 1 << 30)}
        for name, (low, high) in limits.items():
            check_number(f"training: {name}", getattr(self, name), low, high, whole=True)
        check_number("training: minutes", self.minutes, 0.0, open_low=True)
        if self.reuse not in REUSES:
            raise BadRequest(f"training: reuse is {self.reuse!r}", f"use one of {', '.join(REUSES)}")
        if self.markov and (self.full or self.kind != "parallel"):
            raise BadRequest("training: markov is for changes to a draft model", "leave it out, or leave full out")
        if self.markov_only and not self.markov:
            raise BadRequest("training: markov_only without a Markov head trains nothing", "give markov, its rank")
        if self.bits not in (5, 8):
            raise BadRequest(f"training: bits is {self.bits}", "use 5 or 8")
        if self.optimizer not in OPTIMIZERS:
            raise BadRequest(f"training: optimizer is {self.optimizer!r}", f"use one of {', '.join(OPTIMIZERS)}")
        if self.state_input and self.reuse == "kv":
            raise BadRequest("training: state_input needs hidden states, reuse is 'kv'", "use reuse hidden or both")

    def factor(self, done: float) -> float:
        """Of the rate, after this share of the time."""
        return min(1.0, done / self.warmup) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))))


def make_optimizers(network: TrainableDrafter, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Adam for everything, or for what Muon leaves."""
    matrices = network.matrices() if settings.optimizer == "muon" else []
    quick, fused = network.quick(), network.device.type == "cuda"
    taken = {id(tensor) for tensor in (*matrices, *quick)}
    others = [tensor for tensor in network.parameters() if id(tensor) not in taken]
    groups = [{"params": own, "scale": scale} for own, scale in ((others, 1.0), (quick, QUICK)) if own]
    adam = torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return [adam, Muon(matrices, settings.rate)] if matrices else [adam]


class Trainer:
    def __init__(
        self, network: TrainableDrafter, target: DenseModel, stream: np.ndarray, settings: TrainSettings
    ) -> None:
        """`stream`: [N] int32 token ids, documents one after the other."""
        self.network, self.target, self.settings, self._stream = network, target, settings, stream
        self.steps, self.trained_tokens = 0, 0
        self.agreement = torch.zeros(settings.tokens, 2, device=network.device)  # recent, by depth: hits and rows
        self._optimizers = make_optimizers(network, settings)
        shortest = settings.window + 1
        if len(stream) < 4 * shortest:
            problem = f"the text makes {len(stream):,} tokens, training needs {4 * shortest:,} at the least"
            raise BadRequest(problem, "give more --text or --answers, or a smaller --window")

    def state(self) -> dict[str, object]:
        tensors = [tensor.detach().cpu() for tensor in self.network.parameters()]
        return {
            "parameters": tensors,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "steps": self.steps,
            "trained_tokens": self.trained_tokens,
        }

    def load(self, state: dict[str, object]) -> None:
        for tensor, saved in zip(self.network.parameters(), state["parameters"], strict=True):  # type: ignore[call-overload]
            tensor.data.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):  # type: ignore[call-overload]
            optimizer.load_state_dict(saved)
        self.steps, self.trained_tokens = int(state["steps"]), int(state["trained_tokens"])  # type: ignore[call-overload]

    def run(
        self,
        state: CalibrationState | None = None,
        spent_s: float = 0.0,
        deadline: float | None = None,
        keep: Callable[[], object] | None = None,
    ) -> None:
        """Until the settings' minutes are over; `spent_s` of them are. `deadline`: by the monotonic clock, the end in
        any case. `keep` is called now and then, so that a run that is killed leaves something."""
        limit, start = 60.0 * self.settings.minutes, time.monotonic() - spent_s
        limit = limit if deadline is None else min(limit, deadline - start)
        kept = time.monotonic()
        due, loss = time.monotonic(), None
        while (spent := time.monotonic() - start) < limit:
            done = spent / limit
            if self.settings.max_steps:
                if self.steps >= self.settings.max_steps:
                    break
                done = max(done, self.steps / self.settings.max_steps)
            latest = self.advance(done)
            loss = latest if loss is None else 0.95 * loss + 0.05 * latest
            if time.monotonic() > due:
                due = time.monotonic() + LINE_INTERVAL_S
                self._show(float(loss), spent, limit)
            if keep is not None and time.monotonic() > kept + KEEP_INTERVAL_S:
                keep()
                kept = time.monotonic()
            if state is not None:
                state.save_point(lambda: {"trainer": self.state(), "spent_s": time.monotonic() - start})

    def step(self, done: float) -> float:
        """`advance`, and wait for the loss."""
        return float(self.advance(done))

    def advance(self, done: float) -> Tensor:
        """One optimizer step; `done`: the share of the time that is over. Returns the loss, which may not be there
        yet: the host must not wait for the device between steps."""
        s = self.settings
        long = self.steps % LONG_EVERY == LONG_EVERY - 1 and len(self._stream) > 4 * s.long_window
        length = min(s.long_window if long else s.window, self.network.config.max_context)
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + self.steps)
        windows = self._windows(length + 1, max(1, s.batch_tokens // length), generator)
        tokens, following = windows[:, :-1], windows[:, 1:]
        network, layout = self.network, self.network.layout(length, s.tokens, generator)
        wanted = (network.ids, network.extra_columns, network.depths, network.kv_layers)
        teaching = teach(self.target, tokens, following, *wanted)
        self.agreement *= 0.98
        rows = network.rows(tokens, teaching, layout)
        outcome = backward(rows, network.head(), teaching, layout, self.agreement, network.learned)
        network.learn_confidence(rows.detach(), outcome)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = s.rate * s.factor(done) * group.get("scale", 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        self.trained_tokens += tokens.numel()
        return outcome.loss

    def _windows(self, length: int, count: int, generator: torch.Generator) -> Tensor:
        first = torch.randint(0, len(self._stream) - length + 1, (count,), generator=generator).tolist()
        found = torch.from_numpy(np.stack([self._stream[at : at + length] for at in first]).astype(np.int64))
        device = self.network.device
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

    def _show(self, loss: float, spent: float, limit: float) -> None:
        hits, rows = self.agreement.T.tolist()
        right = " ".join(f"{h / max(1.0, n):.2f}" for h, n in zip(hits, rows, strict=True))
        print(
            f"training: {spent:.0f} of {limit:.0f} s, {self.steps} steps, {self.trained_tokens / 1e6:.2f} M tokens, "
            f"loss {loss:.3f}, agreement by depth {right}, about {limit - spent:.0f} s left",
            file=sys.stderr,
            flush=True,
        )
