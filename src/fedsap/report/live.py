"""The page while runs are going: a small server that reads a folder again when its files have changed.

It answers two addresses and never opens a file that a request names, so that there is no way out of the folder. It
binds 127.0.0.1 unless asked otherwise, and answers only requests for a host it was started for: a page from elsewhere
whose name is made to point here (DNS rebinding) gets nothing.
"""

import ipaddress
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedsap.errors import UserError
from fedsap.report import html, tables
from fedsap.report.content import content
from fedsap.report.layout import Layout, Place, chosen, layouts, shortened
from fedsap.report.read import FILES, RunData, attempt, distinct, find
from fedsap.report.study import arrange
from fedsap.runs import Row

MOST = 500  # runs that are shown, the latest changed ones
Stamp = tuple[tuple[str, int, int], ...]
Plan = tuple[Stamp, tuple[int, ...]]  # the snapshots that are there, and the rounds that are laid out
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def stamp(folder: Path) -> Stamp:
    """What tells whether a run's folder has changed: name, time and size of its files."""
    places = [folder / name for name in FILES if name != "checkpoint.safetensors"]
    if (folder / "snapshots").is_dir():
        places += sorted((folder / "snapshots").glob("round-*.npz"))
    found = []
    for path in places:
        try:
            about = path.stat()
        except OSError:
            continue
        found.append((path.name, about.st_mtime_ns, about.st_size))
    return tuple(found)


class Watch:
    """The runs below a folder, read again when they change; t-SNE is made aside, and shown when it is there."""

    def __init__(self, root: Path, most: int = MOST) -> None:
        if not root.is_dir():
            raise UserError(f"{root}: no such folder; takes one that fedsap run writes to")
        self.root, self._most = root.resolve(), most
        self._lock = threading.Lock()
        self._runs: dict[Path, tuple[Stamp, RunData | None, list[str]]] = {}
        self._planes: dict[Path, tuple[Plan, list[Layout]]] = {}
        self._wanted: list[tuple[Place, Plan]] = []
        self._work = threading.Condition()
        self._stopping = False
        self._seen: object = None
        self._data: Row = {}
        self._began = time.time_ns()
        self._revision = 0
        self._worker = threading.Thread(target=self._lay_out, daemon=True)
        self._worker.start()

    def close(self) -> None:
        """Ends the thread that lays out embeddings, once it is through with what it has in hand."""
        with self._work:
            self._stopping = True
            self._work.notify()
        self._worker.join()

    def data(self) -> Row:
        """The page's data as of now; `revision` changes with it."""
        with self._lock:
            notes: list[str] = []
            runs = self._read(notes)
            with self._work:
                planes = {folder: found for folder, (_, found) in self._planes.items()}
            seen = (
                [(run.folder, self._runs[run.folder][0]) for run in runs],
                sorted(notes),
                {k: len(v) for k, v in planes.items()},
            )
            if seen != self._seen:
                self._revision += 1
                self._data = self._build(runs, planes, notes)
                self._seen = seen
            return self._data

    def _read(self, notes: list[str]) -> list[RunData]:
        folders = [f for f in find([self.root], notes.append) if f.resolve().is_relative_to(self.root)]
        stamps = {folder: stamp(folder) for folder in folders}
        latest = sorted(folders, key=lambda f: max((when for _, when, _ in stamps[f]), default=0), reverse=True)[
            : self._most
        ]
        if len(folders) > self._most:
            notes.append(f"{len(folders)} runs are there; the {self._most} that changed last are shown")
        kept = set(latest)
        self._runs = {folder: was for folder, was in self._runs.items() if folder in kept}
        for folder in latest:
            if folder not in self._runs or self._runs[folder][0] != stamps[folder]:
                lines: list[str] = []
                self._runs[folder] = (stamps[folder], attempt(folder, lines.append), lines)
        runs = []
        for folder in (f for f in folders if f in kept):
            _, run, lines = self._runs[folder]
            notes += lines
            if run is not None:
                runs.append(run)
        return distinct(runs, notes.append)

    def _build(self, runs: list[RunData], planes: Mapping[Path, list[Layout]], notes: list[str]) -> Row:
        study = arrange(runs)
        places = chosen(study)
        self._ask(places)
        shown = {(p.setting, p.label): planes[p.run.folder] for p in places if p.run.folder in planes}
        notes += [said] if (said := shortened(study, places)) else []
        local = [note.replace(f"{self.root}/", "").replace(str(self.root), self.root.name) for note in notes]
        return {
            **content(study, shown, local),
            "live": True,
            "revision": f"{self._began}-{self._revision}",
            "tables": html.tables_html(tables.tables(study, unfinished=True)),
        }

    def _ask(self, places: list[Place]) -> None:
        with self._work:
            kept = {place.run.folder for place in places}
            self._planes = {folder: plane for folder, plane in self._planes.items() if folder in kept}
            plans = [(place, (_snapshots(self._runs[place.run.folder][0]), place.rounds)) for place in places]
            self._wanted = [(p, plan) for p, plan in plans if self._planes.get(p.run.folder, (None,))[0] != plan]
            self._work.notify()

    def _lay_out(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._wanted or self._stopping)
                if self._stopping:
                    return
                place, plan = self._wanted.pop(0)
                if self._planes.get(place.run.folder, (None,))[0] == plan:
                    continue  # asked for again while it was being made
            found = layouts(place, lambda _: None)
            with self._work:
                self._planes[place.run.folder] = (plan, found)


