"""Borrowed pages: the pool can allocate them at any time."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from forerun.cache.pool import PagePool
from forerun.decode.drafters.spare import SparePages
from forerun.models.config import ModelConfig

CPU = torch.device("cpu")


def test_spare_pages_are_free_for_all_other_uses():
    config = ModelConfig("llama", 8, 8, 1, 1, 1, 8, 8, 64)
    pool = PagePool(config, 8, 4, torch.float32, CPU)
    spare, mine, yours = SparePages(pool, pool.add_draft_kv(config, torch.float32, CPU)), array("i"), array("i")
    assert spare.extend(1, mine, 3) and spare.extend(2, yours, 4)
    assert not set(mine) & set(yours) and pool.free == 8 and spare.intact(1, mine) == 3
    assert not spare.extend(1, mine, 5) and len(mine) == 3
    lost = mine[1]
    taken = pool.allocate(8)
    assert pool.free == 0 and lost in taken
    pool.release([page for page in taken if page != lost])
    assert spare.intact(1, mine) == 0 and spare.intact(2, yours) == 0  # all were handed out in between
    assert spare.extend(2, yours, 7) and lost not in yours and not spare.extend(1, mine, 1)
    spare.drop(2, yours)
    assert spare.extend(1, mine, 7) and np.all(pool.refs[list(mine)] == 0)
