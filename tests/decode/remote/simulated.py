"""A draft server behind a network, on the clock of `tests.decode.simulator`: the real remote drafter, speculator and
controller, and a server whose drafts are right or wrong by design. Nothing sleeps, and no socket is opened.

The server may run on the target's own machine: while it computes, the target's forwards take `slowdown` times as long,
as two processes on one memory bus do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from forerun.decode.control.cost import CostCurve, ServerRounds, Slowdown
from forerun.decode.drafters import remote as remote_module
from forerun.decode.drafters.remote import RemoteDrafter, remote_drafter
from forerun.decode.remote.protocol import Close, DraftOrder, Frame, Tree, Welcome
from tests.decode.simulator import VOCAB, WRONG, Clock, Machine, World

NAME = "remote:simulated:1"
WAKE_S = 20e-6  # of a thread that waited
# The pair of 1.5B and 0.5B, one thread of two cores for each
ONE_CORE = Machine(
    {1: 0.0523, 2: 0.0588, 4: 0.0777, 8: 0.1256, 16: 0.1861, 32: 0.3655, 64: 0.7759},
    {1: 0.018, 64: 0.27},
    read_s=(0.0, 4e-3),
    host_s=(0.2e-3, 0.1e-3),
    draft_host_s=0.2e-3,
    run_s=100e-6,
)


@dataclass(frozen=True)
class Network:
    round_trip_s: float
    slowdown: float = 1.0  # of the target while the server computes
    silent: bool = False  # orders are read and never answered
    rounds: ServerRounds = ServerRounds()


class SimulatedServer:
    """One order at a time; a later one replaces an earlier one of its sequence after the round that runs."""

    def __init__(self, world: RemoteWorld, network: Network) -> None:
        self.world, self.network = world, network
        self.address, self.refusal, self.connections = "simulated:1", "", 1
        self.welcome = Welcome(4096, 16, 0.02, "simulated", 1, *network.rounds)
        self.bytes_sent = self.bytes_received = 0
        self.known: dict[int, list[int]] = {}  # wire id -> tokens that the server has read
        self.busy: list[tuple[float, float]] = []  # when it computed, and will
        self.answers: list[tuple[float, Tree]] = []  # on their way, with the time they arrive
        self.orders, self.depths = 0, list[int]()

    def wait_attempted(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, frame: Frame) -> bool:
        if isinstance(frame, Close):
            self.known.pop(frame.seq, None)
            return True
        assert isinstance(frame, DraftOrder)
        self.orders += 1
        here = self.world.clock.now + 0.5 * self.network.round_trip_s
        self.answers = [(at, tree) for at, tree in self.answers if tree.seq != frame.seq or at - here <= 0.0]
        if self.busy and self.busy[-1][1] > here:  # it ends the round that runs
            self.busy[-1] = (self.busy[-1][0], max(self.busy[-1][0], min(self.busy[-1][1], here + self.round_s)))
        begin = max(here, self.busy[-1][1] if self.busy else 0.0)
        tokens = [*self.known.get(frame.seq, [])[: frame.kept], *frame.tokens]
        read_s = len(frame.tokens) * self.world.machine.read_s[1] if len(frame.tokens) > 8 else 0.0
        depth = self._depth(frame)
        self.depths.append(depth)
        end = begin + read_s + self.network.rounds.seconds(depth, self.round_s)
        self.known[frame.seq] = tokens
        self.busy.append((begin, end))
        if not self.network.silent:
            made = self._tree(frame, tokens, depth, end - here)
            self.answers.append((end + 0.5 * self.network.round_trip_s, made))
        return True

    @property
    def round_s(self) -> float:
        return self.world.rounds.seconds(1)

    def _depth(self, order: DraftOrder) -> int:
        if self.network.rounds.tokens > 1:
            return min(order.depth, self.network.rounds.tokens)
        claimed, depth = self.world.claimed, 1
        while depth < order.depth:
            free = depth * self.round_s < 1e-3 * order.free_ms
            if claimed**depth < (order.min_prob if free else max(order.min_prob, order.paid_prob)):
                break
            depth += 1
        return depth

    def _tree(self, order: DraftOrder, tokens: list[int], depth: int, server_s: float) -> Tree:
        text, prompt = self.world.text, self.world.text.category.prompt
        at = len(tokens) - prompt
        right = tokens[prompt:] == list(range(1000, 1000 + at))
        chain = text.chain("model", at, depth) if right else [WRONG + 7 + n for n in range(depth)]
        parents = list(range(-1, len(chain) - 1))
        made = Tree(order.seq, order.version, round(1e6 * server_s), round(1e6 * self.round_s), chain, parents)
        made.probs = [self.world.claimed] * len(chain)
        return made

    def deliver(self, receive: Any) -> None:
        """Answers are received when they arrive, as a link's thread does, also where the target computes then."""
        clock = self.world.clock
        now, due = clock.now, [answer for answer in self.answers if answer[0] <= clock.now]
        self.answers = [answer for answer in self.answers if answer[0] > now]
        for arrived, tree in due:
            clock.now = arrived
            receive(tree)
        clock.now = now

    def slowed(self, start: float, seconds: float) -> float:
        """What a forward of so many seconds takes from `start` on."""
        now, left, slow = start, seconds, self.network.slowdown
        for begin, end in self.busy:
            if end <= now:
                continue
            if begin > now:
                if left <= begin - now:
                    return now + left - start
                left, now = left - (begin - now), begin
            if left * slow <= end - now:
                return now + left * slow - start
            left, now = left - (end - now) / slow, end
        return now + left - start


