"""The dashboard in docs/grafana.json against a real Prometheus, and a real Grafana where there is one.

    forerun serve &
    python -m forerun_research.scripts.check_dashboard http://127.0.0.1:8000 --prometheus /usr/bin/prometheus

Scrapes the server for some seconds while it answers, then evaluates every expression of every panel: one that is
refused fails the check, one without data is listed (drafted prompts and tiers need a server that has them). With
`--grafana http://admin:admin@127.0.0.1:3000` the dashboard is imported there, too, and read back.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

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


def check(server: str, prometheus: str) -> bool:
    """Whether all expressions were evaluated."""
    for _ in range(MIN_SCRAPES):
        answer(server)
        time.sleep(SCRAPE_S)
    errors, empty, filled = 0, 0, 0
    for title, expression in expressions():
        found = query(prometheus, expression)
        if found["status"] != "success":
            errors += 1
            print(f"REFUSED  {title}: {found['error']}\n         {expression}")
        elif not found["data"]["result"]:
            empty += 1
            print(f"no data  {title}: {expression}")
        else:
            filled += 1
    print(f"{filled} expressions with data, {empty} without, {errors} refused")
    return not errors and filled > 0


def import_into(grafana: str) -> bool:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    response = httpx.post(f"{grafana}/api/dashboards/db", json={"dashboard": dashboard, "overwrite": True}, timeout=30)
    back = httpx.get(f"{grafana}/api/dashboards/uid/{dashboard['uid']}", timeout=30)
    same = back.status_code == 200 and len(back.json()["dashboard"]["panels"]) == len(dashboard["panels"])
    print(f"Grafana: import {response.status_code}, read {back.status_code}, panels {'all' if same else 'missing'}")
    return response.status_code == 200 and same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server")
    parser.add_argument("--prometheus", required=True, help="the program")
    parser.add_argument("--grafana", help="its URL, with user and password")
    given = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        jobs = [{"job_name": "forerun", "static_configs": [{"targets": [urlsplit(given.server).netloc]}]}]
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
        Path(folder, "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command = [given.prometheus, *options, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        process = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}"
            while process.poll() is None:
                try:
                    httpx.get(f"{url}/-/ready", timeout=5).raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.1)
            good = check(given.server, url)
        finally:
            process.terminate()
            process.wait(20)
    if given.grafana:
        good = import_into(given.grafana) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
