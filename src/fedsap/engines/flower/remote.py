"""The engine over Flower: a federation's clients are on nodes, and a node is asked once in a round.

What an evaluation after round t needs is what round t + 1 begins with, so that it comes with that round's answer. The
server knows after which round each client's state is to be taken up: an answer that it did not get, or did not accept,
never happened.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Message as Mail
from torch import Tensor

from fedsap.config import Config
from fedsap.engines.flower.gate import Gate
from fedsap.engines.flower.post import opened, trouble
from fedsap.engines.flower.protocol import (
    Answer,
    Bad,
    Job,
    Refusal,
    numbers_of,
    packed_for,
    read,
    tensors_of,
    written,
)
from fedsap.engines.flower.roster import Member, Roster
from fedsap.engines.flower.trust import check_record, checked, largest
from fedsap.evaluate import MEASURES, Scores
from fedsap.message import Message, PerClass, expand, joined, select
from fedsap.methods.method import Method, Task
from fedsap.runs import Stopped
from fedsap.training.rounds import Ask, Judge, Replies

Result = tuple[Answer, dict[str, Tensor]]


@dataclass
class Remote:
    """`training.rounds.Clients` of one federation, on the nodes of a roster."""

    gate: Gate
    method: Method
    task: Task
    config: Config
    run: str
    expected: Message  # what one client's reply looks like
    held: Sequence[Sequence[int]] | None = None  # classes of each client, where the server knows them
    hash: str = ""  # of the partition, if it does
    plugin: str = ""
    since: Tensor = field(init=False)  # [N] the round after which each client's state counts; 0: the beginning
    spent: dict[str, float] = field(default_factory=dict)
    owed: tuple[int, Ask, Judge] | None = None  # an evaluation that comes with the next round

    def __post_init__(self) -> None:
        self.since = torch.zeros(self.task.clients, dtype=torch.long)

    @property
    def roster(self) -> Roster:
        return self.gate.roster

    def kept(self, seed: int) -> dict[str, Tensor]:  # noqa: ARG002  (there is one)
        return {"since": self.since}

    def take_back(self, seed: int, name: str, value: Tensor) -> None:  # noqa: ARG002
        if name != "since" or value.shape != self.since.shape or value.dtype != self.since.dtype:
            raise ValueError(f"{name} is not what a server of Flower keeps")
        self.since = value.clone()

    def train_all(self, t: int, asks: Mapping[int, Ask]) -> dict[int, Replies]:
        began = time.monotonic()
        ask = asks.get(self.config.seed)
        owed, self.owed = self.owed, None
        wanted = [] if ask is None else list(ask.clients)
        need = math.ceil(self.config.flower.least * len(wanted))
        self.gate.look(0)
        if self._there(wanted) < need:
            self.gate.wait(lambda: self._there(wanted) >= need, self.config.flower.wait)
        view = owed[1] if owed else ask
        jobs: dict[int, tuple[Job, dict[str, bytes]]] = {}
        for member in self.roster.members.values():
            train = [c for c in member.clients if c in wanted]
            fresh = [c for c in train if t > 1 and not int(self.since[c])]
            judge = owed[2] if owed else Judge(silhouette=0) if fresh else None
            clients = sorted(member.clients if owed else train)
            if clients and view is not None:
                jobs[member.node] = self._job("train", t, clients, train, view, judge)
        failed = {c: "its node is not there" for c in wanted if c not in self.roster.owner}
        absent = frozenset(failed)
        members = dict(self.roster.members)
        messages: dict[int, Message] = {}
        terms: dict[int, dict[str, float]] = {}
        pool: dict[int, dict[str, float | None]] = {}
        judged: dict[int, dict[str, float | None]] = {}
        refused: list[dict[str, Any]] = []
        work: dict[str, float] = {}
        for member, found in self._asked(jobs):
            work |= {} if found.seconds is None else {member.name: found.seconds}
            messages |= found.messages
            terms |= found.terms
            pool |= found.pool
            judged |= found.judged
            failed |= {c: why for c, why in found.failed.items() if c in wanted}
            refused += [{"node": member.name, "why": why} for why in found.refused]
            for c in found.lost:
                self.since[c] = 0  # it begins anew
        self._same_terms(messages, terms, failed, refused, members)
        late = self._scores(judged) if owed else None
        joined_now = {c: judged[c] for c in sorted(messages) if t > 1 and not int(self.since[c]) and c in judged}
        for c in messages:
            self.since[c] = t
        clients = sorted(messages)
        if len(clients) < need:
            why = "; ".join(f"{n} of them: {why}" for why, n in Counter(failed.values()).most_common(3))
            raise Stopped(
                f"round {t}: {len(clients)} of {len(wanted)} clients answered, and flower.least takes {need} ({why}); "
                f"the checkpoint of round {t - 1} is kept"
            )
        self.spent["rounds"] = self.spent.get("rounds", 0.0) + time.monotonic() - began
        notes: dict[str, Any] = {"work": work}  # seconds, by node
        if refused:
            notes["refused"] = refused
        if joined_now:
            notes["joined"] = {
                str(c): {k: v for k, v in found.items() if k in MEASURES} for c, found in joined_now.items()
            }
        return {
            self.config.seed: Replies(
                clients,
                joined([expand(messages[c], 1) for c in clients]) if clients else {},
                _columns([terms[c] for c in clients]),
                _columns([pool.get(c, {}) for c in clients]),
                failed,
                absent,
                late,
                notes,
            )
        }

    def greet_all(self, clients: Mapping[int, Sequence[int]]) -> dict[int, Replies]:
        ((seed, wanted),) = clients.items()
        jobs = {}
        for member in self.roster.members.values():
            mine = [c for c in member.clients if c in wanted]
            if mine:
                jobs[member.node] = self._job("greet", 0, mine, [], Ask({}, {}, mine), None)
        messages: dict[int, Message] = {}
        failed: dict[int, str] = {}
        for _, found in self._asked(jobs):
            messages |= found.messages
            failed |= found.failed
        some = sorted(messages)
        if not some:
            raise Stopped(f"before round 1: no client answered ({next(iter(failed.values()), 'no node is there')})")
        return {seed: Replies(some, joined([expand(messages[c], 1) for c in some]), {}, {}, failed)}

    def evaluate_all(self, t: int, asks: Mapping[int, Ask], judge: Judge) -> dict[int, Scores]:
        ask = asks[self.config.seed]
        if t < self.task.last:
            self.owed = (t, ask, judge)
            return {}
        jobs = {
            m.node: self._job("judge", t + 1, sorted(m.clients), [], ask, judge)
            for m in self.roster.members.values() if m.clients
        }  # fmt: skip
        judged: dict[int, dict[str, float | None]] = {}
        for member, found in self._asked(jobs):
            judged |= found.judged
            for why in [*found.refused, *found.failed.values()]:
                self.gate.say(f"node '{member.name}' is not evaluated: {why}")
        return {self.config.seed: self._scores(judged)}

    def _there(self, wanted: Sequence[int]) -> int:
        return sum(c in self.roster.owner for c in wanted)

    def _job(
        self, kind: Any, t: int, clients: list[int], train: list[int], view: Ask, judge: Judge | None
    ) -> tuple[Job, dict[str, bytes]]:
        """What a node is asked and sent. `view` has a row for each of the clients."""
        down: dict[str, Tensor] = dict(packed_for("down", view.down))
        known = self.method.bank(view.down)
        bank = view.bank if view.bank is not None else known
        told: Any = "none" if bank is None else "down"
        if judge is not None and bank is not None and not _same(bank, known):
            told = "bank"
            down |= {"bank/values": bank.values, "bank/mask": bank.mask}
        own: dict[str, Tensor] = {}
        place = {c: i for i, c in enumerate(view.clients)}
        for c in clients:
            own |= packed_for(str(c), select(view.own, torch.tensor(place[c])))
        job = Job(
            kind=kind,
            run=self.run,
            round=t,
            config=self.config,
            method=self.plugin,
            classes=list(self.roster.classes),
            total=self.task.clients,
            clients=clients,
            since=[int(self.since[c]) for c in clients],
            train=train,
            judge=judge,
            told=told,
        )
        return job, {"down": written(down), "own": written(own)}

    def _asked(self, jobs: Mapping[int, tuple[Job, dict[str, bytes]]]) -> "list[tuple[Member, _Accepted]]":
        """Has the jobs done, and says what is taken of each node's answer."""
        members = dict(self.roster.members)  # some may leave meanwhile
        results = self._exchange(jobs)
        return [(members[n], self._accept(members[n], job, results[n])) for n, (job, _) in jobs.items()]

    def _exchange(self, jobs: Mapping[int, tuple[Job, dict[str, bytes]]]) -> dict[int, Result | str]:
        """What each node says, or why there is nothing of it."""
        post, results = self.gate.post, dict[int, Result | str]()
        under_way: dict[str, int] = {}
        for node, (job, payloads) in jobs.items():
            sent = post.send(node, job, payloads)
            if sent is None:
                results[node] = "the message to it could not be sent"
            else:
                under_way[sent] = node
        seconds = self.config.flower.timeout

        def over() -> bool:
            self.gate.look()
            return not under_way

        for question, mail in post.receive(time.monotonic() + seconds, over):
            if not self.gate.hear(question, mail) and question in under_way:
                node = under_way.pop(question)
                results[node] = self._opened(mail, len(jobs[node][0].clients))
        for question, node in under_way.items():
            post.forget(question)
            results[node] = f"no answer in {seconds:g} s (flower.timeout)"
        return results

    def _opened(self, mail: Mail, clients: int) -> Result | str:
        try:
            if mail.has_error():
                return trouble(mail)
            text, payloads = opened(mail.content, largest(self.expected, clients))
            said = read(text, Answer, Refusal)
            if isinstance(said, Refusal):
                return said.why
            assert isinstance(said, Answer)
            return said, tensors_of(payloads.get("up", b""))
        except Bad as why:
            return f"refused: {why}"

    def _accept(self, member: Member, job: Job, result: Result | str) -> "_Accepted":
        """What of a node's answer is taken."""
        if isinstance(result, str):
            refused = [result] if result.startswith("refused: ") else []
            return _Accepted(failed=dict.fromkeys(job.clients, result), refused=refused)
        answer, tensors = result
        asked = job.train if job.kind == "train" else job.clients
        try:
            check_record(answer, self.run, job.round, job.clients, job.clients if job.judge else ())
            if not set(answer.clients) <= set(asked):
                raise Bad(f"it speaks for the clients {answer.clients[:20]}; was asked {asked[:20]}")
            if self.hash and answer.hash != self.hash:
                raise Bad("its partition is another one: other data, or another version of fedsap")
        except Bad as why:
            return _Accepted(failed=dict.fromkeys(job.clients, f"refused: {why}"), refused=[f"refused: {why}"])
        found = _Accepted(failed=dict(answer.failed), lost=list(answer.lost), seconds=round(answer.seconds, 3))
        missing = set(asked) - set(answer.clients) - set(answer.failed)
        found.failed |= dict.fromkeys(missing, "its node said nothing of it")
        try:
            known = {str(c) for c in answer.clients} if job.kind != "judge" else set[str]()
            if strangers := sorted({name.partition("/")[0] for name in tensors} - known):
                raise Bad(f"it sent tensors for {', '.join(strangers[:5])}; takes them for {answer.clients[:20]}")
            for i, c in enumerate(answer.clients if known else ()):
                owned, longest = self._owned(c, member), self.config.flower.longest
                found.messages[c] = checked(tensors, self.expected, c, owned, longest)
                found.terms[c] = {k: v[i] for k, v in answer.terms.items()}
                found.pool[c] = {k: v[i] for k, v in answer.pool.items()}
        except Bad as why:  # who is wrong in one thing is not believed in the others
            return _Accepted(failed=dict.fromkeys(job.clients, f"refused: {why}"), refused=[f"refused: {why}"])
        if answer.figures is not None:
            every = answer.figures.accuracy | answer.figures.noted
            for i, c in enumerate(answer.judged):
                found.judged[c] = {k: v[i] for k, v in every.items()}
        return found

    def _owned(self, client: int, member: Member) -> list[int]:
        if self.held is not None:
            return list(self.held[client])
        return [self.roster.classes.index(name) for name in member.said.classes]

    def _same_terms(
        self,
        messages: dict[int, Message],
        terms: dict[int, dict[str, float]],
        failed: dict[int, str],
        refused: list[dict[str, Any]],
        members: Mapping[int, Member],
    ) -> None:
        """Refuses clients whose loss has other terms than most clients' have."""
        kinds = Counter(frozenset(one) for c, one in terms.items() if c in messages)
        if len(kinds) < 2:
            return
        usual = kinds.most_common(1)[0][0]
        for c in [c for c in messages if frozenset(terms[c]) != usual]:
            why = f"refused: its loss has the terms {sorted(terms[c])[:5]}; takes {sorted(usual)}"
            failed[c] = why
            refused.append({"node": next(m.name for m in members.values() if c in m.clients), "why": why})
            del messages[c]

    def _scores(self, judged: Mapping[int, Mapping[str, float | None]]) -> Scores:
        """Of all clients, by id; there is none of those that did not answer."""
        names = dict.fromkeys([*MEASURES, *(k for one in judged.values() for k in one)])
        rows = {k: numbers_of([judged.get(c, {}).get(k) for c in range(self.task.clients)]) for k in names}
        accuracy = {k: v for k, v in rows.items() if k in MEASURES}
        return Scores(accuracy, None, None, {k: v for k, v in rows.items() if k not in MEASURES})


def _same(bank: PerClass, known: PerClass | None) -> bool:
    return known is not None and torch.equal(bank.values, known.values) and torch.equal(bank.mask, known.mask)


@dataclass
class _Accepted:
    messages: dict[int, Message] = field(default_factory=dict)
    terms: dict[int, dict[str, float]] = field(default_factory=dict)
    pool: dict[int, dict[str, float | None]] = field(default_factory=dict)
    judged: dict[int, dict[str, float | None]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    seconds: float | None = None


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, Tensor]:
    names = dict.fromkeys(k for row in rows for k in row)
    return {k: numbers_of([row.get(k) for row in rows]) for k in names}
