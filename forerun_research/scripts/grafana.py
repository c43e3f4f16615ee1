# mypy: disable-error-code="import-not-found"
"""A dashboard in a real Grafana: started from its folder or given by its URL, and opened in a real browser; and the
dashboard's JSON against the types that Grafana publishes.

`check_dashboard` calls it. Selectors are those of `@grafana/e2e-selectors` (10.2 and later, and 7.5). A Grafana before
8.3 has data sources by name: it gets the dashboard so.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_S, OPEN_S = 120.0, 120.0
BROWSERS = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
SOURCE = "Prometheus of check_dashboard"
PANELS = "node_modules/@grafana/schema/dist/types/raw/composable"
TYPES = {  # the options of a panel may be left out one by one, and values of enums are written as texts
    "row": "Texts<RowPanel>",
    "stat": "Texts<Panel & {options: Partial<Stat>}>",
    "timeseries": "Texts<Panel & {options: Partial<Series>, fieldConfig: {defaults: {custom?: GraphFieldConfig}}}>",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def data_source(prometheus: str) -> dict[str, Any]:
    source = {"name": SOURCE, "type": "prometheus", "access": "proxy", "url": prometheus, "isDefault": True}
    return source | {"jsonData": {"timeInterval": "1s"}}  # as scraped: seconds of data will do for rates


def by_name(dashboard: Any) -> Any:
    """A dashboard as a Grafana before 8.3 reads it: data sources by name, and queries of variables as texts."""
    if isinstance(dashboard, list):
        return [by_name(part) for part in dashboard]
    if not isinstance(dashboard, dict):
        return dashboard
    names = {"datasource": "uid", "query": "query"}
    return {
        key: value[names[key]] if key in names and isinstance(value, dict) else by_name(value)
        for key, value in dashboard.items()
    }


def provision(folder: Path, prometheus: str, dashboard: dict[str, Any]) -> None:
    """The files from which a Grafana that starts makes the data source and the dashboard; JSON is YAML."""
    boards = folder / "boards"
    for name in ("datasources", "dashboards"):
        (folder / "provisioning" / name).mkdir(parents=True)
    boards.mkdir()
    (boards / "grafana.json").write_text(json.dumps(dashboard))
    sources = {"apiVersion": 1, "datasources": [data_source(prometheus)]}
    (folder / "provisioning/datasources/prometheus.yaml").write_text(json.dumps(sources))
    providers = [{"name": "forerun", "type": "file", "options": {"path": str(boards)}}]
    settings = {"apiVersion": 1, "providers": providers}
    (folder / "provisioning/dashboards/forerun.yaml").write_text(json.dumps(settings))


@contextmanager
def started(home: Path, folder: Path, prometheus: str, dashboard: dict[str, Any]) -> Iterator[str]:
    """A Grafana of an unpacked release (`bin/grafana`, in old ones `bin/grafana-server`), without accounts and without
    a word to other hosts."""
    new = (home / "bin/grafana").exists()
    command = [str(home / "bin/grafana"), "server"] if new else [str(home / "bin/grafana-server")]
    provision(folder, prometheus, dashboard if new else by_name(dashboard))
    port = free_port()
    settings = {
        "PATHS_DATA": f"{folder}/data", "PATHS_LOGS": f"{folder}/logs", "PATHS_PROVISIONING": f"{folder}/provisioning",
        "SERVER_HTTP_ADDR": "127.0.0.1", "SERVER_HTTP_PORT": str(port), "LOG_LEVEL": "error",
        "AUTH_ANONYMOUS_ENABLED": "true", "AUTH_ANONYMOUS_ORG_ROLE": "Admin", "PLUGINS_PREINSTALL_DISABLED": "true",
        "ANALYTICS_REPORTING_ENABLED": "false", "ANALYTICS_CHECK_FOR_UPDATES": "false",
        "SECURITY_DISABLE_GRAVATAR": "true",
    }  # fmt: skip
    environment = os.environ | {f"GF_{name}": value for name, value in settings.items()}
    process = subprocess.Popen([*command, "--homepath", str(home)], env=environment)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not answers(f"{url}/api/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"Grafana in {home} does not start (exit status {process.poll()})")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def import_into(grafana: str, prometheus: str, dashboard: dict[str, Any]) -> list[str]:
    """Makes the data source and the dashboard in a running Grafana (URL with user and password); what went wrong."""
    with httpx.Client(base_url=grafana, timeout=30) as client:
        made = client.post("/api/datasources", json=data_source(prometheus))
        posted = client.post("/api/dashboards/db", json={"dashboard": dashboard, "overwrite": True})
        back = client.get(f"/api/dashboards/uid/{dashboard['uid']}")
    wrong = [f"data source: {made.status_code} {made.text[:200]}"] if made.status_code not in (200, 409) else []
    wrong += [f"import: {posted.status_code} {posted.text[:200]}"] if posted.status_code != 200 else []
    if back.status_code != 200 or len(back.json()["dashboard"]["panels"]) != len(dashboard["panels"]):
        wrong.append(f"read back: {back.status_code}, or panels are missing")
    return wrong


def open_in_browser(grafana: str, dashboard: dict[str, Any], filled: set[str], picture: str | None) -> list[str]:
    """Opens the dashboard in a window that is tall enough for all panels; what it does not show as it should.
    `filled`: titles of panels whose expressions have data."""
    from playwright.sync_api import sync_playwright

    browser_path = os.environ.get("FORERUN_BROWSER") or next(path for path in BROWSERS if Path(path).exists())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
        page = browser.new_page(viewport={"width": 1600, "height": 40 * rows + 400})  # a row has 38 pixels
        page.goto(f"{grafana}/d/{dashboard['uid']}?kiosk&from=now-2m&to=now&refresh=5s", timeout=OPEN_S * 1000)
        wrong = wrong_panels(page, dashboard, OPEN_S, filled)
        if picture:
            page.screenshot(path=picture)
        browser.close()
    return wrong


def wrong_panels(page: Any, dashboard: dict[str, Any], limit_s: float, filled: Collection[str] = ()) -> list[str]:
    """Panels that did not appear within the limit, that have an error, that the browser has no plugin for, or that show
    no data where there is some."""
    titles = [panel["title"] for panel in dashboard["panels"] if panel["type"] != "row"]
    end = time.monotonic() + limit_s

    def panel(title: str) -> Any:
        old = page.get_by_label(f"Panel container title {title}", exact=True)
        return page.get_by_test_id(f"data-testid Panel header {title}").or_(old)

    def remaining(titles: list[str], is_wrong: Callable[[Any], bool]) -> list[str]:
        """Those that are still wrong at the limit; each is looked at once at least, however slow the browser is."""
        while (wrong := [title for title in titles if is_wrong(panel(title))]) and time.monotonic() < end:
            page.wait_for_timeout(250)
        return wrong

    missing = remaining(titles, lambda shown: not shown.count())
    wrong = [f"no panel: {title}" for title in missing]
    for title in titles:
        shown = panel(title)
        error = shown.get_by_test_id("data-testid Panel status error").or_(shown.get_by_label("Panel header error"))
        if error.count():
            wrong.append(f"error in: {title}")
        if shown.get_by_text("Panel plugin not found").count():
            wrong.append(f"no plugin for: {title}")
    known = [title for title in titles if title in filled and title not in missing]
    empty = remaining(known, lambda shown: bool(shown.get_by_text("No data").count()))
    return wrong + [f"no data in: {title}" for title in empty]


def type_errors(packages: Path, dashboard: dict[str, Any]) -> list[str]:
    """The dashboard against the types of `@grafana/schema`, by the compiler; both in `packages` by `npm install`."""
    imports = [
        "import type { Dashboard, Panel, RowPanel, GraphFieldConfig } from '@grafana/schema';",
        f"import type {{ Options as Stat }} from './{PANELS}/stat/panelcfg/x/types.gen';",
        f"import type {{ Options as Series }} from './{PANELS}/timeseries/panelcfg/x/types.gen';",
        "type Texts<T> = T extends string ? `${T}` : T extends (infer U)[] ? Texts<U>[]",
        "  : T extends object ? { [K in keyof T]: Texts<T[K]> } : T;",
    ]
    values = [f"export const p{p['id']}: {TYPES[p['type']]} = {json.dumps(p)};" for p in dashboard["panels"]]
    rest = {name: value for name, value in dashboard.items() if name != "panels"}
    values.append(f"export const rest: Texts<Omit<Dashboard, 'panels'>> = {json.dumps(rest)};")
    source = packages / "dashboard.ts"
    source.write_text("\n".join([*imports, *values]))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext"]
    command = ["node", "node_modules/typescript/bin/tsc", *options, source.name]
    found = subprocess.run(command, cwd=packages, capture_output=True, text=True)
    return [line[:300] for line in found.stdout.splitlines() if "error" in line]
