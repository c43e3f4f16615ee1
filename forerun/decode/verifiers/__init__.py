"""Verifiers by name. Lossless ones keep the target's distribution; lossy ones must be named, with a bound."""

from __future__ import annotations

from collections.abc import Callable

from forerun.decode.verifiers.base import MatchVerifier, Verifier
from forerun.decode.verifiers.lossless import BlockVerifier, RejectionVerifier, TransportVerifier, TraversalVerifier
from forerun.decode.verifiers.lossy import BoundedVerifier, DivergenceVerifier, TypicalVerifier
from forerun.errors import BadRequest
from forerun.params import Speculation

AUTO = MatchVerifier.name
LOSSLESS: dict[str, Callable[[], Verifier]] = {
    kind.name: kind for kind in (MatchVerifier, RejectionVerifier, BlockVerifier, TraversalVerifier, TransportVerifier)
}
LOSSY: dict[str, Callable[[float], Verifier]] = {
    kind.name: kind for kind in (TypicalVerifier, BoundedVerifier, DivergenceVerifier)
}


def make_verifier(spec: Speculation) -> Verifier:
    name = AUTO if spec.verify == "auto" else spec.verify
    if name in LOSSLESS:
        if spec.bound > 0:
            hint = f"leave the bound out, or name a lossy verifier: {', '.join(LOSSY)}"
            raise BadRequest(f"the verifier {name!r} is lossless and takes no bound, got {spec.bound}", hint)
        return LOSSLESS[name]()
    if name in LOSSY:
        if spec.bound == 0:
            raise BadRequest(f"the verifier {name!r} is lossy and has no bound", "give a bound above 0")
        return LOSSY[name](spec.bound)
    hint = f"use auto, {', '.join(LOSSLESS)}, or one that is lossy: {', '.join(LOSSY)}"
    raise BadRequest(f"there is no verifier {spec.verify!r}", hint)


__all__ = ["AUTO", "LOSSLESS", "LOSSY", "Verifier", "make_verifier"]
