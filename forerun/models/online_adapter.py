"""A drafter that learns from what the target accepted: a small change to its last rows, trained when nothing else runs.

Every pass of a drafter leaves its rows; once the tokens that followed are known, rows and tokens go into a bounded
buffer. A trial changes a copy of the adapter by some steps on the older answers in the buffer. Then the copy, the
adapter as it was and none at all draft the newest answers, of which no step has read anything; the one with the most
accepted tokens is kept, and while that is the copy, another trial follows. The end of an answer would not do: what is
learnt from its beginning drafts it better and other answers worse. Drafts are verified, so no answer changes. Knows
rows and tokens; no engine and no text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import BadDrafter

log = logging.getLogger("forerun")

ADAPTER_RANK = 16
MAX_PASSES = 1024  # in the buffer: of 8 rows of 576 values, 19 MB
MAX_PENDING_PASSES = 64  # of one sequence, whose tokens are not known yet
MIN_NEW_PASSES = 64  # since the last trial, before the next one
TRIAL_STEPS = 24
STEP_PASSES = 12  # in one step: a request that comes meanwhile waits for one
MIN_NEWEST_PASSES, MAX_NEWEST_PASSES = 64, 256  # that a trial is measured on
WHOLE_PASSES = 256  # of one sequence that all go into the buffer; of later ones every second, then every third, ...
RATE, BIAS_RATE = 1e-3, 0.005  # of Adam: a bias is in units of logits
# Of the divergence from the drafter as it was trained, beside the cross entropy: without it a few hundred passes are
# learnt by heart, and other text is drafted worse (0.57 to 0.9 of the accepted tokens; docs/log.md)
FAITH = 2.0
MIN_DEVIATIONS = 1.5  # by which the newest passes must gain: with less, chance keeps one change in three


@dataclass
class AdapterState:
    """What is added: b @ (a @ row) to a row, `bias` to its logits."""

    a: Tensor  # [rank, width]
    b: Tensor  # [width, rank]
    bias: Tensor  # [draft vocabulary]

    @classmethod
    def zero(cls, width: int, vocab: int, device: torch.device) -> AdapterState:
        draw = torch.Generator().manual_seed(0)
        a = torch.randn(ADAPTER_RANK, width, generator=draw).to(device) * width**-0.5
        return cls(a, torch.zeros(width, ADAPTER_RANK, device=device), torch.zeros(vocab, device=device))

    def copy(self) -> AdapterState:
        return AdapterState(self.a.clone(), self.b.clone(), self.bias.clone())

    def parameters(self) -> list[Tensor]:
        return [self.a, self.b, self.bias]


@dataclass
class AdapterTrial:
    """A copy that learns from older passes, then drafts the newest beside the adapter as it is and none."""

    state: AdapterState
    optimizer: torch.optim.Optimizer
    older: list[SeenPass]
    newest: list[SeenPass]
    steps: int = 0
    measured: int = 0  # of the newest passes
    accepted: tuple[int, int, int] = (0, 0, 0)  # tokens of: the copy, the adapter as it is, none
    squares: int = 0  # of what each pass gained by the copy


@dataclass
class SeenPass:
    """Rows of one pass, and the tokens around them: the last known one, then those that came."""

    rows: Tensor  # [depth, width] float32
    tokens: list[int]  # depth + 1 of them
    sequence: int = 0


class OnlineAdapter:
    def __init__(
        self,
        head: Tensor,
        ids: Tensor,
        vocab: int,
        bias: Callable[[Tensor], Tensor] | None = None,
        learning: bool = True,
    ) -> None:
        """`head`: [draft vocabulary, width] float32, of tokens `ids`. `bias`: what the tokens before rows [N] add to
        their logits, [N, draft vocabulary]. `learning`: False: it only applies what was learnt before."""
        self.learning = learning
        self._head, self._ids, self._bias = head, ids, bias
        self._column = torch.full((vocab,), -1, dtype=torch.long, device=ids.device)
        self._column[ids] = torch.arange(len(ids), device=ids.device)
        self.state = AdapterState.zero(head.shape[1], len(ids), head.device)
        self.active = False  # whether the state changes anything
        self.passes: deque[SeenPass] = deque(maxlen=MAX_PASSES)
        self._pending: dict[int, deque[tuple[int, Tensor]]] = {}  # by sequence: tokens known at the pass, its rows
        self._counts: dict[int, int] = {}  # by sequence: passes whose tokens have come, less one
        self._new = 0
        self._trial: AdapterTrial | None = None
        self._none = AdapterState.zero(head.shape[1], len(ids), head.device)
        self.stats = {"trials": 0, "kept": 0, "dropped": 0}

    # -- drafting ------------------------------------------------------------------------------------------------------

    def change_rows(self, rows: Tensor) -> Tensor:
        """[.., width]"""
        return rows + rows @ self.state.a.T.to(rows.dtype) @ self.state.b.T.to(rows.dtype) if self.active else rows

    def change_logits(self, logits: Tensor) -> Tensor:
        """[.., draft vocabulary] of changed rows."""
        return logits + self.state.bias if self.active else logits

    # -- what happened -------------------------------------------------------------------------------------------------

    def record(self, seq_id: int, tokens: list[int], rows: Tensor) -> None:
        """A pass after `tokens` of a sequence; earlier ones whose tokens have come go into the buffer."""
        if not self.learning:
            return
        waiting = self._pending.setdefault(seq_id, deque(maxlen=MAX_PENDING_PASSES))
        while waiting and waiting[0][0] + len(waiting[0][1]) <= len(tokens):
            length, past = waiting.popleft()
            number = self._counts[seq_id] = self._counts.get(seq_id, -1) + 1
            if number % (1 + number // WHOLE_PASSES) == 0:
                self.passes.append(SeenPass(past, tokens[length - 1 : length + len(past)], seq_id))
                self._new += 1
        with torch.inference_mode(False):  # a plain tensor, which gradients may pass
            waiting.append((len(tokens), rows.detach().float().clone()))

    def finish(self, seq_id: int, tokens: list[int]) -> None:
        """A sequence ended: passes whose tokens never came are dropped."""
        if seq_id in self._pending:
            self.record(seq_id, tokens, self._head[:0])
            del self._pending[seq_id]
            self._counts.pop(seq_id, None)

    # -- learning ------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether there is something to learn: of two sequences at least, one to learn from and one to measure on."""
        enough = self._new >= MIN_NEW_PASSES and self.passes[0].sequence != self.passes[-1].sequence
        return self.learning and (self._trial is not None or enough)

    def step(self) -> bool:
        """A piece of a trial, when nothing else runs; False where there is nothing to learn from."""
        if not self.due:
            return False
        with torch.inference_mode(False), torch.enable_grad():
            trial = self._trial = self._trial or self._begin()
            if trial.steps < TRIAL_STEPS:
                self._train(trial)
            elif trial.measured < len(trial.newest):
                self._measure(trial)
            else:
                self._choose(trial)
        return True

    def try_step(self) -> bool:
        """The same; what raises ends the learning of this drafter alone, which goes on as it is."""
        try:
            return self.step()
        except Exception as error:
            log.error("a drafter stops learning", exc_info=error)
            self.learning = False
            return False

    def _begin(self) -> AdapterTrial:
        seen, state, self._new = list(self.passes), self.state.copy(), 0
        for value in state.parameters():
            value.requires_grad_()
        newest = set[int]()
        for last, each in enumerate(reversed(seen)):  # the latest sequences, as many as it takes, but for the first
            if each.sequence not in newest and (last >= MIN_NEWEST_PASSES or each.sequence == seen[0].sequence):
                break
            newest.add(each.sequence)
        older, held = ([p for p in seen if (p.sequence in newest) == new] for new in (False, True))
        groups = [{"params": [state.a, state.b], "lr": RATE}, {"params": [state.bias], "lr": BIAS_RATE}]
        optimizer = torch.optim.Adam(groups)
        return AdapterTrial(state, optimizer, older, held[-MAX_NEWEST_PASSES:])

    def _train(self, trial: AdapterTrial) -> None:
        draw = torch.Generator().manual_seed(self.stats["trials"] * TRIAL_STEPS + trial.steps)
        chosen = torch.randint(0, len(trial.older), (STEP_PASSES,), generator=draw).tolist()
        rows, before, wanted = self._batch([trial.older[i] for i in chosen])
        known = wanted >= 0
        if bool(known.any()):
            trial.optimizer.zero_grad()
            logits = self._logits(trial.state, rows[known], before[known])
            with torch.no_grad():
                as_trained = self._logits(self._none, rows[known], before[known]).log_softmax(-1)
            away = F.kl_div(logits.log_softmax(-1), as_trained, reduction="batchmean", log_target=True)
            (F.cross_entropy(logits, wanted[known]) + FAITH * away).backward()
            trial.optimizer.step()
        trial.steps += 1

    def _measure(self, trial: AdapterTrial) -> None:
        group = trial.newest[trial.measured : trial.measured + STEP_PASSES]
        none = self.accepted(self._none, group)
        current = self.accepted(self.state, group) if self.active else none
        tried = self.accepted(trial.state, group)
        trial.squares += sum((a - b) ** 2 for a, b in zip(tried, current, strict=True))
        new = (sum(tried), sum(current), sum(none))
        trial.accepted = tuple(map(sum, zip(trial.accepted, new, strict=True)))  # type: ignore[assignment]
        trial.measured += len(group)

    def _choose(self, trial: AdapterTrial) -> None:
        tried, current, none = trial.accepted
        self.stats["trials"] += 1
        if tried > max(current, none) and tried - current >= MIN_DEVIATIONS * trial.squares**0.5:
            for value in trial.state.parameters():
                value.requires_grad_(False)
            self.state, self.active = trial.state, True
            self.stats["kept"] += 1
            self._new = max(self._new, MIN_NEW_PASSES)  # another trial may gain more
        elif self.active and none > current:
            self.state, self.active = self._none, False
            self.stats["dropped"] += 1
        self._trial = None

    @torch.no_grad()
    def accepted(self, state: AdapterState, passes: list[SeenPass]) -> list[int]:
        """Tokens of each pass that would have been accepted: the likeliest ones, as far as all are right."""
        rows, before, wanted = self._batch(passes)
        right, found = (self._logits(state, rows, before).argmax(-1) == wanted).tolist(), []
        for each in passes:
            hits, right = right[: len(each.rows)], right[len(each.rows) :]
            found.append(next((depth for depth, hit in enumerate(hits) if not hit), len(hits)))
        return found

    def _batch(self, passes: list[SeenPass]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [N, width], the tokens before them [N] and the columns of those that came [N], -1: never drafted."""
        rows = torch.cat([each.rows for each in passes])
        before, after = (
            torch.tensor([t for each in passes for t in each.tokens[part]], device=rows.device)
            for part in (slice(0, -1), slice(1, None))
        )
        return rows, before, self._column[after]

    def _logits(self, state: AdapterState, rows: Tensor, before: Tensor) -> Tensor:
        changed = rows + rows @ state.a.T @ state.b.T
        logits = changed @ self._head.T + state.bias
        return logits if self._bias is None else logits + self._bias(before)

    # -- files ---------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What a drafter's file holds of it; nothing where it changes nothing."""
        names = ("adapter.a", "adapter.b", "adapter.bias")
        values = self.state.parameters() if self.active else []
        return {name: value.detach().cpu().clone() for name, value in zip(names, values, strict=False)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on with what an earlier process learnt."""
        found = [tensors.get(name) for name in ("adapter.a", "adapter.b", "adapter.bias")]
        if all(value is not None for value in found):
            parts = [value.to(self._head.device).float() for value in found if value is not None]
            if [p.shape for p in parts] != [p.shape for p in self.state.parameters()]:
                raise BadDrafter("the drafter's adapter has other shapes than its head", "copy it anew, or train again")
            self.state, self.active = AdapterState(*parts), True
