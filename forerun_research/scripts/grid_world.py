"""A grid world where a heavy policy verifies chunks of a light one: its success at a fraction of its calls.

The heavy policy searches the whole map for a shortest path (breadth first); the light one walks towards the goal and
around what is next to it. `recipes.accept_until_broken` runs them together: nothing is done that the heavy policy would
not have done. A call of the heavy policy is one search from the goal, which answers for every cell of a chunk.

    python -m forerun_research.scripts.grid_world --worlds 200
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.recipes import accept_until_broken
from forerun_research.studies.intervals import bootstrap, wilson

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {"right": (1, 0), "down": (0, 1), "left": (-1, 0), "up": (0, -1)}


@dataclass(frozen=True)
class GridWorld:
    size: int
    walls: frozenset[Cell]
    start: Cell
    goal: Cell

    def after(self, cell: Cell, action: str) -> Cell:
        """A move into a wall changes nothing."""
        x, y = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
        return cell if (x, y) in self.walls or not (0 <= x < self.size and 0 <= y < self.size) else (x, y)

    def distances(self) -> dict[Cell, int]:
        """Steps to the goal from every cell that reaches it."""
        found, pending = {self.goal: 0}, deque([self.goal])
        while pending:
            cell = pending.popleft()
            for action in MOVES:
                near = self.after(cell, action)
                if near not in found:
                    found[near] = found[cell] + 1
                    pending.append(near)
        return found


def make_world(seed: int, size: int = 16, walls: float = 0.22) -> GridWorld:
    """With a way from the start to the goal."""
    draw = random.Random(seed)
    cells = [(x, y) for x in range(size) for y in range(size)]
    while True:
        start, goal = draw.sample(cells, 2)
        blocked = frozenset(c for c in cells if draw.random() < walls and c not in (start, goal))
        world = GridWorld(size, blocked, start, goal)
        if start in world.distances():
            return world


def preferred(world: GridWorld, cell: Cell) -> list[str]:
    """Actions by how directly they lead to the goal; both policies break ties with it."""
    away = (world.goal[0] - cell[0], world.goal[1] - cell[1])
    return sorted(MOVES, key=lambda action: -(MOVES[action][0] * away[0] + MOVES[action][1] * away[1]))


def light_action(world: GridWorld, cell: Cell, last: str | None = None) -> str:
    """The most direct move that no wall blocks, and not straight back."""
    back = {"right": "left", "left": "right", "up": "down", "down": "up"}.get(last or "")
    free = [action for action in preferred(world, cell) if world.after(cell, action) != cell]
    return next((action for action in free if action != back), free[0])


def light_chunk(world: GridWorld, cell: Cell, length: int) -> list[str]:
    chunk: list[str] = []
    while len(chunk) < length and cell != world.goal:
        chunk.append(light_action(world, cell, chunk[-1] if chunk else None))
        cell = world.after(cell, chunk[-1])
    return chunk


def heavy_actions(world: GridWorld, cell: Cell, chunk: Sequence[str]) -> list[str]:
    """One search; the best action in the cell and after each action of a chunk."""
    distances, found = world.distances(), []
    for action in [*chunk, None]:
        found.append(min(preferred(world, cell), key=lambda a: distances[world.after(cell, a)]))  # noqa: B023
        cell = world.after(cell, action) if action is not None else cell
    return found


def walk(world: GridWorld, length: int, limit: int) -> tuple[bool, int, int]:
    """Whether the goal was reached, calls of the heavy policy, actions; a chunk of 0 is the heavy policy alone."""
    run = accept_until_broken(
        world.start,
        lambda cell: light_chunk(world, cell, length),
        lambda cell, chunk: heavy_actions(world, cell, chunk),
        world.after,
        lambda cell: cell == world.goal,
        limit,
    )
    return run.state == world.goal, run.calls, len(run.actions)


def walk_light(world: GridWorld, limit: int) -> bool:
    cell, last = world.start, None
    for _ in range(limit):
        if cell == world.goal:
            return True
        last = light_action(world, cell, last)
        cell = world.after(cell, last)
    return cell == world.goal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--chunk", type=int, default=8)
    given = parser.parse_args()
    worlds = [make_world(seed) for seed in range(given.worlds)]
    limit = 4 * worlds[0].size
    alone = [walk(world, 0, limit) for world in worlds]
    together = [walk(world, given.chunk, limit) for world in worlds]
    light = [walk_light(world, limit) for world in worlds]
    rows = {"heavy": [a[0] for a in alone], "light": light, "light verified by heavy": [t[0] for t in together]}
    for name, reached in rows.items():
        low, high = wilson(sum(reached), len(reached))
        print(f"{name}: {sum(reached)} of {len(reached)} goals reached ({low:.3f} to {high:.3f})")
    same = sum(a[2] == t[2] for a, t in zip(alone, together, strict=True))
    calls = [[float(t[1]) for t in together], [float(a[1]) for a in alone]]
    low, high = bootstrap(calls, lambda ours, theirs: float(ours.sum() / theirs.sum()))
    share = sum(calls[0]) / sum(calls[1])
    print(
        f"calls of the heavy policy: {share:.3f} of its own ({low:.3f} to {high:.3f}); {same} walks of the same length"
    )


if __name__ == "__main__":
    main()
