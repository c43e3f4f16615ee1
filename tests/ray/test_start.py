"""What can be wrong before replicas run: no Ray, another one, an address that does not answer, args that do not fit."""

from __future__ import annotations

import enum
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

import forerun
from forerun.cli import app
from forerun.commands.serve import _absolute
from forerun.errors import BadProfile, BadRequest, ForerunError
from forerun.ray import cluster
from forerun.ray.deploy import parse_args

SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture
def listener() -> Iterator[Callable[[bytes | None], str]]:
    """Makes servers that give each connection one answer, or none and keep it open; returns their addresses."""
    with ExitStack() as stack:

        def make(answer: bytes | None) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with suppress(OSError):
                    connection = stack.enter_context(server.accept()[0])
                    connection.recv(64)
                    if answer is not None:
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

            threading.Thread(target=serve, daemon=True).start()
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield make


def test_no_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadRequest, match="need Ray Serve") as found:
        cluster.load_ray()
    assert "forerun[ray]" in found.value.hint


@pytest.mark.parametrize("version", ["2.9.3", "3.0.0", "3.0.0.dev0", "dev"])
def test_another_ray(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(cluster, "import_module", lambda name: SimpleNamespace(__version__=version))
    with pytest.raises(BadRequest, match=f"Ray {version} is installed, replicas need 2.60"):
        cluster.load_ray()


def test_a_module_of_that_name_is_no_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "import_module", lambda name: SimpleNamespace())
    with pytest.raises(BadRequest, match="Ray of no known version is installed"):
        cluster.load_ray()


def test_why_ray_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> None:
        raise ImportError("no module named 'x'\nYou can run ...")

    monkeypatch.setattr(cluster, "import_module", refuse)
    with pytest.raises(BadRequest, match="cannot be imported: no module named 'x'\nhint: pip install"):
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
    for wrong in ("nonsense", "host:", ":1", "host:port", "ray://127.0.0.1:10001", "127.0.0.1:99999999999999999999"):
        with pytest.raises(BadRequest, match="no address|no Ray cluster"), cluster.cluster(wrong, 1):
            pass
    assert not started


@pytest.mark.parametrize(
    ("answer", "text"),
    [(b"", "what listens there is no Ray"), (b"HTTP/1.1 400 Bad Request", "no Ray"), (None, "timed out")],
)
def test_an_address_at_which_something_else_answers(
    answer: bytes | None, text: str, monkeypatch: pytest.MonkeyPatch, listener: Callable[[bytes | None], str]
):
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.2)
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **options: pytest.fail("Ray was asked"))
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with pytest.raises(BadRequest, match=f"no Ray cluster answers at .*{text}"), cluster.cluster(listener(answer), 1):
        pass


def test_an_address_at_which_settings_of_http2_come_is_tried(
    monkeypatch: pytest.MonkeyPatch, listener: Callable[[bytes | None], str]
):
    class Joined(Exception):
        pass

    def join(**options: object) -> None:
        raise Joined("there")

    fake = SimpleNamespace(__version__="2.60.0", init=join, shutdown=lambda: None)
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with pytest.raises(ForerunError, match="cannot join .*: there"), cluster.cluster(listener(SETTINGS_FRAME), 1):
        pass


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


class FakeGrpc(ModuleType):
    """A channel whose calls end with one status."""

    class StatusCode(enum.Enum):
        UNIMPLEMENTED, UNAUTHENTICATED, UNAVAILABLE = range(3)

    class RpcError(Exception):
        def code(self) -> object:
            return self.args[0]

    def __init__(self, status: str) -> None:
        super().__init__("grpc")
        self.status = status

    def insecure_channel(self, address: str, options: object) -> nullcontext[SimpleNamespace]:
        def call(request: bytes, timeout: float) -> None:
            raise self.RpcError(self.StatusCode[self.status])

        return nullcontext(SimpleNamespace(unary_unary=lambda name: call))


@pytest.mark.parametrize(
    ("status", "token", "message"),
    [
        ("UNIMPLEMENTED", True, "what listens there is no head of a Ray cluster"),
        ("UNAUTHENTICATED", False, "wants a token\nhint: set RAY_AUTH_MODE=token"),
        ("UNAUTHENTICATED", True, "cannot join the Ray cluster at .*: there"),
        ("UNAVAILABLE", True, "cannot join the Ray cluster at .*: there"),
    ],
)
def test_what_a_server_of_grpc_says(
    status: str, token: bool, message: str, monkeypatch: pytest.MonkeyPatch, listener: Callable[[bytes | None], str]
):
    """Ray's own other servers do not know what a head knows; a head may want a token, which Ray sends when told to."""
    asked: list[bool] = []

    class Joined(ConnectionError):
        pass

    def join(**options: object) -> None:
        raise Joined("there")

    def enable(warn_if_disabled: bool) -> bool:
        asked.append(warn_if_disabled)
        return token

    fake = SimpleNamespace(__version__="2.60.0", init=join, shutdown=lambda: None, __name__="ray")
    fake.maybe_enable_token_auth_if_token_available = enable
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    monkeypatch.setitem(sys.modules, "grpc", FakeGrpc(status))
    with pytest.raises(ForerunError, match=message) as found, cluster.cluster(listener(SETTINGS_FRAME), 1):
        pass
    assert asked == ([False] if status == "UNAUTHENTICATED" else [])
    assert "ray start --head`, or leave" not in found.value.hint  # that is for `auto`


