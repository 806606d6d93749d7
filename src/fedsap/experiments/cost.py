"""How long runs take, before they start: figures of docs/speed.md scaled to their numbers of steps and images."""

from collections.abc import Sequence

from fedsap.config import Config
from fedsap.data import DATASETS

# Seconds. On an H200: 60 clients at once in float32 (ResNet-18 at 32x32), 20 for the CNN. On two CPU cores: 20 clients.
STEP = {  # of one client
    ("cuda", "resnet18"): 4.59e-3 / 60, ("cuda", "cnn"): 2.23e-3 / 20, ("cuda", "small"): 1e-5,
    ("cpu", "resnet18"): 1.15 / 20, ("cpu", "cnn"): 0.53 / 20, ("cpu", "small"): 59e-3 / 20,
}  # fmt: skip
IMAGE = {"cuda": 2e-6, "cpu": 0.05}  # in evaluation and prototypes; on a CPU: this share of a step
ONCE = {"cuda": 8.0, "cpu": 1.0}  # a stack: recording, compiling, writing
SIDE = {"digits": 8, "cifar10": 32, "cifar100": 32, "femnist": 128}
MEASURED = {"resnet18": 32, "cnn": 128, "small": 32}  # sides of the images that were timed
TESTS = {"digits": 36, "cifar10": 1000, "cifar100": 100, "femnist": 300}  # test images of a class
FULL = 60  # clients on a GPU below which a step takes no less time


def seconds(configs: Sequence[Config], device: str) -> float:
    """About how long runs take that differ in their seed alone and go together.

    Cost is taken to grow with the number of pixels; other sides than those that were timed are a guess.
    """
    c = configs[0]
    assert c.data.name in DATASETS
    side = c.model.resolution or SIDE.get(c.data.name, c.data.size)
    network = c.model.name if c.model.name in MEASURED else "resnet18"
    pixels = (side / MEASURED[network]) ** 2 * (4 / (c.model.stem_stride or 4)) ** 2
    clients = c.partition.clients * len(configs)
    samples = c.partition.ways * c.partition.shots
    at_once = max(clients, FULL) if device == "cuda" else clients
    batches = c.train.epochs * max(1, samples // c.train.batch)
    steps = c.rounds * batches + 2 * len(c.pool_rounds) * batches  # two more views in rounds with a pool
    step = STEP[device, network] * pixels
    image = IMAGE["cuda"] * pixels if device == "cuda" else IMAGE["cpu"] * step
    tests = c.partition.ways * (c.eval.per_class or TESTS.get(c.data.name, 100))
    looked_at = clients * (tests * -(-c.rounds // c.eval.every) + samples * c.rounds)
    return ONCE[device] + step * steps * at_once + image * looked_at


def said(value: float) -> str:
    """A duration for people.

    >>> said(42), said(600), said(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if value < 100:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"
