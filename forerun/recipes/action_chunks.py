"""Chunks of actions that are accepted until one is broken: a light policy proposes, a heavy one verifies.

The same shape as speculative decoding, for callers whose verifier is not a language model's next token: a planner, a
simulator, a larger policy. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from forerun.errors import BadRequest

State = TypeVar("State")
Action = TypeVar("Action")


@dataclass
class ChunkRun(Generic[State, Action]):
    """What was done, and what it took."""

    state: State
    actions: list[Action] = field(default_factory=list)
    calls: int = 0  # of the verifier
    proposed: int = 0
    accepted: int = 0


def accept_until_broken(
    state: State,
    propose: Callable[[State], Sequence[Action]],
    verify: Callable[[State, Sequence[Action]], Sequence[Action]],
    act: Callable[[State, Action], State],
    done: Callable[[State], bool],
    max_actions: int,
) -> ChunkRun[State, Action]:
    """Go on from a state until it is done. In turn: `propose` a chunk of actions, one call of `verify` for what the
    verifier itself would do in the state and after each action of the chunk (so one action more than the chunk has),
    and `act` on the longest beginning on which both agree, then on the verifier's own action. Nothing is done that the
    verifier would not have done; a chunk saves it calls as far as it is right."""
    if max_actions < 1:
        raise BadRequest(f"max_actions is {max_actions}, it must be at least 1", "allow at least one action")
    run: ChunkRun[State, Action] = ChunkRun(state)
    while len(run.actions) < max_actions and not done(run.state):
        chunk = list(propose(run.state))
        own = list(verify(run.state, chunk))
        if len(own) != len(chunk) + 1:
            hint = "return the verifier's action in the state and after each action of the chunk"
            raise BadRequest(f"verify returned {len(own)} actions for a chunk of {len(chunk)}", hint)
        run.calls, run.proposed = run.calls + 1, run.proposed + len(chunk)
        for at, action in enumerate(own):
            run.state = act(run.state, action)
            run.actions.append(action)
            agreed = at < len(chunk) and chunk[at] == action
            run.accepted += agreed
            if not agreed or done(run.state) or len(run.actions) >= max_actions:
                break
    return run