class SimulatedCondition:
    """Of the drafter: the clock jumps to the next answer where it waits."""

    def __init__(self, server: SimulatedServer, drafter: RemoteDrafter) -> None:
        self.server, self.drafter, self._inside = server, drafter, False
        self.waited_s = 0.0

    def __enter__(self) -> None:
        if not self._inside:
            self._inside = True
            self.server.deliver(self.drafter._receive)
            self._inside = False

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        clock = self.server.world.clock
        arrives = min((at for at, _ in self.server.answers), default=float("inf"))
        end = max(clock.now + WAKE_S, min(clock.now + seconds, arrives))
        self.waited_s += end - clock.now
        clock.now = end
        self.__enter__()


class _SlowedTarget:
    def __init__(self, curve: CostCurve, clock: Clock, server: SimulatedServer) -> None:
        self._curve, self._clock, self._server = curve, clock, server

    def seconds(self, rows: int, sequences: int) -> float:
        return self._server.slowed(self._clock.now, self._curve.seconds(rows, sequences))


class RemoteWorld(World):
    """`auto` with lookup and a drafter on a simulated network; one text at a time."""

    def __init__(self, network: Network, machine: Machine = ONE_CORE) -> None:
        super().__init__(machine, ("lookup",))
        self.stated: float | None = None
        self.server = SimulatedServer(self, network)
        kind: Any = remote_drafter(NAME.partition(":")[2])
        kind._open_links = lambda drafter, hello: [self.server]
        self.spec.ctx.runner.decoder.device = SimpleNamespace(type="cpu")
        drafter = kind(self.spec.ctx)
        self.condition = drafter._changed = SimulatedCondition(self.server, drafter)
        self.spec.drafter_pool._drafters[NAME] = drafter
        self.controller.slowdowns[NAME] = Slowdown(network.slowdown > 1.0)
        self.names.append(NAME)
        self.target = _SlowedTarget(self.target, self.clock, self.server)  # type: ignore[assignment]

    @property
    def text(self) -> Any:
        return self.texts[len(self.texts) - 1]

    @property
    def claimed(self) -> float:
        """What the server says of each of its tokens."""
        return self.stated or 1.0 - 0.75 * (1.0 - self.text.category.model)

    @contextmanager
    def _on_clock(self) -> Iterator[None]:
        real = remote_module.time
        remote_module.time = SimpleNamespace(monotonic=self.clock.perf_counter)  # type: ignore[assignment]
        try:
            with super()._on_clock():
                yield
        finally:
            remote_module.time = real


assert WRONG < VOCAB
