"""fedsap: federated prototype learning, a whole federation as one stack of tensors."""

__version__ = "0.1.0"
