"""Options of a network, checked when it is made."""

from fedsap.errors import UserError


def one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises UserError unless the value is one of those allowed.

    >>> one_of("model.embedding", "relu", ("relu", "linear"))
    """
    if value not in allowed:
        raise UserError(f"{key} is {value!r}; it takes {' or '.join(map(repr, allowed))}")


def head(embedding: str, head_input: str, head_scale: float, dim: int) -> None:
    """Raises UserError unless these say what the embedding is and what the output layer makes of it.

    >>> head("unit", "cosine", 16.0, dim=64)
    """
    if dim < 1:
        raise UserError(f"model.dim is {dim}; it takes a number from 1")
    one_of("model.embedding", embedding, ("relu", "linear", "unit"))
    one_of("model.head_input", head_input, ("raw", "normalized", "cosine"))
    if not head_scale > 0:
        raise UserError(f"model.head_scale is {head_scale}; it takes a number above 0")


def images(model: str, shape: tuple[int, int, int], least: int) -> None:
    """Raises UserError unless images of this shape [H, W, C] are large enough for the network.

    >>> images("cnn", (128, 128, 1), least=14)
    """
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"model {model!r} takes images of shape (height, width, channels); it was given {shape}")
    height, width, _ = shape
    if min(height, width) < least:
        raise UserError(f"model {model!r} needs images of at least {least}x{least}; these are {height}x{width}")


def classes(model: str, number: int) -> None:
    """Raises UserError unless there is at least one class.

    >>> classes("cnn", 62)
    """
    if number < 1:
        raise UserError(f"model {model!r} needs at least 1 class; it was given {number}")
