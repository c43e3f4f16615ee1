"""The check of the dashboard in Grafana: what it provisions and imports, and which panels it misses in a page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from forerun_research.scripts import grafana
from forerun_research.scripts.check_dashboard import DASHBOARD

PROMETHEUS = "http://127.0.0.1:9090"


def board() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def test_panels_that_are_missing_or_have_errors(browser: Browser):
    shown = board()
    titles = [panel["title"] for panel in shown["panels"] if panel["type"] != "row"]

    def panel(title: str, content: str = "") -> str:
        return f'<section data-testid="data-testid Panel header {html.escape(title)}">{content}</section>'

    page = browser.new_page()
    page.set_content("".join(map(panel, titles)))
    assert grafana.wrong_panels(page, shown, 0.5) == []
    old = [f'<div aria-label="Panel container title {html.escape(title)}"><p></p></div>' for title in titles]
    old[0] = old[0].replace("<p>", '<p aria-label="Panel header error">')
    page.set_content("".join(old))
    assert grafana.wrong_panels(page, shown, 0.5) == [f"error in: {titles[0]}"]
    failed = panel(titles[1], '<button data-testid="data-testid Panel status error"></button>')
    unknown = panel(titles[2], "<p>Panel plugin not found: graph</p>")
    page.set_content("".join([failed, unknown, *map(panel, titles[3:])]))
    wrong = grafana.wrong_panels(page, shown, 0.5)
    assert wrong == [f"no panel: {titles[0]}", f"error in: {titles[1]}", f"no plugin for: {titles[2]}"]
    page.set_content(
        "".join([panel(titles[0], "<p>No data</p>"), panel(titles[1], "No data"), *map(panel, titles[2:])])
    )
    assert grafana.wrong_panels(page, shown, 0.5, {titles[0], titles[2]}) == [f"no data in: {titles[0]}"]
    page.close()


def test_provisioning_has_the_data_source_and_the_dashboard(tmp_path: Path):
    grafana.provision(tmp_path, PROMETHEUS, board())
    source = json.loads((tmp_path / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["url"] == PROMETHEUS
    provider = json.loads((tmp_path / "provisioning/dashboards/forerun.yaml").read_text())["providers"][0]
    assert json.loads(Path(provider["options"]["path"], "grafana.json").read_text(encoding="utf-8")) == board()


def test_an_old_grafana_gets_data_sources_by_name():
    old = grafana.by_name(board())
    assert [panel["title"] for panel in old["panels"]] == [panel["title"] for panel in board()["panels"]]
    panels = [panel for panel in old["panels"] if panel["type"] != "row"]
    assert all(each["datasource"] == "${datasource}" for panel in panels for each in (panel, *panel["targets"]))
    assert all(isinstance(variable["query"], str) for variable in old["templating"]["list"])


@pytest.mark.parametrize("lost", [0, 1])
def test_an_import_that_loses_panels_is_reported(monkeypatch: pytest.MonkeyPatch, lost: int):
    stored: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            kept = stored["dashboard"]["panels"][lost:]
            return httpx.Response(200, json={"dashboard": stored["dashboard"] | {"panels": kept}})
        if request.url.path == "/api/dashboards/db":
            stored.update(json.loads(request.content))
        return httpx.Response(200, json={})

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **more: client(transport=httpx.MockTransport(answer), **more))
    wrong = grafana.import_into("http://admin:admin@grafana", PROMETHEUS, board())
    assert bool(wrong) == bool(lost) and stored["overwrite"] is True
