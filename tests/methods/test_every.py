"""What holds for every method there is."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fedsap.config import resolve
from fedsap.federation import build_federation, dataset
from fedsap.methods import METHODS
from fedsap.runs import Run, execute_all, metrics

every = pytest.mark.parametrize("name", METHODS)
WEIGHTS, HEAD, D = 13_706, 650, 64  # of `small` on digits
BODY = WEIGHTS - HEAD
PROJECTION = (D * D + D) + (256 * D + 256) + (10 * 256 + 10)
# Numbers that a client with three of ten classes sends, and is sent from round 2 on; a lone 1 is its number of samples.
NUMBERS = {
    "fedsap": (3 * D, 10 * D),
    "fedproto": (3 * D, 10 * D),
    "fedmps": (3 * (D + 256), 10 * (D + 256 + 10)),
    "fednh": (BODY + 1 + 3 * (D + 1), BODY + 1 + 10 * D),  # the scale; a count with every prototype
    "fedpac": (WEIGHTS + 1 + 3 * (D + 1) + 3 * D + 1, WEIGHTS + 10 * D),
    "fedrep": (BODY + 1, BODY),
    "moon": (BODY + PROJECTION + 1, BODY + PROJECTION),
    "fedavg": (WEIGHTS + 1, WEIGHTS),
    "fedprox": (WEIGHTS + 1, WEIGHTS),
    "cfl": (WEIGHTS, WEIGHTS),
    "ditto": (WEIGHTS + 1, WEIGHTS),
    "apfl": (WEIGHTS + 1, WEIGHTS),
    # With a pool from round 1 on, so that helpers come in round 2.
    "fixmatch": (WEIGHTS + 1, WEIGHTS),
    "fedmatch": (2 * WEIGHTS + 1, 2 * WEIGHTS + 2 * WEIGHTS),  # theta and psi; the psi of two helpers
    "semifl": (WEIGHTS + 1, WEIGHTS),
    "protofssl": (BODY + 1 + 3 * D, BODY + 10 * D + 5 * 3 * D),  # the bank, and what five helpers have
    "semifed": (WEIGHTS + 1, WEIGHTS + 2 * WEIGHTS),  # two others' weights
    "fedppl": (WEIGHTS + 1 + 3 * D, WEIGHTS + 10 * D),
    "local": (0, 0),
}


def configs(name, *seeds, **keys):
    user = {
        "unlabelled": {"size": 12 * METHODS[name].needs_pool, "rounds": 2, "start": 0, "batch": 4},
        "partition": {"clients": 20, "ways": 3, "shots": 8, "spread": 0},
        "train": {"rounds": 3},
        "eval": {"every": 3},
        "method": {"cfl": {"after": 1, "eps1": 100.0}},
    }
    return resolve({k: user.get(k, {}) | keys.get(k, {}) for k in user}, [name], seeds)


@pytest.fixture(scope="module")
def digits():
    return dataset(configs("local")[0])


@every
def test_numbers_sent_are_those_counted_by_hand(tmp_path, digits, name):
    (config,) = configs(name, 1, train={"rounds": 2})
    run = Run(tmp_path / "run", config)
    run.execute(digits)
    _, row = metrics(run.folder)
    up, down = NUMBERS[name]
    assert [numbers for numbers, _ in row["up"]] == [up] * 20
    assert [numbers for numbers, _ in row["down"]] == [down] * 20


@every
def test_seeds_of_a_stack_are_what_each_is_alone(tmp_path, digits, name):
    both = configs(name, 1, 2, partition={"clients": 5}, train={"participation": 0.8, "failures": 0.1})
    stacked = [Run(tmp_path / f"stacked{c.seed}", c) for c in both]
    execute_all(stacked, lambda configs: build_federation(configs, digits))
    for config, one in zip(both, stacked, strict=True):
        alone = Run(tmp_path / f"alone{config.seed}", config)
        alone.execute(digits)
        found, expected = load_file(one.checkpoint), load_file(alone.checkpoint)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].shape == value.shape, key
            assert torch.allclose(found[key].double(), value.double(), rtol=1e-3, atol=1e-4), key


@every
def test_defaults_are_of_no_other_method(name):
    (config,) = configs(name)
    assert config.made_method().degenerate() is None


@every
def test_the_list_says_paper_year_and_what_goes_where(name):
    method = METHODS[name]
    assert re.search(r" (19|20)\d\d$", method.paper) or name == "local"
    assert re.fullmatch(r"up: .+; down: .+", method.sends) or name == "local"
