import json
import struct

import pytest
import torch

from fedsap.config import checked
from fedsap.engines.flower.protocol import (
    Answer,
    Bad,
    Figures,
    Hello,
    Job,
    Refusal,
    floats,
    numbers_of,
    packed_for,
    read,
    tensors_of,
    unpacked_of,
    written,
)
from fedsap.message import PerClass, flatten
from fedsap.training.rounds import Judge

RUN = "0" * 32


def test_records_arrive_as_they_were_sent():
    job = Job(
        kind="train",
        run=RUN,
        round=3,
        config=checked({"train": {"lr": 0.1}}),
        classes=["a", "b"],
        total=4,
        clients=[0, 2],
        since=[2, 0],
        train=[0],
        judge=Judge(every=2, snapshots=[1, 2]),
    )
    assert read(job.model_dump_json(), Hello, Job).model_dump() == job.model_dump()
    answer = Answer(
        run=RUN,
        round=3,
        clients=[0],
        failed={2: "gone"},
        terms={"ce": [0.1 + 0.2]},
        figures=Figures(accuracy={"head": [1 / 3, None]}),
    )
    assert read(answer.model_dump_json(), Answer, Refusal) == answer


def test_every_message_arrives_to_the_bit():
    message = {
        "proto": PerClass(torch.randn(4, 3) * torch.tensor([[1.0], [0], [1], [0]]), torch.tensor([1, 0, 1, 0]).bool()),
        "w": torch.randn(2, 2, dtype=torch.float64),
        "empty": PerClass(torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool)),
    }
    back = flatten(unpacked_of("7", tensors_of(written(packed_for("7", message))), classes=4))
    assert back.keys() == flatten(message).keys()
    assert all(torch.equal(back[k], v) for k, v in flatten(message).items())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON object"),
        ("[" * 100_000, "no JSON object"),
        ("7", "no JSON object"),
        ('{"a": 1}', "a record with a"),
        ("x" * 2_000_000, "characters; takes"),
        (json.dumps({"run": RUN, "round": -1, "clients": []}), "round"),
        (json.dumps({"run": "../../etc", "round": 1, "clients": []}), "run"),
        (json.dumps({"run": RUN, "round": 1, "clients": [], "extra": 1}), "extra"),
        (json.dumps({"run": RUN, "round": "1", "clients": []}), "round"),
    ],
)
def test_what_is_no_record_is_refused(text, why):
    with pytest.raises(Bad, match=why):
        read(text, Answer, Refusal)


def test_a_claim_of_ten_gigabytes_costs_nothing():
    claim = json.dumps({"a": {"dtype": "F32", "shape": [2_500_000_000], "data_offsets": [0, 10_000_000_000]}}).encode()
    for payload in (struct.pack("<Q", len(claim)) + claim + b"0" * 64, struct.pack("<Q", 10_000_000_000) + b"{}"):
        with pytest.raises(Bad, match="safetensors format"):
            tensors_of(payload)


@pytest.mark.parametrize("numbers", [[5], [0, 0], [1, 0], [-1], [0, 1, 2]])
def test_class_numbers_that_cannot_be_are_refused(numbers):
    tensors = {"3/proto@rows": torch.ones(len(numbers[:2]), 2), "3/proto@classes": torch.tensor(numbers)}
    with pytest.raises(Bad):
        unpacked_of("3", tensors, classes=2)


def test_figures_that_are_no_numbers():
    there = torch.tensor([0.1, float("nan"), float("inf")])
    assert floats(there)[1:] == [None, None]
    assert numbers_of(floats(there))[0] == there[0]
