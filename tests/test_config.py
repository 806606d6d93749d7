"""What is said of a wrong configuration: one line with the key, what it got, and what it takes."""

import pytest

from fedsap.config import assignments, resolve
from fedsap.errors import UserError
from fedsap.methods import METHODS


def one(**user):
    return resolve(user)[0]


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("train.rouds=5", "unknown key 'train.rouds'; did you mean 'train.rounds'"),
        ("trian.rounds=5", "unknown key 'trian'; did you mean 'train'"),
        ("method.algin=5", "unknown key 'method.algin'; did you mean 'method.align_"),
        ("data.name=cifar11", "unknown data set 'data.name=cifar11'; did you mean 'data.name=cifar10'"),
        ("method.name=fedprot", "unknown method 'method.name=fedprot'; did you mean 'method.name=fedproto'"),
        ("train.batch=eight", "train.batch: got 'eight', takes integer"),
        ("train.batch=0", "train.batch: got 0, takes greater than or equal to 1"),
        ("train.lr=-1", "train.lr: got -1"),
        ("train.lr=nan", "train.lr: got nan"),
        ("train.rounds=2.5", "train.rounds: got 2.5"),
        ("partition.rule=random", "partition.rule: got 'random'"),
        ("method.proxy_scale=big", "method.proxy_scale: got 'big'"),
        ("method.proxy_scale=-3", "method.proxy_scale: got -3"),
        ("method.proto_pass=later", "method.proto_pass: got 'later'"),
        ("preset=papre", "preset: got 'papre', takes paper or reference"),
        ("seeds=[]", "seeds: got []"),
        ("seeds=[1,1]", "seeds: got [1, 1]"),
        ("seeds=3", "seeds: got 3"),
        ("train=3", "train: got 3, takes keys below it"),
        ("noequals", "--set: got 'noequals', takes key=value"),
        ("unlabelled.sise=5", "unknown key 'unlabelled.sise'; did you mean 'unlabelled.size'"),
        ("unlabelled.foreign=1.0", "unlabelled.foreign: got 1.0"),
        ("unlabelled.magnitude=31", "unlabelled.magnitude"),
        ("method.margin_quantile=1.5", "method.margin_quantile: got 1.5"),
        ("method.accept=most", "method.accept: got 'most'"),
        ("method.name=fixmatch", "unlabelled.size: got 0, and method.name=fixmatch needs unlabelled samples"),
        ("engine=ray", "engine: got 'ray'"),
    ],
)
def test_one_line_names_key_value_and_what_it_takes(pair, words):
    with pytest.raises(UserError) as error:
        resolve(assignments([pair]))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_options_that_make_another_method_are_refused():
    with pytest.raises(UserError, match="local training"):
        one(method={"name": "fedproto", "align": 0.0})


def test_layers_override_each_other():
    assert one().train.rounds == 60
    assert one(train={"rounds": 7}).train.rounds == 7
    cifar = one(data={"name": "cifar10"}, method={"name": "fedproto"})
    assert (cifar.model.name, cifar.method["align"]) == ("resnet18", 0.1)
    assert one(data={"name": "cifar10"}, method={"name": "fedproto", "align": 3}).method["align"] == 3


def test_another_network_than_the_data_sets_has_none_of_its_settings():
    assert one(data={"name": "cifar10"}).model.weights == "resnet18-f37072fd.pth"
    small = one(data={"name": "cifar10"}, model={"name": "small"}, preset="reference").model
    assert (small.weights, small.reinit_stem) == ("none", None)


def test_an_option_reaches_the_methods_that_have_it():
    both = resolve({"method": {"name": ["fedsap", "fedavg"], "weighted": False, "fedsap": {"weighted": True}}})
    assert [c.method["weighted"] for c in both] == [True, False]


def test_a_method_gets_the_network_it_needs_unless_told_otherwise():
    femnist = {"data": {"name": "femnist"}, "method": {"name": "fedmps"}}
    assert resolve(femnist)[0].model.head_input == "normalized"
    assert resolve(femnist | {"model": {"head_input": "raw"}})[0].model.head_input == "raw"


def test_preset_reference_follows_the_authors_code():
    config = one(preset="reference", data={"name": "cifar100"}, method={"name": "fedavg"})
    assert (config.partition.slices, config.partition.stride, config.partition.vary_shots) == ("stride", 5, False)
    assert config.model.reinit_stem is True
    assert config.method["start"] == "independent"
    assert config.eval.test_shots == 5


def test_the_second_phase_comes_after_the_first_unless_told_otherwise():
    after = one(train={"rounds": 10}, unlabelled={"size": 5, "rounds": 3})
    assert (after.pool_rounds, after.rounds) == (range(11, 14), 13)
    within = one(train={"rounds": 10}, unlabelled={"size": 5, "rounds": 3, "start": 0})
    assert (within.pool_rounds, within.rounds) == (range(1, 4), 10)
    without = one(train={"rounds": 10}, unlabelled={"rounds": 3})
    assert (without.pool_rounds, without.rounds) == (range(0), 10)


def test_methods_and_seeds_multiply():
    configs = resolve({}, ["fedsap", "local"], [1, 2])
    assert [(c.method["name"], c.seed) for c in configs] == [("fedsap", 1), ("fedsap", 2), ("local", 1), ("local", 2)]


def test_all_is_every_method_that_can_run():
    def names(*pairs):
        return [c.method["name"] for c in resolve(assignments(pairs), ["all"])]

    assert names() == [name for name, m in METHODS.items() if not m.needs_pool]
    assert names("unlabelled.size=20") == list(METHODS)
    assert len(names()) < len(METHODS)


def test_text_that_is_not_toml_is_a_string():
    assert assignments(["model.weights=/a b/c.pth", "train.lr=0.1", "train.drop_last=false"]) == {
        "model": {"weights": "/a b/c.pth"},
        "train": {"lr": 0.1, "drop_last": False},
    }
