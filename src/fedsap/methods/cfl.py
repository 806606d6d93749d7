"""CFL: FedAvg within clusters of clients, which are split where their updates no longer point the same way."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedsap.message import Message, select, tensor, under
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.method import Round, Task, option


@dataclass(frozen=True)
class CFL(FedAvg):
    """All clients begin in one cluster; a cluster's model is the mean of its members' weights. With the updates
    dW_q = w_q - w of a round, a cluster of more than two clients falls in two when

    |mean_q dW_q| < eps1    and    max_q |dW_q| > eps2

    which two is found by merging clients by cos(dW_q, dW_r), smallest first to count (complete linkage).
    """

    name: ClassVar[str] = "cfl"
    title: ClassVar[str] = "CFL"
    paper: ClassVar[str] = "Sattler et al. 2020"
    sends: ClassVar[str] = "up: all weights; down: the mean of the client's cluster"

    weighted: bool = option(False, "weigh clients by their number of samples, or all alike")
    after: int = option(20, "last round without a split")
    eps1: float | None = option(None, "length of the mean update below which a cluster splits; unset: max / 4")
    eps2: float = option(0.0, "length that the longest update must have for it")

    def degenerate(self) -> str | None:
        return "with eps1 = 0 no cluster is ever split: that is FedAvg" if self.eps1 == 0 else None

    def broadcast(self, server: Message, t: int) -> Message:
        return {}

    def address(self, server: Message, t: int, clients: Tensor) -> Message:
        if not server:
            return {}
        mine = tensor(server, "cluster").cpu()[clients]
        return {f"model/{k}": v[mine.to(v.device)] for k, v in under("model", server).items()}

    def combine(self, task: Task, server: Message, replies: Message, t: Round) -> Message:
        cluster = tensor(server, "cluster").cpu() if server else torch.zeros(task.clients, dtype=torch.long)
        if server and t.number > self.after:
            products = _products(replies, self.address(server, t.number, t.clients), task)
            for c in range(int(cluster.max()) + 1):
                here, members = (cluster[t.clients] == c).nonzero()[:, 0], (cluster == c).nonzero()[:, 0]
                if len(here) == len(members) > 2:  # the updates of all of them are known
                    apart = self.apart(products[here][:, here])
                    cluster = cluster.index_put((members[apart],), cluster.max() + 1) if apart.any() else cluster
        models = []
        for c in range(int(cluster.max()) + 1):
            here = (cluster[t.clients] == c).nonzero()[:, 0]
            if len(here):
                some = replace(t, clients=t.clients[here])
                models.append(super().combine(task, {}, select(replies, here), some))
            else:
                models.append({f"model/{k}": v[c] for k, v in under("model", server).items()})
        stacked: Message = {k: torch.stack([tensor(m, k) for m in models]) for k in models[0]}
        return stacked | {"cluster": cluster}

    def apart(self, products: Tensor) -> Tensor:
        """Who of a cluster leaves it, bool [R], from the inner products of their updates, [R, R]."""
        lengths = products.diagonal().sqrt()
        low, high = products.mean().clamp(min=0).sqrt(), lengths.max()
        if not (low < (high / 4 if self.eps1 is None else self.eps1) and high > self.eps2):
            return torch.zeros(len(products), dtype=torch.bool)
        from sklearn.cluster import AgglomerativeClustering  # takes a second, and only here

        cosines = products / (lengths[:, None] * lengths).clamp(min=1e-12)
        halves = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete").fit(-cosines.numpy())
        return torch.from_numpy(halves.labels_ == 1)


def _products(replies: Message, sent: Message, task: Task) -> Tensor:
    """<dW_q, dW_r> of the clients that replied, over all trained weights, [R, R]."""
    model, before = under("model", replies), under("model", sent)
    updates = ((model[k] - before[k]).flatten(1).double() for k in model if k not in task.network.buffers)
    return sum((u @ u.mT for u in updates), torch.zeros(())).cpu()
