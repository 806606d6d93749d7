"""Records and payloads as Flower's messages, and a Grid that they are sent over without waiting for ever."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsap.engines.flower.protocol import Bad, Record

KIND = "query"  # Flower's: any exchange
FORMAT = "safetensors"


def content(record: Record, payloads: Mapping[str, bytes]) -> RecordDict:
    """A message's content: the record, and one array for each payload. Arrays that are the same in several messages are
    stored once by Flower."""
    arrays = {k: Array("uint8", (len(v),), FORMAT, v) for k, v in payloads.items() if v}
    made = RecordDict({"fedsap": ConfigRecord({"record": record.model_dump_json()})})
    if arrays:
        made["payload"] = ArrayRecord(arrays)
    return made


def opened(found: RecordDict, most: int) -> tuple[str, dict[str, bytes]]:
    """The record's text and the payloads of a message's content; raises `Bad` if it cannot be one, or has more than
    `most` bytes."""
    if set(found) - {"fedsap", "payload"}:
        raise Bad(f"a message with {', '.join(sorted(found))[:200]}; takes fedsap and payload")
    text = found.config_records["fedsap"].get("record") if "fedsap" in found.config_records else None
    if not isinstance(text, str):
        raise Bad("a message without a record")
    payloads: dict[str, bytes] = {}
    for name, array in dict(found.array_records.get("payload", {})).items():
        if array.stype != FORMAT:
            raise Bad(f"an array as {array.stype[:40]!r}; takes {FORMAT}")
        payloads[name] = array.data
    size = sum(map(len, payloads.values()))
    if size > most:
        raise Bad(f"{size:,} bytes; takes {most:,} at most")
    return text, payloads


@dataclass
class Post:
    """What is under way over a Grid."""

    grid: Grid
    lifetime: float  # seconds after which Flower may forget a message
    waiting: dict[str, int] = field(default_factory=dict)  # nodes by the message that is to be answered

    def send(self, node: int, record: Record, payloads: Mapping[str, bytes]) -> str | None:
        """The message's id, or None if Flower did not take it."""
        message = Message(content(record, payloads), dst_node_id=node, message_type=KIND, ttl=self.lifetime)
        found = [m for m in self.grid.push_messages([message]) if m]
        if not found:
            return None
        self.waiting[found[0]] = node
        return found[0]

    def receive(self, until: float, over: Callable[[], bool]) -> Iterator[tuple[str, Message]]:
        """Answers as they come, by the message they answer, until `over` says so or the clock says `until`."""
        pause = 0.02
        while not over():
            came = list(self.grid.pull_messages(list(self.waiting))) if self.waiting else []
            for message in came:
                asked = message.metadata.reply_to_message_id
                if self.waiting.pop(asked, None) is not None:
                    yield asked, message
            if time.monotonic() > until:
                return
            pause = 0.02 if came else min(2 * pause, 0.5)
            if not over():
                time.sleep(pause)

    def forget(self, message: str) -> None:
        """Whatever still comes as an answer to it is too late."""
        self.waiting.pop(message, None)


def trouble(message: Message) -> str:
    """Flower's reason for an answer that is an error."""
    return f"{message.error.reason or 'no reason given'} (Flower's code {message.error.code})"[:2000]
