"""Local training: every client alone. The baseline that a federation has to beat."""

from dataclasses import dataclass
from typing import ClassVar

from fedsap.methods.method import Method


@dataclass(frozen=True)
class LocalOnly(Method):
    """min_theta L_CE on the client's own data; nothing is exchanged."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    paper: ClassVar[str] = "baseline"
    sends: ClassVar[str] = "nothing"
    means_only: ClassVar[bool] = True
