"""`forerun models`: what is on this machine, fetching, describing, exporting and removing it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.commands.screen import print_table
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.checks.quality import Quality
    from forerun.models.config import ModelConfig

app = typer.Typer(no_args_is_help=True, help="List, fetch, describe, export and remove models.")

Name = Annotated[str, typer.Argument(help="A known name (see `forerun models list`) or a hub id.")]
AnyModel = Annotated[str, typer.Argument(help="A known name, a folder, a .gguf file or a hub id.")]
EXPORT_DTYPES = ("bfloat16", "float16", "float32")
PROFILE_FILE = "forerun.profile"  # beside an exported model
PLAIN: dict[str, Any] = {"box": None, "pad_edge": False}  # tables without lines


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@app.command(name="list")
def list_() -> None:
    """The models Forerun knows by name, and where each is or will come from: here, the hub, or packages.

    Example: forerun models list
    """
    from forerun.models.fetch.store import list_models

    rows = [(entry.name, gigabytes(entry.bytes), entry.source, entry.description) for entry in list_models()]
    print_table(("name", "size", "from", "what it is"), rows, **PLAIN)
    print("\nA folder with safetensors, a .gguf file or a hub id (org/name) works wherever a name does.")


@app.command()
def pull(name: Name = opt.DEFAULT_MODEL) -> None:
    """Fetch a model into the cache folder and check it; later runs need no network.

    Example: forerun models pull qwen2.5-coder-0.5b-instruct
    """
    from forerun.models.fetch.store import pull as fetch

    print(fetch(name))


@app.command()
def rm(name: Name) -> None:
    """Remove a fetched model from the cache folder, with what was computed from it.

    Example: forerun models rm qwen2.5-coder-0.5b-instruct
    """
    from forerun.decode.control.cost_cache import remove_orphans
    from forerun.models import packed_cache
    from forerun.models.cpu import planning
    from forerun.models.fetch.store import remove

    remove(name)
    freed = packed_cache.remove(packed_cache.orphans())
    remove_orphans()
    planning.remove_orphans()
    print(f"removed {name}" + (f" and {gigabytes(freed)} of packed weights" if freed else ""))


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; the next start computes it again.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and compare all checksums; damaged files are removed.")
    ] = False,
) -> None:
    """What starts keep on disk: packed weights, times of forwards, compiled kernels.

    Packed weights are bounded by the environment variable FORERUN_CACHE_GB (8; 0 keeps none).

    [bold]Examples[/bold]

    forerun models cache

    forerun models cache --verify
    """
    from forerun.models.fetch.store import home

    try:
        _cache(clear, verify)
    except OSError as error:
        raise BadRequest(f"cannot change {home()}: {error.strerror or error}", "make it writable") from None


def _cache(clear: bool, verify: bool) -> None:
    from forerun.models import packed_cache
    from forerun.models.fetch.store import home

    entries = packed_cache.entries()
    if verify:
        damaged = {entry: problem for entry in entries if (problem := packed_cache.verify(entry.path))}
        packed_cache.remove(list(damaged))
        for entry, problem in damaged.items():
            print(f"removed {entry.path.name} ({entry.model or 'unknown'}): {problem}")
        print(f"{len(entries) - len(damaged)} of {len(entries)} files are whole")
        return
    folders = [home() / name for name in ("costs", "importance", "kernels")]
    small = [path for each in folders for path in each.glob("*") if path.is_file()]
    if clear:
        freed = packed_cache.remove(entries)
        for path in small:
            freed += path.stat().st_size
            path.unlink(missing_ok=True)
        print(f"removed {gigabytes(freed)} from {home()}")
        return
    if entries:
        used = [time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used)) for entry in entries]
        rows = [(e.model or "damaged", e.weights, gigabytes(e.bytes), u) for e, u in zip(entries, used, strict=True)]
        print_table(("model", "weights", "size", "last used"), rows, **PLAIN)
    total, limit = sum(entry.bytes for entry in entries), packed_cache.limit_bytes()
    print(f"{gigabytes(total)} of packed weights in {packed_cache.folder()}, at most {gigabytes(limit)}")
    print(f"{gigabytes(sum(path.stat().st_size for path in small))} of kernels and measurements in {home()}")


@app.command()
def info(
    name: AnyModel = opt.DEFAULT_MODEL,
    quality: Annotated[
        bool, typer.Option("--quality", help="Measure each weights mode against float32 on the shipped texts.")
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="With --quality: tokens of each text.")] = 512,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Describe a model; with --quality, what each weights mode loses against float32.

    [bold]Examples[/bold]

    forerun models info

    forerun models info ./model.gguf --quality
    """
    from forerun.checks.quality import measure_modes
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint

    path = resolve(name)
    config = open_checkpoint(path).config
    rows = measure_modes(name, tokens=tokens, threads=threads) if quality else []
    if as_json:
        print(json.dumps({"model": name, "path": str(path), "config": asdict(config), "quality": rows}, default=asdict))
        return
    print_table(("", ""), [("model", name), ("path", str(path)), *describe(config)], show_header=False, **PLAIN)
    if rows:
        columns = ("weights", "text", "KL to float32", "top-1 agreement", "perplexity", "(float32)")
        print()
        print_table(columns, map(quality_row, rows), box=None)


