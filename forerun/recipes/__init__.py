"""Recipes: prompting on top of `LLM`. They know its public methods and those of `forerun.sharing`, not the engine.

from forerun import recipes

    recipes.best_of_n(llm, prompt, 8, score)
    recipes.plan.solve(llm, task, tools)
"""

from forerun.recipes import plan
from forerun.recipes.action_chunks import ChunkRun, accept_until_broken
from forerun.recipes.candidates import Best, Candidate, Vote, best_of_n, sample, self_consistency
from forerun.recipes.classify import Classified, classify, label_question
from forerun.recipes.compare import Comparison, compare
from forerun.recipes.consensus import Ranking, Wording, equilibrium_ranking
from forerun.recipes.edit import BrokenEdit, Edited, EditPiece, edit, stream_edit

__all__ = [
    "Best",
    "BrokenEdit",
    "Candidate",
    "ChunkRun",
    "Classified",
    "Comparison",
    "EditPiece",
    "Edited",
    "Ranking",
    "Vote",
    "Wording",
    "accept_until_broken",
    "best_of_n",
    "classify",
    "compare",
    "edit",
    "equilibrium_ranking",
    "label_question",
    "plan",
    "sample",
    "self_consistency",
    "stream_edit",
]
