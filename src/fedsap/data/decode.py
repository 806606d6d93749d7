"""Image files to pixels: one file, and many at once into an array that is already there."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedsap.errors import UserError

CHUNK = 64


def decode(payload: bytes, where: str, *, channels: int, size: int | None = None) -> NDArray[np.uint8]:
    """One PNG or JPEG file as uint8 [H, W, channels], grey for one channel and RGB for three.

    With `size` the short side is scaled to it and the centre kept, so that H = W = size. Transparent parts become
    white, 16-bit grey keeps its upper 8 bits' range, and a photograph is turned upright as its EXIF entry says.
    `where` names the file in the UserError for an unreadable one.

    >>> file = BytesIO()
    >>> Image.new("RGB", (30, 20), "red").save(file, "PNG")
    >>> decode(file.getvalue(), "red.png", channels=3, size=8).shape
    (8, 8, 3)
    """
    try:
        with Image.open(BytesIO(payload)) as image:
            if size is not None:
                image.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a half, a quarter or an eighth
            ImageOps.exif_transpose(image, in_place=True)
            plain = _opaque(image).convert("L" if channels == 1 else "RGB")
        if size is not None:
            plain = ImageOps.fit(plain, (size, size), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and others
        reason = "no image format that is known" if isinstance(error, UnidentifiedImageError) else str(error)
        raise UserError(f"{where}: unreadable image ({' '.join(reason.split())})") from error
    return np.asarray(plain).reshape(plain.height, plain.width, channels)


def _opaque(image: Image.Image) -> Image.Image:
    """The same picture in 8 bits per channel and without transparency."""
    if image.mode.startswith("I"):  # Pillow would clip 16-bit grey at 255 instead of scaling it
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image


def fill(out: NDArray[np.uint8], one: Callable[[int], NDArray[np.uint8]]) -> None:
    """out[i] = one(i) for every i, in threads. out: [N, H, W, C].

    Nothing is held besides `out` and one image per thread. The first error, in the order of i, is raised.

    >>> out = np.zeros((3, 1, 1, 1), dtype=np.uint8)
    >>> fill(out, lambda i: np.full((1, 1, 1), 10 * i, dtype=np.uint8))
    >>> out.ravel().tolist()
    [0, 10, 20]
    """

    def chunk(start: int) -> None:
        for i in range(start, min(start + CHUNK, len(out))):
            out[i] = one(i)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(chunk, range(0, len(out), CHUNK)):
            pass
