"""A coding agent's session against a server: turns per minute and seconds to the first word, with and without reuse.

    python -m forerun_research.scripts.agent_session [--model NAME] [--tokens 6000] [--turns 6] [--device cuda]

The session has the shape of what coding agents send to `/v1/messages`: a long system prompt in blocks, tools with
schemas, files as results of tools, everything again with every turn. Made here, the same for the same arguments and
the same Python, whose library's sources are the files; each turn reads one of its own. As agents do, it may begin with
a line that changes every turn: then a prefix cache has nothing to read, and prompts are drafted from the turn before
(source `auto`, which takes `chunk` there). The last column compares texts: those of exact prefill and of provisional
answers have to be the same, else the exit status is 1. `--out FILE` gets a line of JSON for each session as it ends,
with every turn's times and how its prompt was computed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from forerun_research.bench.common import long_text
from forerun_research.scripts.serve_sides import NAME, ServerSide

WORDS_PER_TOKEN = 0.75  # of English text, about
TIMEOUT_S = 1800  # for one turn
MAX_CORRECTIONS = 8  # of a session's size
POOL_PROMPTS = 4  # room for so many of the last prompt: two answers of a provisional turn, and the turns before it
TOOLS: dict[str, dict[str, Any]] = {
    "read_file": {"path": {"type": "string"}, "first_line": {"type": "integer"}},
    "edit_file": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "run_command": {"command": {"type": "string"}, "timeout_s": {"type": "integer"}},
    "search": {"pattern": {"type": "string"}, "folder": {"type": "string"}},
    "list_folder": {"path": {"type": "string"}},
    "write_notes": {"items": {"type": "array", "items": {"type": "string"}}},
}
RULES = "Read before you edit. Change as little as possible. Run the tests after every change. Be brief. "
EXACT: dict[str, Any] = {"prefill": "exact"}
VARIANTS: list[tuple[str, bool, dict[str, Any]]] = [
    ("same first line, exact", False, EXACT),
    ("changed first line, exact", True, EXACT),
    ("changed first line, provisional", True, {"prefill": {"mode": "provisional", "allow_exact": True}}),
    ("changed first line, speculative", True, {"prefill": {"mode": "speculative", "allow_exact": True}}),
]  # fmt: skip
COMPARED = ("changed first line, provisional", "changed first line, speculative")


def source_words(count: int) -> list[str]:
    """Words of files as agents read them: Python's own library, one file after the other."""
    words: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(words) >= count:
            break
        words += path.read_text(encoding="utf-8", errors="replace").split()
    return words[:count]


def session(turns: int, tokens: int, changing: bool, model: str = NAME) -> list[dict[str, Any]]:
    """The requests of a session whose last prompt has about so many tokens; half of them are there at the start."""
    room = int(tokens * WORDS_PER_TOKEN)
    words = long_text().split()[: room // 4]  # where text repeated itself, a new file would be one that was met before
    rules, files = " ".join(words), source_words(room - len(words))
    size = max(1, len(files) // (turns + 1))
    tools = [
        {"name": name, "description": f"{name.replace('_', ' ')} in the project", "input_schema": _schema(fields)}
        for name, fields in TOOLS.items()
    ]
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "The tests of the depot fail since yesterday: find out why."}],
        }
    ]
    found = []
    for turn in range(turns):
        call = {"type": "tool_use", "id": f"toolu_{turn:03}", "name": "read_file", "input": {"path": f"part_{turn}.py"}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"I read part {turn}."}, call]})
        text = " ".join(files[(turn + 1 if turn else 0) * size : (turn + 2) * size])  # each of its own
        result: dict[str, Any] = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": [{"type": "text", "text": text}],
        }
        messages.append({"role": "user", "content": [result | {"cache_control": {"type": "ephemeral"}}]})
        first = f"Turn {turn} at 09:{turn:02}." if changing else "You are a careful engineer."
        system = [
            {"type": "text", "text": f"{first}\n"},
            {"type": "text", "text": f"{RULES}{rules}", "cache_control": {"type": "ephemeral"}},
        ]
        body = {"model": model, "max_tokens": 24, "stream": True, "system": system, "tools": tools}
        found.append(json.loads(json.dumps(body | {"messages": messages})))
        messages[-1]["content"][0].pop("cache_control")
    return found


def _schema(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)[:1]}


