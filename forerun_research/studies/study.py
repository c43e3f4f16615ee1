"""A study: what is measured, on which models, under which settings of prefill; read from a YAML file.

Every key is checked and unknown ones are refused, so that a misspelt option is an error and not a default. Knows
neither how anything is measured nor the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import BadRequest
from forerun.params import Prefill

EXACT = "exact"


@dataclass(frozen=True)
class Setting:
    """One way to prefill, under the name that tables use."""

    name: str
    prefill: Prefill = field(default_factory=Prefill)
    share: float | None = None  # of recomputed tokens, in place of what the profile suggests
    deepen: bool = True  # whether more is recomputed where checks fail; they are made all the same

    @classmethod
    def read(cls, given: Any, where: str) -> Setting:
        values = _mapping(given, where)
        known = {"name", "share", "deepen", *(entry.name for entry in fields(Prefill))}
        _refuse_unknown(values, known, where)
        share, deepen = values.pop("share", None), values.pop("deepen", True)
        asked = {"mode": "speculative", **values}
        name = str(asked.pop("name", "")) or _name(asked, share)
        if name == EXACT or asked["mode"] == EXACT:
            raise BadRequest(f"{where}: exact prefill is always measured", "leave it out of `settings`")
        if share is not None and not (isinstance(share, (int, float)) and 0.0 <= share <= 1.0):
            raise BadRequest(f"{where}: share is {share!r}, allowed is 0 to 1", "give a share of the prompt's tokens")
        if share is not None and (asked.get("budget") is not None or asked.get("quality") is not None):
            raise BadRequest(f"{where}: share {share} stands beside a budget or quality", "give one of them")
        if not isinstance(deepen, bool):
            raise BadRequest(f"{where}: deepen is {deepen!r}", "write true or false")
        return cls(name, Prefill(**asked), share, deepen)


def _name(asked: dict[str, Any], share: float | None) -> str:
    parts = [str(value) for key, value in asked.items() if key in ("source", "chooser")]
    parts += [f"{key} {value}" for key, value in (*asked.items(), ("share", share)) if key in ("budget", "quality")]
    parts += [] if share is None else [f"share {share}"]
    return ", ".join(parts) or asked["mode"]


@dataclass(frozen=True)
class Variant:
    """The same target beside another draft or profile."""

    name: str = ""
    draft: str | None = None
    profile: str | None = None
    settings: tuple[str, ...] = ()  # names of those that apply; none named: all


@dataclass(frozen=True)
class Study:
    """`measures`: names with their options, in order; each is checked by its measure."""

    title: str
    model: str
    measures: tuple[tuple[str, dict[str, Any]], ...]
    settings: tuple[Setting, ...] = ()
    variants: tuple[Variant, ...] = (Variant(),)
    data: Path | None = None  # folder with the files that measures name
    device: str = "auto"
    weights: str = "auto"
    threads: int | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None

    def settings_of(self, variant: Variant) -> tuple[Setting, ...]:
        return tuple(s for s in self.settings if not variant.settings or s.name in variant.settings)

    def parts(self) -> dict[str, str]:
        """A digest of everything that results depend on, part by part: results of two studies may lie side by side
        where the parts of the same name are the same. Counts of prompts, devices and threads do not matter."""
        found = {"model": _digest([self.model, self.weights])}
        found |= {f"setting {s.name}": _digest(asdict(s)) for s in self.settings}
        found |= {f"variant {v.name}": _digest([v.draft, _content(v.profile)]) for v in self.variants}
        for name, given in self.measures:
            found[f"measure {name}"] = _digest({key: value for key, value in given.items() if key != "prompts"})
        return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _content(profile: str | None) -> str:
    """What a profile's file holds: it may be calibrated anew under the same name."""
    if profile is None or not Path(profile).is_file():
        return str(profile)
    return hashlib.sha256(Path(profile).read_bytes()).hexdigest()


_OPENING = ("device", "weights", "threads", "kv_cache_tokens", "max_model_len")  # how a model is opened
_KEYS = ("title", "model", "draft", "profile", "variants", "data", "settings", "measures", *_OPENING)


def shipped() -> dict[str, Path]:
    """The studies of this package by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find(name: str) -> Path:
    """The file of a study: a path, or the name of one of this package's."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    if name not in shipped():
        raise BadRequest(f"no study is called {name!r}", f"give a YAML file, or one of {', '.join(shipped())}")
    return shipped()[name]


