"""What the prefix tree costs as it grows: time of a request and bytes of a node, from small trees to large ones.

    python -m forerun_research.scripts.sharing_tree --nodes 100 1000 10000 --tokens-per-node 1000

Prints a JSON line for each size. The goal of `forerun bench sharing` is about 1,000 nodes with 1,000,000 tokens.
"""

from __future__ import annotations

import argparse
import json

from forerun_research.bench import sharing_tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--tokens-per-node", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    reached = True
    for nodes in args.nodes:
        found = sharing_tree.run(nodes, nodes * args.tokens_per_node, args.seed)
        reached &= found["goal"]["reached"]
        print(json.dumps(found), flush=True)
    return int(not reached)


if __name__ == "__main__":
    raise SystemExit(main())
