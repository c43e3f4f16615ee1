"""The limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import BadRequest


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; every value is checked on creation."""

    max_model_len: int
    kv_cache_tokens: int
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_tokens", "page_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{name} is {value!r}, it must be a whole number of at least 1", f"raise {name}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadRequest(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}",
                "a step holds one token of every running request: raise max_num_batched_tokens or lower max_num_seqs",
            )
        if self.kv_cache_tokens < 2 * self.page_size:
            raise BadRequest(
                f"kv_cache_tokens is {self.kv_cache_tokens}, less than two pages of {self.page_size}", "raise it"
            )

    @property
    def capacity(self) -> int:
        """Tokens that whole pages of the pool hold; one sequence can never have more."""
        return self.kv_cache_tokens // self.page_size * self.page_size
