"""What Flower costs: the same federation in process and on its simulation, and the parts of a deployment's round.

    python benchmarks/flower.py [--rounds 20] [--clients 20] [--out FILE.json]

Everything runs on 127.0.0.1 and is ended. Memory is the proportional set size (PSS) of all processes of a run together,
sampled every half second; a round's time is the server's, from one row of metrics.jsonl to the next.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fedsap.deploy.start import environment

TOOLS = Path(sys.executable).parent
ENVIRONMENT = environment(os.environ, TOOLS) | {"OMP_NUM_THREADS": "1"}


def below(pid: int) -> list[int]:
    """A process and all that it has started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            parents.setdefault(int(words[1]), []).append(int(path.parent.name))
    found, todo = [pid], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def memory(pids: list[int]) -> float:
    """PSS in MB."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            match = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
            total += int(match[1]) if match else 0
    return total / 1024


def watched(command: list[str], more: set[int] = frozenset()) -> dict:
    """Runs it; seconds, and the most memory it had together with what else is named."""
    began = time.monotonic()
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reader.start()
    seen, most, count = {process.pid}, 0.0, 0
    while process.poll() is None:
        seen |= set(below(process.pid)) | {p for one in more for p in below(one)}
        for pid in list(seen):  # Flower's processes leave the tree of those that start them
            seen |= set(below(pid)) if Path(f"/proc/{pid}").exists() else set()
        alive = [p for p in seen if Path(f"/proc/{p}").exists()]
        most, count = max(most, memory(alive)), max(count, len(alive))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit("".join(said))
    return {"seconds": round(time.monotonic() - began, 2), "memory_mb": round(most), "processes": count}


def rounds(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def per_round(folder: Path) -> dict:
    """Without the first, in which things are loaded."""
    times = [row["seconds"] for row in rounds(folder)[1:]]
    return {"median_s": round(statistics.median(times), 4), "mean_s": round(statistics.fmean(times), 4)}


def compare(scratch: Path, clients: int, count: int, nodes: int) -> dict:
    """In process and on Flower's simulation, one after the other."""
    words = ["--set", f"train.rounds={count}", "--set", f"partition.clients={clients}", "--set", f"eval.every={count}",
             "--seed", "5", "--set", "train.checkpoint=0"]  # fmt: skip
    found = {}
    for name, more in (("process", []), ("simulation", ["--engine", "flower", "--set", f"flower.nodes={nodes}"])):
        out = scratch / name
        found[name] = watched([str(TOOLS / "fedsap"), "run", "--out", str(out), *words, *more])
        found[name] |= per_round(out / "fedsap-5")
        found[name]["result"] = json.loads((out / "fedsap-5" / "result.json").read_text())["accuracy"]["proto"]["mean"]
    found["ratio_of_rounds"] = round(found["simulation"]["mean_s"] / found["process"]["mean_s"], 1)
    found["ratio_of_runs"] = round(found["simulation"]["seconds"] / found["process"]["seconds"], 1)
    return found


def port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def deploy(scratch: Path, count: int) -> dict:
    """Rounds of two SuperNodes, and when in a round each of them did what, from its own log."""
    link, surroundings = port(), ENVIRONMENT | {"FLWR_HOME": str(scratch / "home")}
    stamps: dict[str, list[tuple[float, str]]] = {"n0": [], "n1": []}
    started = []

    def start(command: list[str], stamped: list[tuple[float, str]] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)

        def listen() -> None:
            for line in process.stdout:
                if stamped is not None:
                    stamped.append((time.time(), re.sub(r"\x1b\[\d+m", "", line).strip()))

        threading.Thread(target=listen, daemon=True).start()
        return process

    try:
        start(["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(link)])
        time.sleep(6)
        for i in range(2):
            config = f'name="n{i}" partition-id={i} num-partitions=2 store="{scratch}/store"'
            start(["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}", "--port", str(port()),
                   "--node-config", config], stamps[f"n{i}"])  # fmt: skip
        out = scratch / "deployment"
        found = watched(
            [str(TOOLS / "fedsap"), "run", "--engine", "flower", "--superlink", f"127.0.0.1:{link}", "--out", str(out),
             "--seed", "5", "--set", f"train.rounds={count}", "--set", "partition.clients=2", "--set", "eval.every=99"],
            {p.pid for p in started},
        )  # fmt: skip
    finally:
        for process in started[::-1]:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
    rows = rounds(out / "fedsap-5")
    return found | per_round(out / "fedsap-5") | {"parts_of_a_round_s": parts(stamps, rows)}


def parts(stamps: dict[str, list[tuple[float, str]]], rows: list[dict]) -> dict:
    """Medians over nodes and rounds. The first message of a node is who it is; the round's work is what it says."""
    receiving, starting, working, sending = [], [], [], []
    for name, lines in stamps.items():
        events = [
            (t, word)
            for t, line in lines
            for word in ("Receiving:", "Start `flwr-clientapp`", "Sending:", "Sent ")
            if word in line
        ]
        messages, one = [], {}
        for t, word in events:
            if word == "Receiving:":
                one = {}
                messages.append(one)
            one[word] = t
        for message, row in zip(messages[1:], rows[1:], strict=False):
            if len(message) == 4:
                receiving.append(message["Start `flwr-clientapp`"] - message["Receiving:"])
                work = row["work"].get(name, 0.0)
                working.append(work)
                starting.append(message["Sending:"] - message["Start `flwr-clientapp`"] - work)
                sending.append(message["Sent "] - message["Sending:"])
    names = ("fetching the message", "a new process: imports and hand-over", "the node's work", "sending the answer")
    found = {
        k: round(statistics.median(v), 2)
        for k, v in zip(names, (receiving, starting, working, sending), strict=True)
        if v
    }
    whole = statistics.median(row["seconds"] for row in rows[1:])
    return found | {
        "waiting for polls, and the server": round(whole - sum(found.values()), 2),
        "round": round(whole, 2),
    }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rounds", type=int, default=20)
    ask.add_argument("--clients", type=int, default=20)
    ask.add_argument("--nodes", type=int, default=20)
    ask.add_argument("--deployed", type=int, default=8, help="rounds of the deployment")
    ask.add_argument("--out", type=Path)
    given = ask.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} before",
            "command": " ".join(sys.argv),
            "simulation": compare(Path(folder), given.clients, given.rounds, given.nodes),
            "deployment": deploy(Path(folder), given.deployed),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
