"""Clients' state on a node's own disk: one file for each run, client and round, two of them kept.

A node is asked for the state after a certain round, the one that the server knows of: after a reply that never
arrived, or a server that was taken up from its checkpoint, that is not the newest. Both are there.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsap.errors import UserError


@dataclass(frozen=True)
class Store:
    """The states of one run's clients, in `folder`."""

    folder: Path

    def rounds(self, client: int) -> list[int]:
        """The rounds whose state is there, ascending."""
        found = (re.fullmatch(r"round-(\d{6})\.safetensors", p.name) for p in self._of(client).glob("round-*"))
        return sorted(int(m[1]) for m in found if m)

    def save(self, client: int, t: int, state: Mapping[str, Tensor], since: int) -> None:
        """Whoever reads finds the whole state of round t or none. The one that it was made from, of round `since`,
        stays: until the server speaks of t it is the one that counts, however many rounds are lost. Others go."""
        folder = self._of(client)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".round-{t:06d}.{os.getpid()}"
        try:
            save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(self._file(client, t))
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise UserError(f"{folder}: the state of round {t} cannot be written ({error}); make room") from None
        for other in set(self.rounds(client)) - {since, t}:
            self._file(client, other).unlink(missing_ok=True)
        for scrap in folder.glob(".round-*"):
            with contextlib.suppress(OSError):
                scrap.unlink()

    def load(self, client: int, t: int) -> dict[str, Tensor]:
        """The state after round t; UserError says what there is instead."""
        path = self._file(client, t)
        if not path.exists():
            there = ", ".join(map(str, self.rounds(client)))
            raise UserError(f"its state of round {t} is not here; {'there is ' + there if there else 'there is none'}")
        try:
            with safe_open(path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dictionary)
        except (SafetensorError, OSError) as error:
            raise UserError(f"its state of round {t} is damaged ({error})") from None

    def _of(self, client: int) -> Path:
        return self.folder / f"client-{client:04d}"

    def _file(self, client: int, t: int) -> Path:
        return self._of(client) / f"round-{t:06d}.safetensors"
