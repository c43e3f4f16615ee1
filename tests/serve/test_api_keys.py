"""API keys and cross-origin requests."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import httpx
import openai
import pytest

from forerun import LLM
from forerun.engine.sequence import Client, Request
from forerun.errors import BadRequest
from forerun.serve.admission import AdmissionControl
from forerun.serve.config import ApiKeys
from forerun.serve.errors import ApiError
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


def test_weights_of_keys():
    ann, bob, eve = f"ann {digest('a')} weight=2.5", f"bob {digest('b')} 4 weight=3", f"eve {digest('e')}"
    keys = ApiKeys.parse("\n".join((ann, bob, eve)), "here").keys
    assert [(key.limit, key.client) for key in keys] == [
        (None, Client("ann", 2.5)),
        (4, Client("bob", 3.0)),
        (None, Client("eve", 1.0)),
    ]
    for wrong in ("weight=0", "weight=-1", "weight=nan", "weight=x", "weight=1e9", "wait=3", "4 5"):
        with pytest.raises(BadRequest, match="here, line 1"):
            ApiKeys.parse(f"ann {digest('a')} {wrong}", "here")


def test_a_key_finds_its_part_of_the_places_free():
    keys = ApiKeys.parse(f"ann {digest('a')}\nbob {digest('b')} weight=3", "here")
    ann, bob = keys.keys
    admission = AdmissionControl(4, 12, keys)  # 16 places: 2 are ann's, 6 are bob's
    with contextlib.ExitStack() as held:
        for _ in range(10):
            held.enter_context(admission.admit(1, ann))
        with pytest.raises(ApiError, match="for other keys") as refused:
            held.enter_context(admission.admit(1, ann))
        assert refused.value.status == 429 and refused.value.code == "key_share"
        for _ in range(6):
            held.enter_context(admission.admit(1, bob))
        with pytest.raises(ApiError, match="16 answers are open"):
            held.enter_context(admission.admit(1, bob))
    assert admission.num_open == 0
    with contextlib.ExitStack() as held:
        held.enter_context(admission.admit(14, bob))
        with pytest.raises(ApiError, match="for other keys"):
            held.enter_context(admission.admit(1, bob))
        keys.keys = (bob,)  # read again: ann is gone
        held.enter_context(admission.admit(2, bob))


def test_requests_run_on_the_account_of_their_key(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, float, bool]] = []
    submit = llm.engine.submit

    def watched(request: Request) -> None:
        seen.append((request.client.name, request.client.weight, request.streamed))
        submit(request)

    monkeypatch.setattr(llm.engine, "submit", watched)
    keys = ApiKeys.parse(f"ann {digest('secret-a')} weight=2", "here")
    with running(llm, keys=keys) as made:
        assert made.post(CHAT, ASKED, headers={"x-api-key": "secret-a"}).status_code == 200
        assert made.post(CHAT, ASKED | {"stream": True}, headers={"x-api-key": "secret-a"}).status_code == 200
    assert seen == [("ann", 2.0, False), ("ann", 2.0, True)]
