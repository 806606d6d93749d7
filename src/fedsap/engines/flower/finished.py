"""What a node has at a run's end: each client's model in a file of its own, ready for `fedsap predict`."""

from collections.abc import Mapping
from pathlib import Path

from fedsap.config import Config
from fedsap.data import pixels
from fedsap.engines.simulate import Simulation
from fedsap.message import Message, PerClass, expand
from fedsap.saved import judged, save_model

MODEL = "model.safetensors"


def save_models(
    folder: Path,
    clients: Simulation,
    config: Config,
    classes: tuple[str, ...],
    down: Message,
    own: Mapping[int, Message],
    bank: PerClass | None,
    done: int,
) -> list[Path]:
    """Writes the model of each client, as the evaluation after round `done` sees it, below its folder of the store.

    down: what was broadcast. own: what each client was told for itself (no client axis). bank: [C, d].
    """
    stack, written = clients.stack, []
    for row, key in enumerate(stack.keys):
        state = {name: {k: v[row : row + 1] for k, v in some.items()} for name, some in clients.state.items()}
        told = expand(down | own[key.client], 1)
        path = folder / f"client-{key.client:04d}" / MODEL
        path.parent.mkdir(parents=True, exist_ok=True)
        model = judged(
            stack.method,
            stack.network,
            stack.method.receive(state, told),
            bank=bank,
            classes=classes,
            owned=tuple(stack.owned[row].nonzero().flatten().tolist()),
            pixels=pixels(config.data.name, config.data.size, config.data.channels),
            keys=config.model,
            about={"data": config.data.name, "seed": key.seed, "client": key.client, "round": done},
        )
        save_model(path, model)
        written.append(path)
    return written
