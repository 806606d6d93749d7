"""How this process keeps its memory."""

import ctypes
import platform

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
