"""FedPAC: bodies are averaged and embeddings aligned; every client gets its own mixture of the output layers."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedsap import losses
from fedsap.message import Message, PerClass, prefixed, table, tensor, under
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Local, Pass, Phase, Round, State, Step, Task, When, option
from fedsap.models.network import Features, Network
from fedsap.prototypes import combine_replies, send


@dataclass(frozen=True)
class FedPAC(FedAvg):
    """First the output layer is trained alone by L_CE, then the body by L_CE + align * L_Proto. The server averages the
    bodies and the prototypes by samples, and gives client i the output layer sum_j a_ij head_j with

    a_i = argmin_a  a^T (diag(v) + D_i) a      a >= 0,  sum_j a_j = 1
    D_i[j, k] = <h_i - h_j, h_i - h_k>         h_j: p_j(c) mu_j(c) for all classes c
    v_j = 1/n_j sum_c ( p_j(c) E|f|^2 - p_j(c)^2 |mu_j(c)|^2 )

    from each client's n_j samples under the received body: mu_j(c) is the mean embedding of class c, E|f|^2 the mean
    squared length of its embeddings, p_j(c) its share of the samples.
    """

    name: ClassVar[str] = "fedpac"
    title: ClassVar[str] = "FedPAC"
    paper: ClassVar[str] = "Xu et al. 2023"
    sends: ClassVar[str] = (
        "up: all weights, two prototypes per own class, a variance; down: mean body, own output layer, bank"
    )

    align: float = option(1.0, "weight of the distance to the prototypes")
    head_epochs: int = option(1, "epochs of the output layer, before those of the body (train.epochs)")
    head_lr: float = option(0.1, "learning rate of the output layer")
    proto_pass: Pass = option("eval", "prototypes: in a pass after training, or running along with the last epoch")

    def degenerate(self) -> str | None:
        if 0 in (self.head_epochs, self.head_lr):
            return "with head_epochs = 0 or head_lr = 0 FedPAC would never train its output layers"
        return None

    def private(self, network: Network) -> frozenset[str]:
        return super().private(network) | set(network.head_names)

    def broadcast(self, server: Message, t: int) -> Message:
        return {k: v for k, v in server.items() if not k.startswith("head/")}

    def address(self, server: Message, t: int, clients: Tensor) -> Message:
        return prefixed("head", {k: v[clients] for k, v in under("head", server).items()})

    def receive(self, state: State, down: Message) -> State:
        state = super().receive(state, down)
        return {**state, "model": state["model"] | under("head", down)}

    def phases(self) -> tuple[Phase, ...]:
        head = Phase(self.fit, part="head", epochs=self.head_epochs, lr=self.head_lr)
        return (head, Phase(self.loss, part="base"))

    def fit(self, step: Step) -> dict[str, Tensor]:
        return {"head": self.cross_entropy(step)}

    def loss(self, step: Step) -> dict[str, Tensor]:
        terms = {"ce": self.cross_entropy(step)}
        if "bank" in step.down:
            terms["align"] = self.align * losses.align(step.out.h, step.y, table(step.down, "bank"))
        return terms

    def represent(self, out: Features) -> dict[str, Tensor]:
        return {"proto": out.h, "mean": out.h, "square": out.h.square().sum(-1, keepdim=True)}

    def passes(self) -> dict[str, When]:
        return {"proto": self.proto_pass, "mean": "before", "square": "before"}

    def reply(self, local: Local) -> Message:
        mean, square = local.means["mean"], local.means["square"].values[..., 0]
        n = local.counts.to(square)
        share = n / n.sum(1, keepdim=True)
        message = super().reply(local) | send(local.means["proto"], local.counts)
        message |= prefixed("head", {k: local.state["model"][k] for k in local.task.network.head_names})
        message["h"] = PerClass(share[..., None] * mean.values, mean.mask)
        message["v"] = (share * square - share.square() * mean.values.square().sum(-1)).sum(1) / n.sum(1)
        return message

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        made = super().combine(task, server, replies, t)
        made["bank"] = combine_replies(replies, self.bank(server))
        shares = mixtures(table(replies, "h").values, tensor(replies, "v"))
        for k, sent in under("head", replies).items():  # who has not answered yet gets the plain mean
            known = tensor(server, f"head/{k}") if server else sent.mean(0).expand(task.clients, *sent.shape[1:])
            made[f"head/{k}"] = known.index_copy(
                0, t.clients.to(known.device), torch.tensordot(shares.to(sent), sent, 1)
            )
        return made

    def bank(self, server: Message) -> PerClass | None:
        return table(server, "bank") if "bank" in server else None


def mixtures(h: Tensor, v: Tensor) -> Tensor:
    """The weights a_ij of `FedPAC`. h: [R, C, d], v: [R] -> [R, R], row i for client i; below 1e-3 they count as 0.

    The programme is one of non-negative least squares: with M = diag(v) + D_i = L L^T, a is the solution of
    min_{b >= 0} |L^T b - L^-1 1|^2 = min b^T M b - 2 sum(b) + const, scaled to the sum 1.

    >>> mixtures(torch.ones(2, 3, 4), torch.tensor([1.0, 3.0]))
    tensor([[0.7500, 0.2500],
            [0.7500, 0.2500]], dtype=torch.float64)
    """
    from scipy.optimize import nnls

    flat = (h - h.mean(0)).double().flatten(1).cpu().numpy()  # distances do not change, and rounding matters less
    gram, variance = flat @ flat.T, v.double().cpu().numpy().clip(min=0)
    rows = []
    for i in range(len(flat)):
        matrix = gram[i, i] - gram[i][:, None] - gram[i] + gram + np.diag(variance)
        ridge = 1e-12 * (np.trace(matrix) or 1.0)
        lower = np.linalg.cholesky(matrix + ridge * np.eye(len(flat)))
        b, _ = nnls(lower.T, np.linalg.solve(lower, np.ones(len(flat))))
        rows.append(np.where(b > 1e-3 * b.sum(), b, 0.0))
    shares = np.stack(rows)
    return torch.from_numpy(shares / shares.sum(1, keepdims=True)).to(v.device)
