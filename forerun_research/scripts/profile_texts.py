"""Text of six kinds to calibrate a profile on, from what is installed and from Debian packages by name.

    python -m forerun_research.scripts.profile_texts TEXTS [--megabytes 36] [--seed 0]
    forerun calibrate --target TARGET --draft-model DRAFT --text TEXTS --out PROFILE

Writes a folder for each kind, so much of each as SHARES says: code (Python's standard library without the files that
studies measure on, installed packages, headers and scripts), prose, other languages, tables, logs and chats. None of it
is a benchmark's, and none is made by the generators that studies measure with. Needs `apt-get` and `dpkg-deb`; what is
not installed or cannot be had is left out and said so. Knows neither tokens nor models.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from forerun_research.studies.prefill_texts import held_out

# of the bytes: code is most of what this pair is asked about, and each other kind has enough to be learnt
SHARES = {"code": 0.42, "prose": 0.22, "languages": 0.12, "tables": 0.1, "logs": 0.06, "chats": 0.08}
MAX_FILE_BYTES = 60_000  # a longer text is cut: parts of many files, not all of a few
MIN_FILE_BYTES = 2_000
CODE_PACKAGES = ("numpy", "torch", "transformers", "matplotlib", "fastapi", "pip", "openai", "anthropic", "playwright")
CODE_SUFFIXES = (".py", ".h", ".hpp", ".js", ".ts", ".pl", ".pm", ".sh", ".c", ".R")
PROSE = ("anarchism", "jargon-text", "bible-kjv-text", "debian-policy", "developers-reference", "debian-faq")
REFERENCES = tuple(f"debian-reference-{code}" for code in ("de", "es", "fr", "it", "ja", "pt", "zh-cn"))
HANDBOOK, TABLES, GLOSSARY = "debian-handbook", ("unicode-data", "iso-codes", "hwdata", "miscfiles"), "jargon-text"
ENGLISH = "en-US"


def unpacked(names: tuple[str, ...], folder: Path) -> Path:
    """Debian packages of these names, fetched and unpacked side by side; none is installed."""
    for name in names:
        target = folder / name
        if target.exists():
            continue
        done = subprocess.run(["apt-get", "download", "-q", name], cwd=folder, capture_output=True)
        found = sorted(folder.glob(f"{name}_*.deb"))
        if done.returncode or not found:
            print(f"left out: Debian's package {name} cannot be had", file=sys.stderr)
            continue
        subprocess.run(["dpkg-deb", "-x", str(found[-1]), str(target)], check=True)
    return folder


def plain_text(path: Path) -> str:
    """Of a file of text or HTML, compressed or not; empty where it is none."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw, path = gzip.decompress(raw), path.with_suffix("")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    if "\0" in text:
        return ""
    if path.suffix in (".html", ".htm"):
        text = re.sub(r"(?is)<(script|style|head)\b.*?</\1>", " ", text)
        text = re.sub(r"(?i)</?(p|div|h[1-6]|li|tr|br|pre|dd|dt|table|ul|ol)\b[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
    return re.sub(r"\n[ \t]*(\n[ \t]*)+", "\n\n", text).strip()


def code(_: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), *(Path(paths["purelib"]) / name for name in CODE_PACKAGES)]
    roots += [Path("/usr/include"), Path("/usr/share/perl"), Path("/usr/lib/git-core")]
    files = [p for root in roots if root.is_dir() for p in root.rglob("*") if p.suffix in CODE_SUFFIXES]
    mine = [p for p in files if p.is_file() and not held_out(p) and "site-packages/forerun" not in str(p)]
    for path in draw.sample(mine, len(mine)):
        yield path.suffix, plain_text(path)