def _snapshots(mark: Stamp) -> Stamp:
    return tuple(one for one in mark if one[0].startswith("round-"))


def page(data: Mapping[str, Any]) -> str:
    """The live page with the data of now."""
    return html.page({k: v for k, v in data.items() if k != "tables"}, data["tables"], "Runs")


def allowed(host: str, bound: str) -> bool:
    """Is this Host header one that the server was started for?

    Addresses in numbers cannot be rebound. Names are: localhost, and the one given with --host.

    >>> allowed("127.0.0.1:8000", "127.0.0.1"), allowed("localhost", "127.0.0.1"), allowed("evil.example", "127.0.0.1")
    (True, True, False)
    >>> allowed("192.168.0.7:8000", "0.0.0.0"), allowed("192.168.0.7:8000", "127.0.0.1")
    (True, False)
    """
    name = (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    if name in ("localhost", bound.lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not _loopback(bound)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server(ThreadingHTTPServer):
    """Answers /, /data.json and nothing else, to readers only."""

    daemon_threads = True

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.watch, self.host = Watch(root), host
        try:
            super().__init__((host, port), Answer)
        except OSError as error:
            self.watch.close()
            raise UserError(f"--host {host} --port {port}: {error.strerror or error}; choose others") from None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.server_address[1]}/"

    def server_close(self) -> None:
        super().server_close()
        self.watch.close()


class Answer(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version = "fedsap"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        try:
            host = allowed(self.headers.get("Host", ""), self.server.host)
        except ValueError:
            host = False
        asked = urlsplit(self.path)
        if not host:
            self._say(403, "text/plain", "This server answers under its own address only.\n")
        elif asked.path == "/":
            self._say(200, "text/html", page(self.server.watch.data()))
        elif asked.path == "/data.json":
            data = self.server.watch.data()
            if parse_qs(asked.query).get("since") == [data["revision"]]:
                self._say(204, "application/json", "")
            else:
                self._say(200, "application/json", json.dumps(data, allow_nan=False))
        else:
            self._say(404, "text/plain", "Not here.\n")

    do_HEAD = do_GET

    def _say(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        try:
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            return  # the reader has gone

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not written to the terminal."""


def serve(root: Path, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serves until it is interrupted."""
    with Server(root, host, port) as server:
        say(f"{server.url}  (Ctrl-C ends it)")
        if not _loopback(host):
            say("open to other machines; it shows what is in the folder to whoever asks")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("ended")
