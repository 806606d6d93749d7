"""The methods, by name, and what it takes to write another."""

from fedsap.errors import UserError
from fedsap.message import Message, PerClass, table, tensor
from fedsap.methods.apfl import APFL
from fedsap.methods.cfl import CFL
from fedsap.methods.ditto import Ditto
from fedsap.methods.fedavg import FedAvg
from fedsap.methods.fedmatch import FedMatch
from fedsap.methods.fedmps import FedMPS
from fedsap.methods.fednh import FedNH
from fedsap.methods.fedpac import FedPAC
from fedsap.methods.fedppl import FedPPL
from fedsap.methods.fedproto import FedProto
from fedsap.methods.fedprox import FedProx
from fedsap.methods.fedrep import FedRep
from fedsap.methods.fedsap import FedSAP
from fedsap.methods.fixmatch import FixMatch
from fedsap.methods.local import LocalOnly
from fedsap.methods.method import Forward, Local, Method, Pass, Phase, Round, State, Step, Task, When, option
from fedsap.methods.moon import MOON
from fedsap.methods.protofssl import ProtoFSSL
from fedsap.methods.semifed import SemiFed
from fedsap.methods.semifl import SemiFL
from fedsap.plugins import find

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        FedSAP,
        FedProto,
        FedMPS,
        FedNH,
        FedPAC,
        FedRep,
        MOON,
        FedAvg,
        FedProx,
        CFL,
        Ditto,
        APFL,
        FixMatch,
        FedMatch,
        SemiFL,
        ProtoFSSL,
        SemiFed,
        FedPPL,
        LocalOnly,
    )
}


def named(name: str) -> str:
    """The name of a method; one given as `package.module:Class` joins `METHODS` by this."""
    if ":" not in name:
        return name
    found = find("method.name", name)
    if not (isinstance(found, type) and issubclass(found, Method) and hasattr(found, "name")):
        raise UserError(f"method.name is {name!r}; takes a dataclass derived from fedsap.methods.Method, with a name")
    METHODS[found.name] = found
    return found.name


def place_of(name: str) -> str:
    """What `named` has to be given in another process: the name of a method of fedsap's own, else where its class is.

    >>> place_of("fedsap")
    'fedsap'
    """
    kind = METHODS[name]
    return name if kind.__module__.startswith("fedsap.") else f"{kind.__module__}:{kind.__qualname__}"


__all__ = [
    "APFL",
    "CFL",
    "METHODS",
    "MOON",
    "Ditto",
    "FedAvg",
    "FedMPS",
    "FedMatch",
    "FedNH",
    "FedPAC",
    "FedPPL",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedSAP",
    "FixMatch",
    "Forward",
    "Local",
    "LocalOnly",
    "Message",
    "Method",
    "Pass",
    "PerClass",
    "Phase",
    "ProtoFSSL",
    "Round",
    "SemiFL",
    "SemiFed",
    "State",
    "Step",
    "Task",
    "When",
    "named",
    "option",
    "place_of",
    "table",
    "tensor",
]
