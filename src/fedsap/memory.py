"""How this process keeps its memory."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's numbers for them


def keep_freed() -> bool:
    """Tells glibc to keep freed memory for the next allocation; whether it was told.

    Every step allocates the same few megabytes again. By default glibc hands blocks of that size back to the system
    and is given new pages, filled with zeros, each time: a quarter of a round of the digits on two cores.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_MMAP_THRESHOLD, 2**30) and libc.mallopt(_TRIM_THRESHOLD, 2**30))
