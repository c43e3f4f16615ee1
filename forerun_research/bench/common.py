"""What every bench shares: prompts of a given length, medians and spread, hardware, the table and the JSON line."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from forerun import data
from forerun.errors import BadRequest
from forerun.runtime.threads import choose_threads
from forerun_research.bench.prompts import read_prompts
from forerun_research.bench.shapes import SHAPES, random_ids
from forerun_research.bench.sides import Sample, SideProcess, SideSpec

AGAINST = ("transformers", "llama.cpp", "none")


@dataclass(frozen=True)
class Setup:
    """What the user asked of a bench."""

    model: str
    weights: str = "auto"
    device: str = "auto"
    against: str = "transformers"
    runs: int = 5
    threads: int | None = None
    data: Path | None = None
    shape: str | None = None

    def __post_init__(self) -> None:
        if self.against not in AGAINST:
            raise BadRequest(f"--against is {self.against!r}", f"use one of {', '.join(AGAINST)}")
        if self.shape is not None and self.shape not in SHAPES:
            raise BadRequest(f"no shape is called {self.shape!r}", f"use one of {', '.join(SHAPES)}")
        if self.shape is not None and self.against == "llama.cpp":
            raise BadRequest("llama.cpp cannot run random weights", "use --against transformers with --random-shape")

    @property
    def name(self) -> str:
        return f"random {self.shape}" if self.shape else self.model

    def thread_count(self) -> int:
        return choose_threads(self.threads)[0]

    @contextmanager
    def open_sides(self, context: int, batch: int = 1) -> Iterator[list[SideProcess]]:
        """Forerun and the peer, each in its own process, with the same number of threads."""
        from forerun.core.progress import track

        engines = ["forerun"] if self.against == "none" else ["forerun", self.against]
        with ExitStack() as stack:
            specs = [self.spec(engine, context, batch) for engine in engines]
            yield [stack.enter_context(SideProcess(spec)) for spec in track(specs, "opening")]

    def spec(self, engine: str, context: int, batch: int = 1) -> SideSpec:
        threads = self.thread_count()
        return SideSpec(engine, self.model, self.weights, self.device, threads, context, batch, self.shape)


def long_text(path: Path | None = None) -> str:
    """Text to cut prompts of any length from: the shipped documents, or all prompts of a file, one after the other."""
    if path is not None:
        return "\n\n".join(prompt.text for prompt in read_prompts(path))
    return "\n\n".join(data.text(f"documents/{name}") for name in ("handbook.txt", "depot.py"))


class Prompts:
    """Token ids to measure with, cut from the shipped documents (or `--data`) with the model's own tokenizer."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        if setup.shape is not None:
            self.limit, self.vocab = SHAPES[setup.shape].max_context, SHAPES[setup.shape].vocab_size
            return
        from forerun.models.fetch.store import resolve
        from forerun.models.formats.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(resolve(setup.model))
        self.limit, self.tokenizer = checkpoint.config.max_context, checkpoint.tokenizer()
        self._text = self.tokenizer.encode(long_text(setup.data))

    def cut(self, length: int, skip: int = 0) -> list[int]:
        """`length` tokens of running text from token `skip` on, starting over where the documents end."""
        if self.setup.shape is not None:
            return random_ids(self.vocab, length, seed=skip)
        return [self._text[(skip + i) % len(self._text)] for i in range(length)]

    def requests(self, count: int) -> list[list[int]]:
        """Different requests as a service would get them; past the end of the prompts they are numbered anew."""
        if self.setup.shape is not None:
            return [random_ids(self.vocab, 64 + 37 * i % 448, seed=i) for i in range(count)]
        prompts = read_prompts(self.setup.data)
        texts = [prompts[i % len(prompts)].text for i in range(count)]
        return [self._ask(text if i < len(prompts) else f"({i}) {text}") for i, text in enumerate(texts)]

    def _ask(self, text: str) -> list[int]:
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}])

    def check(self, context: int) -> None:
        if context > self.limit:
            raise BadRequest(
                f"{context} tokens of prompt and answer, the model's context holds {self.limit}",
                "lower --context or --tokens",
            )


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}


def summarise(samples: list[Sample], keys: Iterable[str]) -> dict[str, Any]:
    """The spread of each figure over the runs."""
    return {key: spread([sample[key] for sample in samples]) for key in keys}


def ratio(result: dict[str, Any], peer: str, key: str, higher_is_better: bool = False) -> float | None:
    """How many times better Forerun is than the peer; None without one."""
    if peer == "none":
        return None
    ours, theirs = result["forerun"][key]["median"], result[peer][key]["median"]
    return round(ours / theirs if higher_is_better else theirs / ours, 3)


def hardware(threads: int) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": threads,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": gpu,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def same_prefix(left: list[int], right: list[int]) -> int:
    """How many tokens two answers have in common before they part."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def side_results(sides: list[SideProcess], figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each side's figures with its settings and memory."""
    return {side.name: {**figures[side.name], **side.about, **side.call("memory")} for side in sides}


def cell(figure: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
    """A median with its spread, for a table."""
    low, mid, high = (figure[key] * scale for key in ("min", "median", "max"))
    return f"{mid:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def megabytes(result: dict[str, Any]) -> str:
    return f"{result['rss_bytes'] / 1e6:,.0f} MB"


def report(result: dict[str, Any], table: Table, as_json: bool) -> None:
    """The table for people, then one JSON line for everything else."""
    if not as_json:
        Console(highlight=False).print(table)
    print(json.dumps(result, default=asdict), flush=True)
