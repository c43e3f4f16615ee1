"""API keys and cross-origin requests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import openai
import pytest

from forerun import LLM
from forerun.errors import BadRequest
from forerun.serve.config import ApiKeys
from tests.serve.common import ASKED, CHAT, Holding, Running, error, running, wait_for


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_api_keys(llm: LLM, slow: None):
    keys = ApiKeys.parse(f"ann {digest('secret-a')} 1  # one at a time\nbob {digest('secret-b')}", "here")
    with running(llm, keys=keys) as made:
        for headers in ({}, {"authorization": "Bearer secret-c"}, {"authorization": "secret-a"}):
            for response in (made.post(CHAT, ASKED, headers=headers), made.get("/metrics", headers=headers)):
                assert error(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            made.client("secret-").models.list()
        assert made.get("/health").status_code == 200 == made.get("/ready").status_code
        ann, bob = {"authorization": "Bearer secret-a"}, {"authorization": "Bearer secret-b"}
        one = Holding(made, headers=ann)
        assert error(made.post(CHAT, ASKED, headers=ann), 429)["code"] == "key_limit"
        assert made.client("secret-b").chat.completions.create(**ASKED).choices
        assert "limit is 1" in error(made.post(CHAT, ASKED | {"n": 2}, headers=ann), 400)["message"]
        one.join()
        wait_for(lambda: made.app.state.admission.num_open == 0)
        assert made.post(CHAT, ASKED, headers=ann).status_code == 200
        assert made.get("/metrics", headers=bob).status_code == 200


@pytest.mark.parametrize(
    "text", ["", "ann", "ann secret-key", f"ann {digest('a')} none", f"ann {digest('a')} 0", f"a {digest('a')}\n" * 2]
)
def test_key_files_with_mistakes(text: str, tmp_path: Path):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(BadRequest) as caught:
        ApiKeys.load(tmp_path / "keys")
    assert "secret" not in str(caught.value)
    with pytest.raises(BadRequest, match="cannot read"):
        ApiKeys.load(tmp_path / "none")


def test_other_origins_are_allowed_only_where_they_are_named(served: Running, llm: LLM):
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in served.post(CHAT, ASKED, headers=asking).headers
    keys = ApiKeys.parse(f"ann {digest('secret-a')}", "here")
    with running(llm, cors_origins=("https://a.example",), keys=keys) as made:
        asking["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
        preflight = httpx.options(made.url + CHAT, headers=asking)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "DELETE" in preflight.headers["access-control-allow-methods"]  # of sessions
        refused = made.post(CHAT, ASKED, headers={"origin": "https://a.example"})  # may be read, the time to wait, too
        assert "Retry-After" in refused.headers["access-control-expose-headers"]
        other = httpx.options(made.url + CHAT, headers=asking | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