def documents(names: tuple[str, ...], keep: Callable[[Path], bool]) -> Callable[..., Iterator[tuple[str, str]]]:
    def texts(folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
        unpacked(names, folder)
        files = [p for name in names for p in (folder / name).rglob("*") if p.is_file() and keep(p)]
        files = [p for p in sorted(files) if not re.search(r"(?i)changelog|copyright|/images/|index\b", str(p))]
        for path in draw.sample(files, len(files)):
            yield ".txt", plain_text(path)

    return texts


def is_english(path: Path) -> bool:
    in_book = HANDBOOK in path.parts
    return (not in_book or ENGLISH in path.parts) and path.suffix in ("", ".html", ".txt", ".gz")


def is_foreign(path: Path) -> bool:
    return ENGLISH not in path.parts and path.suffix in (".html", ".gz")


def tables(folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Tables of packages as they are, lists of objects as CSV, and accounts made from a seed."""
    unpacked(TABLES, folder)
    files = [p for name in TABLES for p in sorted((folder / name).rglob("*")) if p.is_file()]
    files = [p for p in files if p.suffix in (".txt", ".ids", ".json", ".gz") and "changelog" not in p.name]
    for path in draw.sample(files, len(files)):
        if path.suffix == ".json":
            for rows in json.loads(path.read_text()).values():
                if not (isinstance(rows, list) and rows and isinstance(rows[0], dict)):
                    continue
                columns = sorted({key for row in rows for key in row if isinstance(row[key], str)})
                lines = [",".join(row.get(key, "") for key in columns) for row in rows]
                yield ".csv", "\n".join([",".join(columns), *lines])
        else:
            yield ".csv", plain_text(path)
        yield ".csv", _accounts(draw)
    while True:
        yield ".csv", _accounts(draw)


def _accounts(draw: random.Random) -> str:
    goods = draw.sample(("cable", "valve", "sensor", "filter", "bracket", "gasket", "hose", "pump", "relay", "fuse"), 6)
    mark, columns = draw.choice((",", "\t", " | ")), ["date", "branch", "item", "units", "price", "total", "status"]
    rows = [mark.join(draw.sample(columns, len(columns)) if draw.random() < 0.3 else columns)]
    for _ in range(draw.randrange(150, 600)):
        units, price = draw.randrange(1, 80), round(draw.uniform(0.5, 400), 2)
        day = f"202{draw.randrange(10)}-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
        branch = f"B{draw.randrange(40):02}"
        row = (day, branch, draw.choice(goods), units, price, round(units * price, 2), draw.choice(("ok", "open", "")))
        rows.append(mark.join(map(str, row)))
    return "\n".join(rows)


def logs(_: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Of a web server, of system services and of programs that log JSON, made from a seed."""
    makers = (_access_line, _system_line, _json_line)
    while True:
        make, clock = draw.choice(makers), draw.randrange(1_500_000_000, 1_790_000_000)
        lines = []
        for _line in range(draw.randrange(200, 700)):
            clock += draw.randrange(30)
            lines.append(make(draw, clock))
        yield ".log", "\n".join(lines)


def _access_line(draw: random.Random, clock: int) -> str:
    path = draw.choice(("/", "/login", "/api/v2/items", "/static/app.js", "/search?q=lamp", "/health", "/cart"))
    at = f"{clock // 86400 % 28 + 1:02}/Mar/2025:{clock // 3600 % 24:02}:{clock // 60 % 60:02}:{clock % 60:02} +0000"
    verb, status = draw.choice(("GET", "GET", "POST", "PUT")), draw.choice((200, 200, 200, 304, 404, 500, 302))
    peer = ".".join(str(draw.randrange(1, 255)) for _ in range(4))
    return f'{peer} - - [{at}] "{verb} {path} HTTP/1.1" {status} {draw.randrange(90, 90000)} "-" "curl/8.1"'


def _system_line(draw: random.Random, clock: int) -> str:
    said = (
        "Started Session {n} of user admin.",
        "pam_unix(cron:session): session opened for user root(uid=0)",
        "DHCPREQUEST for 192.168.1.{n} on eth0",
        "Out of memory: Killed process {n} (worker)",
        "link is up, 1000 Mbps full duplex",
        "segfault at {n} ip 00007f3a error 4 in libc",
    )
    unit = draw.choice(("systemd[1]", "CRON[2211]", "dhclient[431]", "kernel", "sshd[9020]"))
    at = f"Nov {clock // 86400 % 28 + 1:2} {clock // 3600 % 24:02}:{clock // 60 % 60:02}:{clock % 60:02}"
    return f"{at} host{draw.randrange(4)} {unit}: {draw.choice(said).format(n=draw.randrange(2, 250))}"


def _json_line(draw: random.Random, clock: int) -> str:
    record = {
        "ts": clock,
        "level": draw.choice(("info", "debug", "error")),
        "service": draw.choice(("bill", "mail")),
    }
    record |= {"event": draw.choice(("request.done", "job.retry", "cache.miss")), "ms": draw.randrange(1, 4000)}
    return json.dumps(record | {"id": f"{draw.randrange(16**8):08x}"})


def chats(folder: Path, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Questions and answers about terms, from a glossary, as a chat is written down."""
    unpacked((GLOSSARY,), folder)
    found = sorted((folder / GLOSSARY).rglob("jargon.txt.gz"))
    text = plain_text(found[0]) if found else ""
    entries = re.findall(r"(?m)^ {0,3}([\w' -]{2,30}): (.{80,900}?)(?=\n\n)", text, re.S)
    asked = ("What is {t}?", "Explain {t}, please.", "what does '{t}' mean", "I keep reading {t}. Meaning?", "{t}?")
    names = (
        ("user", "assistant"),
        ("User", "Assistant"),
        ("Q", "A"),
        ("Ana", "Support"),
        ("[in]", "[out]"),
    )
    while entries:
        who, turns = draw.choice(names), []
        for term, said in draw.sample(entries, min(len(entries), draw.randrange(8, 40))):
            turns += [f"{who[0]}: {draw.choice(asked).format(t=term.strip())}", f"{who[1]}: {' '.join(said.split())}"]
        yield ".txt", "\n\n".join(turns)


KINDS: dict[str, Callable[[Path, random.Random], Iterator[tuple[str, str]]]] = {
    "code": code,
    "prose": documents((*PROSE, HANDBOOK), is_english),
    "languages": documents((*REFERENCES, HANDBOOK), is_foreign),
    "tables": tables,
    "logs": logs,
    "chats": chats,
}


def write_kind(kind: str, out: Path, most: int, packages: Path, seed: int) -> int:
    """Files of one kind, parts of longer ones, until there are `most` bytes; returns how many bytes there are."""
    draw, written, number = random.Random(f"{seed} {kind}"), 0, 0
    shutil.rmtree(out / kind, ignore_errors=True)
    (out / kind).mkdir(parents=True)
    for suffix, text in KINDS[kind](packages, draw):
        data = text.encode()
        if len(data) > MAX_FILE_BYTES:
            at = draw.randrange(len(data) - MAX_FILE_BYTES)
            data = data[at : at + MAX_FILE_BYTES].decode(errors="ignore").encode()
        if len(data) < MIN_FILE_BYTES:
            continue
        (out / kind / f"{number:04}{suffix}").write_bytes(data)
        written, number = written + len(data), number + 1
        if written >= most:
            break
    return written


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Text of six kinds to calibrate a profile on.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=36.0)
    parser.add_argument("--packages", type=Path, help="where packages are unpacked, or are already")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as scratch:
        packages = args.packages or Path(scratch)
        for kind, share in SHARES.items():
            most = round(1e6 * args.megabytes * share)
            print(f"{kind}: {write_kind(kind, args.out, most, packages, args.seed):,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
