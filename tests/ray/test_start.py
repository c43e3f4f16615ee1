"""What can be wrong before replicas run: no Ray, another one, an address that does not answer, args that do not fit."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from forerun.cli import app
from forerun.errors import BadRequest, ForerunError
from forerun.ray import cluster
from forerun.ray.deploy import parse_args


def test_no_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadRequest, match="need Ray Serve") as found:
        cluster.load_ray()
    assert "forerun[ray]" in found.value.hint


@pytest.mark.parametrize("version", ["2.9.3", "3.0.0"])
def test_another_ray(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(cluster, "import_module", lambda name: SimpleNamespace(__version__=version))
    with pytest.raises(BadRequest, match=f"Ray {version} is installed, replicas need 2.60"):
        cluster.load_ray()


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    started: list[object] = []
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **options: started.append(options), shutdown=lambda: None)
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with socket.socket() as bound:  # it does not listen, and no other socket can
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(BadRequest, match="no Ray cluster answers"), cluster.cluster(address, 1):
            pass
    for wrong in ("nonsense", "host:", ":1", "host:port", "127.0.0.1:99999999999999999999"):
        with pytest.raises(BadRequest, match="no address|no Ray cluster"), cluster.cluster(wrong, 1):
            pass
    assert not started


def test_a_cluster_that_cannot_be_joined_is_one_line_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch):
    def refuse(**options: object) -> None:
        raise RuntimeError("Version mismatch: the cluster has Ray 2.9\nmore lines")

    ended: list[bool] = []
    fake = SimpleNamespace(__version__="2.60.0", init=refuse, shutdown=lambda: ended.append(True))
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with (
        pytest.raises(
            ForerunError, match="cannot join the Ray cluster at auto: Version mismatch: the cluster has Ray 2.9\nhint"
        ),
        cluster.cluster("auto", 1),
    ):
        pass
    assert ended == [True]


def test_a_cluster_that_has_replicas_already_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    ended: list[str] = []
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **_: None, start=lambda **_: None)
    fake.shutdown = lambda: ended.append("shutdown")
    fake.delete = lambda name: ended.append(f"delete {name}")
    fake.status = lambda: SimpleNamespace(applications={cluster.APPLICATION: None})
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with pytest.raises(BadRequest, match="has an application 'forerun' already"), cluster.cluster("auto", 1):
        pass
    assert ended == ["shutdown"]  # of this process's connection


def test_the_cause_of_a_replica_that_failed_is_found_in_its_traceback():
    lines = [
        "A replica failed:",
        "Traceback (most recent call last):",
        '  File "a.py"',
        "OSError: [Errno 17] File exists",
    ]
    lines += ["The above exception was the direct cause:", "forerun.errors.BadRequest: the disk tier cannot use /x: no"]
    assert cluster.cause_in([*lines, "hint: give another folder", ""]) == (
        "the disk tier cannot use /x: no",
        "give another folder",
    )
    assert cluster.cause_in(lines) == ("the disk tier cannot use /x: no", "see what they printed")
    assert cluster.cause_in(["nothing of the kind"]) is None


def test_options_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]):
    fake = SimpleNamespace(__version__="2.60.0")
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    runner, model = CliRunner(), str(tiny_folder("qwen3"))
    for options, message in (
        (["--ray", "auto"], "--max-replicas and --ray are about replicas"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is below --replicas 3"),
    ):
        found = runner.invoke(app, ["serve", "--model", model, "--port", "0", *options])
        assert isinstance(found.exception, BadRequest) and message in str(found.exception)


def test_a_model_that_is_not_there_and_a_port_in_use_are_errors_before_ray_is_started(monkeypatch: pytest.MonkeyPatch):
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **options: pytest.fail("Ray was started"))
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    runner = CliRunner()
    found = runner.invoke(app, ["serve", "--model", "no-such-model", "--port", "0", "--replicas", "2"])
    assert isinstance(found.exception, ForerunError) and "no-such-model" in str(found.exception)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = runner.invoke(app, ["serve", "--port", port, "--replicas", "2"])
    assert isinstance(found.exception, BadRequest) and "cannot listen" in str(found.exception)


def test_args_of_a_yaml_file(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text(f"ann {'0' * 64}\n")
    given = {"model": "m", "replicas": 2, "max_replicas": 4, "cpus": 2, "max_queue": 10, "api_keys": str(keys)}
    settings, scale = parse_args(given | {"disk": "/kv", "cors_origins": ["*"]})
    assert scale == cluster.Scale(2, 4, 2) and settings.llm["disk"] == "/kv" and settings.config.cors_origins == ("*",)
    assert settings.max_open == 64 * 4 + 10 and settings.config.keys is not None and settings.config.model_name == "m"
    with pytest.raises(BadRequest, match="no model"):
        parse_args({})
    with pytest.raises(BadRequest, match="cannot read the API keys"):
        parse_args({"model": "m", "api_keys": str(tmp_path / "none")})
