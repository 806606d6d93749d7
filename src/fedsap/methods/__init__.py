"""The methods, by name."""

from fedsap.methods.fedavg import FedAvg
from fedsap.methods.fedmps import FedMPS
from fedsap.methods.fedproto import FedProto
from fedsap.methods.fedsap import FedSAP
from fedsap.methods.local import LocalOnly
from fedsap.methods.method import Method

METHODS: dict[str, type[Method]] = {m.name: m for m in (FedSAP, FedProto, FedMPS, FedAvg, LocalOnly)}

__all__ = ["METHODS", "FedAvg", "FedMPS", "FedProto", "FedSAP", "LocalOnly", "Method"]
