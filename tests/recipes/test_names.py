"""Public names of recipes, and their old places, which work for one release."""

from __future__ import annotations

import pytest

import forerun
from forerun import recipes, sharing


def test_every_recipe_is_under_one_name():
    assert all(hasattr(recipes, name) for name in recipes.__all__)
    assert forerun.recipes is recipes and callable(recipes.plan.solve)
    assert "recipes" in dir(forerun)


@pytest.mark.parametrize("name", ["best_of_n", "self_consistency", "sample", "compare", "equilibrium_ranking", "Vote"])
def test_old_places_warn_and_work(name: str):
    with pytest.warns(DeprecationWarning, match=f"forerun.recipes.{name}"):
        assert getattr(sharing, name) is getattr(recipes, name)


def test_old_names_warn_and_work():
    with pytest.warns(DeprecationWarning, match=r"forerun\.recipes\.plan"):
        assert forerun.plan is recipes.plan
    with pytest.warns(DeprecationWarning, match="CallResult"):
        assert recipes.plan.Call is recipes.plan.CallResult
    with pytest.warns(DeprecationWarning, match="ContinuationScores"):
        assert sharing.Scored is sharing.ContinuationScores
    for module in (forerun, sharing, recipes.plan):
        with pytest.raises(AttributeError, match="nothing_such"):
            module.nothing_such  # noqa: B018
