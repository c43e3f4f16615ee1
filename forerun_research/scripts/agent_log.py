"""A public log of an agent as a trace: SWE-agent's trajectories (`.traj`), replayed by `forerun stats --trace`.

Each file is a session. The beginning that the agents' system prompts share becomes the trace's, the rest of each comes
before its session's first turn. What the environment sent (the task, outputs of commands) are the turns, each cut to
`--chars` characters; what the agent wrote is written anew by the model that replays, with as many tokens as the log's
own words at most.

    git clone https://github.com/SWE-agent/SWE-agent
    python -m forerun_research.scripts.agent_log SWE-agent/trajectories/demonstrations/ctf --out ctf.jsonl
    forerun stats --trace ctf.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_ANSWER_TOKENS = 64
WORD_TOKENS = 1.5  # of one word, about


def turns_of(session: str, history: list[dict[str, Any]], chars: int) -> Iterator[dict[str, Any]]:
    """What reached the agent; a demonstration at the beginning counts as one turn."""
    for at, message in enumerate(history):
        content = _text(message)
        if message["role"] not in ("user", "tool") or not content.strip():
            continue
        after = history[at + 1] if at + 1 < len(history) else {}
        words = len(_text(after).split()) if after.get("role") == "assistant" else 0
        role = "tool" if message["role"] == "tool" or at > 2 else "user"
        limit = max(1, min(MAX_ANSWER_TOKENS, round(WORD_TOKENS * words)))
        yield {"session": session, "role": role, "content": content[:chars], "max_tokens": limit}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def read_log(paths: list[Path], chars: int) -> tuple[str, list[dict[str, Any]]]:
    """What the system prompts have in common, and the turns of all sessions."""
    sessions: dict[str, tuple[str, list[dict[str, Any]]]] = {}
    for path in sorted(file for each in paths for file in (each.rglob("*.traj") if each.is_dir() else [each])):
        history = json.loads(path.read_text(encoding="utf-8"))["history"]
        system = "\n".join(_text(message) for message in history if message["role"] == "system")
        sessions[path.stem] = system, list(turns_of(path.stem, history, chars))
    common = os.path.commonprefix([system for system, _ in sessions.values()])
    for system, turns in sessions.values():
        turns[0]["content"] = f"{system[len(common) :]}\n{turns[0]['content']}".strip()
    return common, [turn for _, turns in sessions.values() for turn in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", help="trajectory files, or folders of them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chars", type=int, default=2000, help="of a turn; the rest is cut off")
    given = parser.parse_args()
    system, turns = read_log(given.logs, given.chars)
    lines = [{"trace": given.out.stem, "system": system}, *turns]
    given.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(turns)} turns of {len({turn['session'] for turn in turns})} sessions in {given.out}")


if __name__ == "__main__":
    main()
