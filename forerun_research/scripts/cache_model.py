"""Random operations on the cache beside a plain dictionary, seed after seed, until one differs or all are through.

    python -m forerun_research.scripts.cache_model --steps 100000 --seeds 0 1 2 3

Prints a JSON line for each seed; exit status 1 where the cache and the dictionary did not agree or a page leaked.
"""

from __future__ import annotations

import argparse
import json

from forerun_research.bench import cache_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    for seed in args.seeds:
        found = cache_model.run(args.steps, seed)
        print(json.dumps({"seed": seed} | found), flush=True)
        if not found["goal"]["reached"]:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
