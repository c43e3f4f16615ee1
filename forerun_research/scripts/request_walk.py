"""The walk of one request through the package: which files and functions a reader meets, in their order.

    python -m forerun_research.scripts.request_walk [--drafted] [--json]

A warm engine runs one request (default model, no speculation, four tokens) while every call of a function is recorded.
With `--drafted` the prompt is long enough to be drafted and the record ends with its first token.

- A *named function* is a function of package `forerun` that a reader would look up: no dunder method, no lambda or
  comprehension, no property. What an unnamed one calls counts as called by the function around it.
- The *files* of the walk are all files of which a named function ran.
- A *hop* is a named function that was called from another file and from which the request went on into a further
  file, directly or through helpers of its own file: where a reader turns over and is sent on. Functions that are
  called from another file and return without leaving theirs (a page allocated, a rotary table read) are no hops,
  their files count. A function is one hop, however often it runs.

Knows nothing of what the functions do; it needs an engine that steps in the thread that asks.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import forerun
from forerun import LLM, Prefill, SamplingParams, data

PACKAGE = Path(forerun.__file__).parent
PROMPT = "The lighthouse keeper walked up"
DRAFTED_PROMPT_CHARS = 10_000  # of the handbook: about 2,200 tokens, above the least that is drafted


@dataclass(frozen=True)
class RequestWalk:
    """What one request ran through, each in the order of first calls."""

    functions: list[tuple[str, str]]  # file below the package, qualified name
    hops: list[tuple[str, str]]
    entries: dict[str, list[str]]  # file: "function (from the file that called it first)"

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.functions))

    def record(self) -> dict[str, Any]:
        return {
            "hops": len(self.hops),
            "files": len(self.files),
            "functions": len(self.functions),
            "walk": [list(hop) for hop in self.hops],
            "all_files": self.files,
        }


@dataclass
class CallRecorder:
    """Records calls between named functions of the package while `run` runs, in this thread and those it starts."""

    calls: dict[tuple[CodeType | None, CodeType], None] = field(default_factory=dict)  # (caller, callee)
    _properties: set[CodeType] = field(default_factory=set)

    def run(self, work: Callable[[], object]) -> RequestWalk:
        self._properties = property_code()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return walk_of(self.calls)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._named(frame.f_code):
            return
        caller = frame.f_back
        while caller is not None and not self._named(caller.f_code):
            caller = caller.f_back
        self.calls.setdefault((caller.f_code if caller is not None else None, frame.f_code))

    def _named(self, code: CodeType) -> bool:
        if code.co_name.startswith(("<", "__")) or code in self._properties:
            return False
        return code.co_filename.startswith(f"{PACKAGE}/")


def property_code() -> set[CodeType]:
    """Code of all property getters, cached ones too, of the package's classes."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != PACKAGE.name:
            continue
        for kind in filter(inspect.isclass, list(vars(module).values())):
            for value in (value for base in kind.__mro__ for value in vars(base).values()):
                getter = value.fget if isinstance(value, property) else getattr(value, "func", None)
                if inspect.isfunction(getter):
                    found.add(getter.__code__)
    return found


def walk_of(calls: dict[tuple[CodeType | None, CodeType], None]) -> RequestWalk:
    def goes_on(code: CodeType, seen: set[CodeType]) -> bool:
        """Whether another file is entered from here, or from what this function calls in its own file."""
        seen.add(code)
        return any(
            callee.co_filename != code.co_filename or (callee not in seen and goes_on(callee, seen))
            for caller, callee in calls
            if caller is code
        )

    def place(code: CodeType) -> tuple[str, str]:
        return str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname

    entered = [callee for caller, callee in calls if caller is None or caller.co_filename != callee.co_filename]
    hops = [code for code in dict.fromkeys(entered) if goes_on(code, set())]
    functions = dict.fromkeys(callee for _, callee in calls)
    entries: dict[str, list[str]] = {}
    for caller, callee in calls:
        file, function = place(callee)
        source = place(caller)[0] if caller is not None else "the caller"
        if source != file:
            entries.setdefault(file, []).append(f"{function} (from {source})")
    return RequestWalk([place(code) for code in functions], [place(code) for code in hops], entries)


def exact_walk(llm: LLM) -> RequestWalk:
    """One exact request of four tokens from `llm.generate` to its completion."""
    params = SamplingParams(max_tokens=4, speculation="off")
    llm.generate("A warm engine has", params)
    return CallRecorder().run(lambda: llm.generate(PROMPT, params))


def drafted_walk(llm: LLM) -> RequestWalk:
    """One drafted prompt, from `llm.stream` to its first token."""
    params = SamplingParams(max_tokens=2, speculation="off", prefill=Prefill("speculative"))
    text = data.text("documents/handbook.txt")

    def rotated(chars: int) -> str:  # another prompt: nothing of it is in the prefix tree
        return (text[chars:] + text[:chars])[:DRAFTED_PROMPT_CHARS]

    (warm,) = llm.generate(rotated(1000), params)
    if warm.usage.prefill is None or warm.usage.prefill.fell_back:
        raise RuntimeError(f"the prompt was not drafted: {warm.usage.prefill}")
    llm.clear_cache()  # with some time between both, the first would be exact and the second be drafted from its K/V
    streams: list[Any] = []

    def first_token() -> None:
        streams.append(iter(llm.stream(rotated(3000), params)))
        next(streams[0])

    walk = CallRecorder().run(first_token)
    streams[0].close()
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafted", action="store_true", help="a drafted prompt until its first token")
    parser.add_argument("--json", action="store_true", help="one JSON line of counts and names")
    args = parser.parse_args()
    with LLM(quiet=True) as llm:
        walk = drafted_walk(llm) if args.drafted else exact_walk(llm)
    if args.json:
        print(json.dumps(walk.record()))
        return
    for number, (file, function) in enumerate(walk.hops, 1):
        print(f"{number:>2}. {file}: {function}")
    also = [file for file in walk.files if file not in {hop[0] for hop in walk.hops}]
    print(f"{len(walk.hops)} hops, {len(walk.files)} files, {len(walk.functions)} functions")
    print("files without a hop:")
    for file in also:
        print(f"    {file}: {', '.join(walk.entries.get(file, []))}")


if __name__ == "__main__":
    main()