def fitted(url: str, turns: int, tokens: int, changing: bool) -> list[dict[str, Any]]:
    """A session whose last prompt has this many tokens as the server counts them, or a few percent less: the text is
    not the same in all its parts, so that one correction is not enough."""
    size = tokens * 4 // 5  # what is beyond the context is not counted but refused
    for _ in range(MAX_CORRECTIONS):
        made = session(turns, size, changing)
        counted = _count(url, made[-1])
        if 0.95 * tokens <= counted <= tokens:
            return made
        size = int(0.98 * size * tokens / counted)
    raise SystemExit(f"no session of {tokens} tokens was found: the last has {counted}")


def _count(url: str, body: dict[str, Any]) -> int:
    given = {name: body[name] for name in ("model", "system", "messages", "tools")}
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=given, timeout=60)
    if counted.status_code != 200:
        raise SystemExit(f"{counted.status_code}: {counted.text}")
    return int(counted.json()["input_tokens"])


def replay(url: str, bodies: list[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first word of each turn and of all turns, how the prompts were computed, and the texts."""
    turns, start = list[dict[str, Any]](), time.perf_counter()
    for body in bodies:
        turns.append(_turn(url, body | {"forerun": own | {"statistics": True}}))
        shown = f"first word {turns[-1]['first_s']:.2f} s, whole turn {turns[-1]['whole_s']:.2f} s"
        print(f"  {shown}; {turns[-1]['prefill']}", file=sys.stderr, flush=True)
    seconds, firsts = time.perf_counter() - start, [turn["first_s"] for turn in turns]
    prompt = sum(turn["prompt_tokens"] for turn in turns)
    return {
        "first_s": statistics.median(firsts[1:] or firsts),
        "turns_per_minute": 60 * len(bodies) / seconds,
        "prompt_tokens": prompt // len(bodies),
        "read": sum(turn["read_tokens"] for turn in turns) / prompt,
        "turns": turns,
    }


def _turn(url: str, body: dict[str, Any]) -> dict[str, Any]:
    begun, first, text, prefill = time.perf_counter(), 0.0, "", "exact"
    with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=TIMEOUT_S) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            kind = event.get("event") or event.get("type")
            if not first and kind in ("content_block_delta", "provisional"):
                first = time.perf_counter() - begun
            if kind == "content_block_delta":
                text += event["delta"].get("text") or event["delta"].get("partial_json") or ""
            if kind == "statistics" and event["statistics"].get("prefill"):
                report = event["statistics"]["prefill"]
                prefill = f"{report['source']}: {report['fell_back'] or 'drafted'}"
            if kind == "message_delta":
                usage = event["usage"]
    read = usage["cache_read_input_tokens"]
    counted = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
    times = {"first_s": first, "whole_s": time.perf_counter() - begun}
    return times | {"prompt_tokens": counted, "read_tokens": read, "prefill": prefill, "text": text}


def main() -> int:
    parser = argparse.ArgumentParser(description="A coding agent's session against a server.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=6000, help="of the last prompt, about")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-tokens", type=int, default=None)
    parser.add_argument("--changed-only", action="store_true", help="without the session whose first line stays")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines, one for each session")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended, too
    settings = {"model": args.model, "device": args.device, "threads": args.threads, "timeout": TIMEOUT_S}
    settings["kv_cache_tokens"] = args.kv_cache_tokens or POOL_PROMPTS * (args.tokens + 1024)
    print(f"{'session':40} {'first word':>10} {'turns/min':>10} {'read':>6}  prompt tokens, mean; texts as exact")
    texts: dict[str, list[str]] = {}
    for name, changing, own in VARIANTS[args.changed_only :]:
        with tempfile.TemporaryDirectory() as scratch:  # each on a server of its own: no cache of another
            server = ServerSide(settings, Path(scratch) / "log")
            try:
                url = f"http://{server.host}:{server.port}"
                found = replay(url, fitted(url, args.turns, args.tokens, changing), own)
            finally:
                server.close()
        texts[name] = [turn["text"] for turn in found["turns"]]
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps({"session": name, "settings": settings, "tokens": args.tokens} | found) + "\n")
        times = f"{found['first_s']:8.2f} s {found['turns_per_minute']:10.1f}"
        same = f"{same_texts(texts, name)} of {args.turns}" if name in COMPARED else "-"
        print(f"{name:40} {times} {found['read']:6.0%}  {found['prompt_tokens']}; {same}", flush=True)
    return 0 if same_texts(texts, "changed first line, provisional") == args.turns else 1


def same_texts(texts: dict[str, list[str]], name: str) -> int:
    """How many answers of a variant are, word for word, those of exact prefill of the same prompts."""
    return sum(a == b for a, b in zip(texts["changed first line, exact"], texts[name], strict=True))


if __name__ == "__main__":
    sys.exit(main())
