"""Two nodes on this machine, one with the paper's CNN, one with ResNet-18, with other classes, through a SuperLink.

    python examples/heterogeneous/run.py [FOLDER]

Everything listens on 127.0.0.1 and ends with the script. On three hosts the same commands go to three hosts, with
certificates and keys: docs/deployment.md.
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from fedsap.data import load

HERE = Path(__file__).parent
FEDSAP = Path(sys.executable).parent / "fedsap"
NODES = {"clinic": ("012345", []), "hospital": ("456789", ["--config", str(HERE / "strong.toml")])}


def images(folder: Path, classes: str, start: int, count: int = 40) -> None:
    """Some of scikit-learn's digits as a folder of images."""
    digits = load("digits")
    for name, split, some in (("train", digits.train, slice(start, start + count)), ("test", digits.test, slice(25))):
        for c in classes:
            place = folder / name / f"digit-{c}"
            place.mkdir(parents=True, exist_ok=True)
            for i, pixels in enumerate(split.images[split.labels == int(c)][some]):
                Image.fromarray(pixels[:, :, 0]).save(place / f"{i}.png")


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main(folder: Path) -> int:
    link = port()
    started = [subprocess.Popen([FEDSAP, "server", "--insecure", "--port", str(link)])]
    try:
        for number, (name, (classes, more)) in enumerate(NODES.items()):
            images(folder / name, classes, start=60 * number)
            node = [
                FEDSAP,
                "node",
                name,
                "--insecure",
                "--superlink",
                f"127.0.0.1:{link}",
                "--client-port",
                str(port()),
            ]
            started.append(
                subprocess.Popen([*node, "--data", folder / name, "--store", folder / f"{name}-store", *more])
            )
            time.sleep(1)
        run = [FEDSAP, "run", HERE / "federation.toml", "--engine", "flower", "--superlink", f"127.0.0.1:{link}"]
        return subprocess.run([*run, "--out", folder / "out"], check=False).returncode
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/heterogeneous").absolute()))
