"""One image file to pixels, whatever its mode; many at once."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fedsap.data.decode import decode, fill
from fedsap.errors import UserError


def file(image, kind="PNG", **options):
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(w, h):
    """RGB, red growing to the right and green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, w), np.linspace(0, 255, h))
    return Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))


def test_a_plain_image_is_read_to_the_bit():
    image = gradient(9, 5)
    np.testing.assert_array_equal(decode(file(image), "a.png", channels=3), np.asarray(image))


def test_a_palette_gives_its_colours():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    assert decode(file(image), "a.png", channels=3)[0, 0].tolist() == [10, 200, 30]


@pytest.mark.parametrize(("alpha", "expected"), [(0, [255, 255, 255]), (255, [200, 0, 0])])
def test_what_is_transparent_is_white(alpha, expected):
    image = Image.new("RGBA", (4, 4), (200, 0, 0, alpha))
    assert decode(file(image), "a.png", channels=3)[0, 0].tolist() == expected


def test_a_transparent_entry_of_a_palette_is_white():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    assert decode(file(image, transparency=1), "a.png", channels=3)[0, 0].tolist() == [255, 255, 255]


def test_sixteen_bit_grey_is_scaled_and_not_clipped():
    deep = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    assert decode(file(Image.fromarray(deep)), "a.png", channels=1)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_one_bit_is_black_and_white():
    image = Image.fromarray(np.array([[True, False]]))
    assert decode(file(image), "a.png", channels=1)[0, :, 0].tolist() == [255, 0]


def test_a_grey_jpeg_gets_three_equal_channels():
    pixels = decode(file(Image.new("L", (16, 16), 90), "JPEG"), "a.jpg", channels=3)
    assert (abs(pixels.astype(int) - 90) <= 1).all()


def test_a_photograph_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    flat = file(gradient(32, 16), "JPEG", exif=exif, quality=95)
    assert decode(flat, "a.jpg", channels=3).shape == (32, 16, 3)


@pytest.mark.parametrize(("w", "h"), [(40, 20), (20, 40), (20, 20)])
def test_the_short_side_is_scaled_and_the_centre_kept(w, h):
    pixels = decode(file(gradient(w, h)), "a.png", channels=3, size=10).astype(float)
    red, green = pixels[..., 0].mean(0), pixels[..., 1].mean(1)
    assert pixels.shape == (10, 10, 3)
    for values, long in ((red, w > h), (green, h > w)):
        assert values.mean() == pytest.approx(127.5, abs=1.5)
        assert np.ptp(values) == pytest.approx(115 if long else 230, abs=12)  # half of the long side is left


def test_a_small_image_is_enlarged():
    assert decode(file(gradient(3, 2)), "a.png", channels=1, size=16).shape == (16, 16, 1)


def test_a_large_jpeg_looks_as_if_decoded_in_full():
    image = gradient(1000, 800)
    fast = decode(file(image, "JPEG", quality=95), "a.jpg", channels=3, size=32).astype(int)
    exact = decode(file(image), "a.png", channels=3, size=32).astype(int)
    assert abs(fast - exact).max() <= 6


@pytest.mark.parametrize("keep", [0, 5, 40, 100])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_cut_file_is_named(kind, keep):
    with pytest.raises(UserError, match=r"^x/y\.img: unreadable image \([^\n]+\)$"):
        decode(file(gradient(60, 60), kind)[:keep], "x/y.img", channels=3)


@pytest.mark.parametrize("n", [0, 1, 64, 200])
def test_fill_reaches_every_place(n):
    out = np.zeros((n, 1, 1, 1), dtype=np.uint8)
    fill(out, lambda i: np.full((1, 1, 1), i, dtype=np.uint8))
    assert out.ravel().tolist() == list(range(n))


def test_fill_raises_the_first_error():
    def one(i):
        if i >= 70:
            raise UserError(f"image {i}")
        return np.zeros((1, 1, 1), dtype=np.uint8)

    with pytest.raises(UserError, match="image 70"):
        fill(np.zeros((1000, 1, 1, 1), dtype=np.uint8), one)
