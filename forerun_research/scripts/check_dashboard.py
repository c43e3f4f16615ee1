"""The dashboard in docs/grafana.json against a real Prometheus, and a real Grafana where there is one.

    forerun serve &
    python -m forerun_research.scripts.check_dashboard http://127.0.0.1:8000 --prometheus /usr/bin/prometheus

Scrapes the server for some seconds while it answers, then evaluates every expression of every panel: one that is
refused fails the check, one without data is listed (drafted prompts and tiers need a server that has them).

`--grafana-home FOLDER` (an unpacked release of Grafana) starts one with the dashboard, `--grafana
http://admin:admin@127.0.0.1:3000` imports it into one that runs; both open it in a browser, where every panel has to
appear without an error, and show data where Prometheus has some. `--types FOLDER` checks the JSON against Grafana's
types, after `npm install @grafana/schema typescript` there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from forerun_research.scripts import grafana

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SCRAPE_S = 1
MIN_SCRAPES = 8


def expressions() -> list[tuple[str, str]]:
    """Title and expression of every target, with Grafana's variables filled in."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]
    return [(title, text.replace("$__rate_interval", "5s").replace("$instance", ".*")) for title, text in found]


def answer(server: str) -> None:
    model = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
    words = "one two three four five six seven eight nine ten " * 8
    for number in range(3):
        question = [{"role": "user", "content": f"{words}. Repeat this {number} times."}]
        body = {"model": model, "messages": question, "max_tokens": 24}
        httpx.post(f"{server}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def query(prometheus: str, expression: str) -> dict[str, Any]:
    return dict(httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}, timeout=30).json())


def check(server: str, prometheus: str) -> tuple[bool, set[str]]:
    """Whether all expressions were evaluated, and the titles of panels that have data."""
    for _ in range(MIN_SCRAPES):
        answer(server)
        time.sleep(SCRAPE_S)
    errors, empty, filled = 0, 0, []
    for title, expression in expressions():
        found = query(prometheus, expression)
        if found["status"] != "success":
            errors += 1
            print(f"REFUSED  {title}: {found['error']}\n         {expression}")
        elif not found["data"]["result"]:
            empty += 1
            print(f"no data  {title}: {expression}")
        else:
            filled.append(title)
    print(f"{len(filled)} expressions with data, {empty} without, {errors} refused")
    return not errors and bool(filled), set(filled)


@contextmanager
def scraping(server: str, program: str, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes the server; its URL."""
    jobs = [{"job_name": "forerun", "static_configs": [{"targets": [urlsplit(server).netloc]}]}]
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    url = f"http://127.0.0.1:{grafana.free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([program, *options, f"--web.listen-address={urlsplit(url).netloc}", "--log.level=error"])
    try:
        while process.poll() is None and not grafana.answers(f"{url}/-/ready"):
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def opened(given: argparse.Namespace, prometheus: str, folder: Path, filled: set[str]) -> list[str]:
    """What is wrong in the Grafana that was named."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    if given.grafana_home:
        with grafana.started(given.grafana_home.resolve(), folder, prometheus, dashboard) as url:
            return grafana.open_in_browser(url, dashboard, filled, given.picture)
    wrong = grafana.import_into(given.grafana, prometheus, dashboard)
    return wrong + grafana.open_in_browser(given.grafana, dashboard, filled, given.picture)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--prometheus", required=True, help="the program")
    parser.add_argument("--grafana", help="its URL, with user and password")
    parser.add_argument("--grafana-home", type=Path, help="the folder of a release, with bin/grafana")
    parser.add_argument("--picture", help="a file for what the browser shows of Grafana")
    parser.add_argument("--types", type=Path, help="a folder whose node_modules have @grafana/schema and typescript")
    given = parser.parse_args()
    wrong = []
    if given.types:
        wrong = grafana.type_errors(given.types.resolve(), json.loads(DASHBOARD.read_text(encoding="utf-8")))
        print(f"Grafana's types: {len(wrong)} errors")
    with tempfile.TemporaryDirectory() as name, scraping(given.server, given.prometheus, Path(name)) as prometheus:
        good, filled = check(given.server, prometheus)
        if given.grafana or given.grafana_home:
            found = opened(given, prometheus, Path(name), filled)
            print(f"Grafana: {len(found)} panels or steps are wrong")
            wrong += found
    print("\n".join(wrong))
    return 0 if good and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
