"""Rollouts: many answers to one prompt as a tree that shares every prefix, with a reward for each, as reinforcement
learning and search want them.

    python examples/rollouts.py
"""

from __future__ import annotations

from forerun import LLM, SamplingParams
from forerun.sharing import Trajectory


def reward(trajectory: Trajectory) -> float:
    """Prefers short answers that name a number."""
    return float(any(character.isdigit() for character in trajectory.text)) - 0.002 * len(trajectory.text)


def main() -> None:
    with LLM() as llm:
        prompt = [{"role": "user", "content": "How many legs do three spiders have? Think briefly."}]
        sampling = SamplingParams(temperature=0.9, max_tokens=40, seed=7)
        tree = llm.rollout(prompt, width=3, depth=2, token_budget=300, params=sampling, score=reward)
        best = sorted(tree.trajectories(), key=reward, reverse=True)[:3]
        for trajectory in best:
            print(f"{reward(trajectory):6.2f}  {trajectory.text.strip()[:90]!r}")
        cost = tree.cost
        print(f"{len(tree.trajectories())} answers, {cost.computed} tokens computed")


if __name__ == "__main__":
    main()