@app.command()
def export(
    name: AnyModel,
    folder: Annotated[Path, typer.Argument(help="Where to write it; it may not exist yet, or be empty.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: bfloat16, float16, or float32, which loses nothing.")
    ] = "bfloat16",
    prefill_profile: Annotated[
        Path | None, typer.Option("--prefill-profile", help="Of this model. Default: the packaged one, if any.")
    ] = None,
) -> None:
    """Write a model as a folder of safetensors, which vLLM and transformers open, and its profile for that folder.

    Example: forerun models export smollm2-135m-instruct smol/
    """
    import torch

    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint
    from forerun.models.formats.hf_writer import write_hf_folder
    from forerun.prefill.open_profile import open_profile, profile_for_copy

    if dtype not in EXPORT_DTYPES:
        raise BadRequest(f"--dtype is {dtype!r}", f"use one of {', '.join(EXPORT_DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadRequest(f"{folder} is there already", "name a new folder")
    checkpoint = open_checkpoint(resolve(name))
    profile = open_profile(prefill_profile, checkpoint, any_source=True)
    write_hf_folder(checkpoint, folder, getattr(torch, dtype))
    print(f"{folder}: {checkpoint.source} in {dtype}")
    if profile is not None:
        path = folder / PROFILE_FILE
        profile_for_copy(profile, open_checkpoint(folder)).save(path)
        print(f"{path}: its profile of the source {profile.kind!r}")


def describe(config: ModelConfig) -> list[tuple[str, str]]:
    """What a person wants to know of a configuration."""
    window = f", {config.sliding_window:,} in sliding layers" if config.sliding_window else ""
    kv_bytes = 2 * config.num_layers * config.kv_size
    return [
        ("family", config.family),
        ("parameters", f"{parameters(config) / 1e6:,.0f} million"),
        ("layers", f"{config.num_layers} of width {config.hidden_size}, mlp {config.intermediate_size}"),
        ("heads", f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for K and V"),
        ("vocabulary", f"{config.vocab_size:,}{' (embedding also the head)' if config.tie_embeddings else ''}"),
        ("context", f"{config.max_context:,} tokens{window}"),
        ("KV cache", f"{kv_bytes * 4 / 1024:.0f} KiB a token in float32, {kv_bytes * 2 / 1024:.0f} in bf16"),
        ("rope", f"{config.rope.kind}, base {config.rope.theta:,.0f}"),
    ]


def parameters(config: ModelConfig) -> int:
    """Weights of the matrices; norms and biases are too few to count."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    mlp = 3 * config.hidden_size * config.intermediate_size
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return config.num_layers * (attention + mlp) + tables


def quality_row(row: Quality) -> tuple[str, ...]:
    figures = f"{row.kl:.4f}", f"{row.top1:.1%}", f"{row.perplexity:.2f}", f"{row.reference_perplexity:.2f}"
    return row.weights, f"{row.text}, {row.tokens} tokens", *figures
