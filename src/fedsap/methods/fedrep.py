"""FedRep: the body of the network is averaged, its output layer stays with the client."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Phase, Step, option
from fedsap.models.network import Network


@dataclass(frozen=True)
class FedRep(FedAvg):
    """In every round a client first fits its own output layer to the received body, which stands still; then it trains
    the body, with the output layer standing still. Both minimise L_CE. The server averages the bodies."""

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    paper: ClassVar[str] = "Collins et al. 2021"
    sends: ClassVar[str] = "up: all weights but the output layer's; down: their mean"

    head_epochs: int = option(10, "epochs of the output layer, before those of the body (train.epochs)")

    def degenerate(self) -> str | None:
        return "with head_epochs = 0 FedRep would never train its output layers" if self.head_epochs == 0 else None

    def private(self, network: Network) -> frozenset[str]:
        return super().private(network) | set(network.head_names)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.fit, part="head", epochs=self.head_epochs), Phase(self.loss, part="base"))

    def fit(self, step: Step) -> dict[str, Tensor]:
        return {"head": self.cross_entropy(step)}