def question(path: Path) -> str:
    """What a study asks: the comment its file begins with, up to the first blank or command line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("# forerun "):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines)


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Study:
    """The study of a file; `overrides` (from the command line) replace keys of the same name where not None."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}", "`forerun lab list` names those there are") from None
    except yaml.YAMLError as error:
        raise BadRequest(
            f"{path} is not YAML: {error}", "compare it with those that `forerun lab list` names"
        ) from None
    values = _mapping(content, str(path)) | {k: v for k, v in (overrides or {}).items() if v is not None}
    return read(values, path.stem, str(path))


def read(values: dict[str, Any], title: str, where: str) -> Study:
    _refuse_unknown(values, _KEYS, where)
    for key in ("model", "measures"):
        if not values.get(key):
            raise BadRequest(f"{where} says no `{key}`", "compare it with those that `forerun lab list` names")
    settings = tuple(Setting.read(s, f"{where}: settings") for s in values.get("settings") or ())
    _unique([s.name for s in settings], f"{where}: settings")
    same = {key: values[key] for key in _OPENING if values.get(key) is not None}
    return Study(
        title=str(values.get("title", title)),
        model=str(values["model"]),
        measures=_measures(values["measures"], where),
        settings=settings,
        variants=_variants(values, [s.name for s in settings], where),
        data=None if values.get("data") is None else Path(str(values["data"])),
        **same,
    )


def narrowed(study: Study, only: Sequence[str] = (), prompts: int | None = None) -> Study:
    """The same study with some of its measures, and with so many prompts each."""
    names = [name for name, _ in study.measures]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise BadRequest(f"the study has no measure {unknown[0]!r}", f"it has {', '.join(names)}")
    more = {} if prompts is None else {"prompts": prompts}
    kept = tuple((name, given | more) for name, given in study.measures if not only or name in only)
    return replace(study, measures=kept)


def _measures(given: Any, where: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """A list of names and of {name: options}."""
    if not isinstance(given, list):
        raise BadRequest(f"{where}: `measures` is no list", "write `measures:` and a line `- agreement:` for each")
    found: list[tuple[str, dict[str, Any]]] = []
    for entry in given:
        if isinstance(entry, str):
            found.append((entry, {}))
        elif isinstance(entry, dict) and len(entry) == 1:
            name, options = next(iter(entry.items()))
            found.append((str(name), _mapping(options or {}, f"{where}: {name}")))
        else:
            raise BadRequest(f"{where}: a measure is {entry!r:.80}", "write `- name` or `- name: {option: value}`")
    _unique([name for name, _ in found], f"{where}: measures")
    return tuple(found)


def _variants(values: dict[str, Any], settings: list[str], where: str) -> tuple[Variant, ...]:
    """Drafts and profiles to compare; without a list, the one of the file's own keys."""
    own = Variant("", values.get("draft"), None if values.get("profile") is None else str(values["profile"]))
    if not values.get("variants"):
        return (own,)
    found = []
    for entry in values["variants"]:
        given = _mapping(entry, f"{where}: variants")
        _refuse_unknown(given, ("name", "draft", "profile", "settings"), f"{where}: variants")
        if not given.get("name"):
            raise BadRequest(f"{where}: a variant has no name", "give every variant a `name`")
        profile = given.get("profile", own.profile)
        draft = given.get("draft", own.draft)
        names = tuple(given.get("settings") or ())
        unknown = [name for name in names if name not in settings]
        if unknown:
            raise BadRequest(f"{where}: no setting is called {unknown[0]!r}", f"there are {', '.join(settings)}")
        found.append(Variant(str(given["name"]), draft, None if profile is None else str(profile), names))
    _unique([v.name for v in found], f"{where}: variants")
    return tuple(found)


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadRequest(f"{where}: {given!r:.80} is no mapping of keys to values", "write `key: value` lines")
    return {str(key): value for key, value in given.items()}


def _refuse_unknown(values: Mapping[str, Any], known: Any, where: str) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise BadRequest(f"{where}: unknown {', '.join(map(repr, unknown))}", f"known are {', '.join(sorted(known))}")


def options(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    """An object of a dataclass from the options of a file; lists become tuples."""
    _refuse_unknown(given, [entry.name for entry in fields(kind)], where)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return kind(**values)
    except BadRequest:
        raise
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{where}: {error}", "compare it with those that `forerun lab list` names") from None


def _unique(names: list[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadRequest(f"{where}: {', '.join(map(repr, twice))} stands there twice", "give every entry its own name")
