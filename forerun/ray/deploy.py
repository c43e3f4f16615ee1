"""For `serve deploy`: the same front and replicas as one Ray Serve application, described in a YAML file.

    applications:
      - name: forerun
        import_path: forerun.ray.deploy:application
        args: {model: smollm2-135m-instruct, replicas: 2, disk: /shared/kv, api_keys: /etc/forerun/keys.txt}

`args` are those of `LLM`, of `ServeConfig` and of `Scale`; `api_keys` is a file, `allowed_hosts` is any unless given.
The front is one replica of its own, so that limits hold over all of them.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun.ray.cluster import RayReplicas, Scale, deployment, load_ray
from forerun.ray.front import create_front
from forerun.ray.replica import ReplicaSettings
from forerun.ray.service import front_limits
from forerun.serve.config import ApiKeys, ServeConfig


def application(args: dict[str, Any]) -> Any:
    """What `import_path` names."""
    _, serve = load_ray()
    settings, scale = parse_args(args)
    front = serve.deployment(
        serve.ingress()(RayFront),
        name="Front",
        max_ongoing_requests=settings.max_open + 64,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},  # it computes nothing, and must find a place beside replicas
    )
    return front.bind(deployment(settings, scale).bind(settings), settings, scale)


def parse_args(args: dict[str, Any]) -> tuple[ReplicaSettings, Scale]:
    """What is not understood raises: `LLM` itself refuses names that are not its own."""
    given = dict(args)
    if not isinstance(given.get("model"), str):
        raise BadRequest("args have no model", "write args: {model: NAME, ...}")
    scale = Scale(**_taken(given, Scale) | {"replicas": int(args.get("replicas", 1))})
    keys = given.pop("api_keys", None)
    own = _taken(given, ServeConfig)
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    own = {"model_name": given["model"], "allowed_hosts": ("*",)} | own
    config = ServeConfig(**own, keys=None if keys is None else ApiKeys.load(Path(keys)))
    llm = {"max_num_seqs": 64, "quiet": True} | given
    return ReplicaSettings(llm, config, front_limits(config, scale, llm["max_num_seqs"]).max_open), scale


def _taken(given: dict[str, Any], kind: type) -> dict[str, Any]:
    names = [entry.name for entry in fields(kind) if entry.name in given]
    return {name: given.pop(name) for name in names}


class RayFront:
    """The front as a deployment behind Ray's own proxies."""

    def __init__(self, handle: Any, settings: ReplicaSettings, scale: Scale) -> None:
        _, serve = load_ray()
        self._replicas = RayReplicas(handle, serve.get_replica_context().app_name)
        limits = front_limits(settings.config, scale, settings.llm["max_num_seqs"])
        self._front = create_front(self._replicas, settings.config, limits)

    async def __serve_build_asgi_app__(self) -> Any:
        await self._replicas.warm_up()
        return self._front
