"""The Flower app of a node."""

from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsap.config import merged, read
from fedsap.deploy.start import data_folder
from fedsap.engines.flower.node import Site, answer, read_own
from fedsap.engines.flower.post import content, opened
from fedsap.engines.flower.protocol import Bad, Hello, Job, Refusal
from fedsap.engines.flower.protocol import read as read_record
from fedsap.errors import UserError

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Does what the server asks; what goes wrong is the answer."""
    try:
        text, payloads = opened(message.content, most=2**40)
        site = site_of(context)
        said, tensors = answer(site, read_record(text, Hello, Job), payloads)
        return Message(content(said, tensors), reply_to=message)
    except (Bad, UserError) as error:
        return Message(content(Refusal(why=str(error)[:2000] or "no reason"), {}), reply_to=message)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:2000]
        return Message(content(Refusal(why=why), {}), reply_to=message)


def site_of(context: Context) -> Site:
    """The node as its configuration says."""
    node = {k: str(v) for k, v in context.node_config.items()}
    part, parts = node.get("partition-id"), node.get("num-partitions")
    simulated = part is not None and "name" not in node
    own = read_own(read(Path(node["config"])), node["config"]) if node.get("config") else {}
    if node.get("data"):
        own = merged({"data": {"name": "folder"}}, own, {"data": {"root": node["data"]}})
    threads = node.get("threads", "1" if simulated else "")
    if threads:
        torch.set_num_threads(int(threads))
    store = node.get("store") or str(context.run_config.get("store", "")) or str(data_folder() / "nodes")
    name = node.get("name") or (f"part {part} of {parts}" if part is not None else "")
    if not name:
        raise UserError("this node has no name; start it with one, as fedsap node NAME does")
    if part is None:
        return Site(name, Path(store), own)
    return Site(name, Path(store), own, int(part), int(parts or 1))
