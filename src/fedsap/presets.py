"""Default values that depend on the data set and the method: plain data, one dictionary per layer.

A run's configuration is made of layers, each of which overrides the ones before it:

    the fields' own defaults  <-  DATASETS[data.name]  <-  PRESETS[preset]  <-  the configuration file  <-  --set

Below "method" stand each method's options, and under "model" what the method needs of the network.
"""

from typing import Any

Layer = dict[str, Any]

CIFAR: Layer = {
    "partition": {"ways": 3, "shots": 100, "spread": 1},
    "model": {"name": "resnet18", "weights": "resnet18-f37072fd.pth"},
    "method": {"fedproto": {"align": 0.1}, "fedmps": {"high": 1.0, "low": 0.2, "soft": 5.0}},
}

DATASETS: dict[str, Layer] = {
    "digits": {
        "partition": {"ways": 3, "shots": 12, "spread": 1},
        "unlabelled": {"weak": "none", "cutout": 0.25},  # a pixel is much of an image of 8x8
        "model": {"name": "small"},
        "train": {"rounds": 60},
        "method": {"fedproto": {"align": 1.0}, "fedmps": {"high": 1.0, "low": 0.2, "soft": 5.0}},
    },
    "cifar10": CIFAR | {"method": {**CIFAR["method"], "moon": {"mu": 5.0}}},
    "cifar100": CIFAR | {"partition": {"ways": 10, "shots": 50, "spread": 4}},
    "femnist": {
        "partition": {"ways": 3, "shots": 100, "spread": 1},
        "model": {"name": "cnn"},
        "method": {
            "fedproto": {"align": 1.0},
            "fedmps": {"high": 1.0, "low": 1.0, "soft": 10.0, "model": {"head_input": "normalized"}},
        },
    },
    "folder": {
        "partition": {"ways": 2, "shots": 20, "spread": 0},
        "model": {"name": "resnet18"},
        "method": {"fedproto": {"align": 0.1}},
    },
}

# What the code of FedProto and FedMPS does where the FedSAP paper's text says otherwise or nothing.
REFERENCE: dict[str, Layer] = {
    "": {
        "partition": {"slices": "stride", "stride": 110, "shuffle": False},
        "eval": {"test": "shots", "test_shots": 15},
        "method": {
            "fedavg": {"start": "independent", "weighted": False},
            "fedsap": {"proto_pass": "running"},
        },
    },
    "digits": {"partition": {"stride": 6}},
    "cifar10": {"model": {"reinit_stem": True}},
    "cifar100": {
        "model": {"reinit_stem": True},
        "partition": {"stride": 5, "vary_shots": False},
        "eval": {"test_shots": 5},
    },
    "femnist": {"method": {"fedmps": {"server_dropout": 0.5}}},
}

PRESETS: dict[str, dict[str, Layer]] = {"paper": {}, "reference": REFERENCE}