def test_an_own_cluster_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Without an address Ray joins what runs on this machine, or what RAY_ADDRESS names."""

    class Started(Exception):
        pass

    def start(**options: object) -> None:
        raise Started(str(options.get("address")))

    fake = SimpleNamespace(__version__="2.60.0", init=start, shutdown=lambda: None)
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with pytest.raises(ForerunError, match="cannot start Ray here: local\n"), cluster.cluster(None, 1):
        pass


def test_the_address_in_the_environment_is_looked_at_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **options: pytest.fail("Ray was asked"))
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with socket.socket() as bound:  # it does not listen, and no other socket can
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(BadRequest, match="no Ray cluster answers"), cluster.cluster("auto", 1):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--disk", __file__], "the disk tier cannot use .*test_start.py"),
        (["--store", "mooncake://127.0.0.1:1"], "no Mooncake master answers at mooncake://127.0.0.1:1"),
        (["--store", "mooncake://"], "which is no store"),
        (["--draft-model", "no-such-draft"], "no-such-draft"),
        (["--draft-model", __file__], "test_start.py is a file but not a .gguf file"),
    ],
)
def test_tiers_and_drafts_that_cannot_be_had_are_errors_before_ray_is_started(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
):
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **options: pytest.fail("Ray was started"))
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    asked = ["serve", "--model", str(tiny_folder("qwen3")), "--port", "0", "--replicas", "2", *options]
    found = CliRunner().invoke(app, asked)
    assert isinstance(found.exception, ForerunError) and re.search(message, str(found.exception))


def test_a_signal_to_replace_replicas_that_comes_before_they_are_ready_is_kept(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
):
    unhandled, updated = list[int](), threading.Event()

    @contextmanager
    def starting(*_: object, **__: object) -> Iterator[SimpleNamespace]:
        signal.raise_signal(signal.SIGUSR1)
        assert not updated.is_set()
        yield SimpleNamespace(update=updated.set, app=None)

    def serving(app: object, config: object) -> SimpleNamespace:
        return SimpleNamespace(run=lambda sockets: updated.wait(10))

    monkeypatch.setattr(cluster, "import_module", lambda name: SimpleNamespace(__version__="2.60.0"))
    monkeypatch.setattr("forerun.ray.service.replica_service", starting)
    monkeypatch.setattr("forerun.serve.server.Server", serving)
    before = signal.signal(signal.SIGUSR1, lambda number, _: unhandled.append(number))
    try:
        asked = ["serve", "--model", str(tiny_folder("qwen3")), "--port", "0", "--replicas", "2"]
        found = CliRunner().invoke(app, asked)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found.exit_code == 0 and updated.is_set() and not unhandled


def test_a_folder_in_the_home_is_that_for_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _absolute(Path("~/kv")) == str(tmp_path / "kv")


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


def test_what_ray_logs_of_a_failed_start_is_hidden_and_later_warnings_are_not(monkeypatch: pytest.MonkeyPatch):
    levels: list[object] = []
    client = SimpleNamespace(update_global_logging_config=lambda config: levels.append(config.log_level))
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **_: None, shutdown=lambda: None)
    fake.start = lambda proxy_location, logging_config: levels.append(logging_config["log_level"])
    fake._get_global_client = lambda: client
    fake.LoggingConfig = SimpleNamespace
    fake.status = lambda: SimpleNamespace(applications={})
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with cluster.cluster(None, 1):
        cluster.show_warnings()
    with cluster.cluster("auto", 1):  # one that others use stays as it is
        pass
    assert levels == ["CRITICAL", "WARNING", "WARNING"]


def test_a_signal_to_end_during_the_start_ends_what_was_started(monkeypatch: pytest.MonkeyPatch):
    """Ray's own handler aborts the process, which then ends nothing."""
    ended: list[str] = []
    before = signal.getsignal(signal.SIGTERM)

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: ended.append("aborted"))

    fake = SimpleNamespace(__version__="2.60.0", init=init, start=lambda **_: None)
    fake.shutdown = lambda: ended.append("shutdown")
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    try:
        with pytest.raises(SystemExit), cluster.cluster(None, 1):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == ["shutdown", "shutdown"]  # of Serve, then of Ray


def test_a_cluster_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    fake = SimpleNamespace(__version__="2.60.0", cluster_resources=lambda: {"CPU": 4.0})
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    cluster.warn_of_little_room(cluster.Scale(2, cpus=2))
    assert not caplog.records
    cluster.warn_of_little_room(cluster.Scale(3, cpus=2))
    cluster.warn_of_little_room(cluster.Scale(1, cpus=1, gpus=1))
    cpus, gpus = (record.getMessage() for record in caplog.records)
    assert "has 4 CPUs and 3 replicas want 2 each" in cpus and "has 0 GPUs and 1 replicas want 1 each" in gpus


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


def test_a_profile_of_another_model_is_an_error_before_ray_is_started(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
):
    fake = SimpleNamespace(__version__="2.60.0", init=lambda **options: pytest.fail("Ray was started"))
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    asked = ["serve", "--model", str(tiny_folder("qwen3")), "--port", "0", "--replicas", "2"]
    (profile,) = (Path(forerun.__file__).parent / "data" / "profiles").glob("*.safetensors")
    found = CliRunner().invoke(app, [*asked, "--prefill-profile", str(profile)])
    assert isinstance(found.exception, BadProfile) and "not for this target" in str(found.exception)


def test_no_cluster_where_one_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    def refuse(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    fake = SimpleNamespace(__version__="2.60.0", init=refuse, shutdown=lambda: None)
    monkeypatch.setattr(cluster, "import_module", lambda name: fake)
    with pytest.raises(ForerunError, match="at auto: .*\nhint: start one with"), cluster.cluster("auto", 1):
        pass


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
