"""The limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import BadRequest


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; every value is checked on creation."""

    max_context: int
    pool_tokens: int
    page_size: int = 16
    max_batch: int = 64
    chunk_tokens: int = 512
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_context", "pool_tokens", "page_size", "max_batch", "chunk_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name} is {value!r}, it must be a whole number of at least 1", f"raise {name}")
        if self.chunk_tokens < self.max_batch:
            raise BadRequest(
                f"chunk_tokens is {self.chunk_tokens}, less than max_batch {self.max_batch}",
                "a step must hold one token of every running request: raise chunk_tokens or lower max_batch",
            )
        if self.pool_tokens < 2 * self.page_size:
            raise BadRequest(f"pool_tokens is {self.pool_tokens}, less than two pages of {self.page_size}", "raise it")

    @property
    def capacity(self) -> int:
        """Tokens that whole pages of the pool hold; one sequence can never have more."""
        return self.pool_tokens // self.page_size * self.page_size
