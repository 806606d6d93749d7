"""How this process keeps its memory, and how much of a federation a GPU's memory takes at once."""

import ctypes
import platform
from typing import Any

import torch
from torch import Tensor

from fedsap.methods.method import State
from fedsap.training.local import Stack

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's numbers for them


def keep_freed() -> bool:
    """Tells glibc to keep freed memory for the next allocation; whether it was told.

    Every step allocates the same tensors again. By default glibc hands large blocks back to the system and is given new
    pages, filled with zeros, each time: nearly half of a CPU step of 20 ResNet-18 clients.

    >>> keep_freed() in (True, False)
    True
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_MAX, 0) and libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def activation_bytes(stack: Stack, state: State) -> int:
    """What one image of one client leaves for the backward pass, measured on the CPU; a GPU needs no more."""
    held: dict[int, int] = {}

    def note(saved: Tensor) -> Any:
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    one = {k: v[:1].detach().cpu().clone() for k, v in state["model"].items()}
    own = {v.untyped_storage().data_ptr() for v in one.values()}
    images = torch.zeros(1, 2, *stack.train.images.shape[1:], dtype=torch.uint8)
    noise = {k: torch.zeros(1, 2, *shape) for k, shape in stack.network.noise.items()}
    leaves = {k: v.requires_grad_() if k not in stack.network.buffers else v for k, v in one.items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        out = stack.network(leaves, stack.look(images), train=True, noise=noise)
    del out
    return sum(size for place, size in held.items() if place not in own) // 2 + 1


def rows_at_once(stack: Stack, state: State, trained: set[str]) -> int:
    """How many clients can train at once: all of them, or as many as the GPU has memory for."""
    device = stack.owned.device
    if device.type != "cuda":
        return len(stack.keys)
    each = {n: sum(v[0].nbytes for v in stack.live(w).values()) for n, w in state.items()}
    weights = sum(size * (3 if n in trained else 1) for n, size in each.items())  # and momentum and gradient
    beside = stack.pool.batch if stack.pool else 0
    batch = (stack.hyper.batch + beside) * activation_bytes(stack, state)
    return max(1, int(0.7 * free(device) / (weights + 2 * batch)))


SOME = 20  # clients whose class means are taken at once on a CPU


def images_at_once(stack: Stack, state: State, clients: int) -> int:
    """How many images of so many clients can be looked at together, of each: an eighth of what is free serves for it.

    On a CPU the number is the same up to `SOME` clients: sums run from chunk to chunk, and a client alone is to get the
    same bits as in a stack.
    """
    device = stack.owned.device
    if device.type != "cuda":
        height, width = stack.train.images.shape[1:3]
        return max(1, 2**21 // (max(clients, SOME) * int(height) * int(width)))
    room = free(device) // 8 // (clients * activation_bytes(stack, state))
    return int(min(max(1, room), 2**11))


def free(device: torch.device) -> int:
    """Bytes that a CUDA device can still give to this process."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + idle
