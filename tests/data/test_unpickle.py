"""Pickles of arrays are read; a pickle that asks for anything else is refused before it runs."""

import os
import pickle

import numpy as np
import pytest

from fedsap.data.unpickle import load_arrays
from fedsap.errors import UserError

CONTENT = {"data": np.arange(12, dtype=np.uint8).reshape(3, 4), "labels": [3, 1, 2], "name": b"\xff\x00"}


class Call:
    """Pickles as a call of `function` on `arguments`."""

    def __init__(self, function, *arguments):
        self.state = function, arguments

    def __reduce__(self):
        return self.state


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_protocol_are_read(protocol):
    got = load_arrays(pickle.dumps(CONTENT, protocol=protocol), "file")
    np.testing.assert_array_equal(got["data"], CONTENT["data"])
    assert got["data"].dtype == np.uint8
    assert (got["labels"], got["name"]) == (CONTENT["labels"], CONTENT["name"])


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("runner", [os.system, eval, exec], ids=lambda runner: runner.__name__)
def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path, protocol, runner):
    marker = tmp_path / "ran"
    command = f"echo > {marker}" if runner is os.system else f"open({str(marker)!r}, 'w')"
    payload = pickle.dumps({"data": Call(runner, command)}, protocol=protocol)
    with pytest.raises(UserError, match=rf"^batch: refused, .*\.{runner.__name__}, which could run code"):
        load_arrays(payload, "batch")
    assert not marker.exists()


def test_other_functions_of_numpy_are_refused():
    with pytest.raises(UserError, match=r"numpy\S*\.fromfile"):
        load_arrays(b"cnumpy\nfromfile\n(S'/dev/null'\ntR.", "batch")


def test_bytes_are_not_a_way_to_other_codecs():
    with pytest.raises(UserError, match="damaged"):
        load_arrays(b"c_codecs\nencode\n(Vabc\nS'zlib_codec'\ntR.", "batch")


@pytest.mark.parametrize("keep", [0, 1, 10, 60, -1])
def test_a_cut_pickle_is_damaged(keep):
    with pytest.raises(UserError, match=r"^batch: damaged pickle \([^\n]+\); fetch the file again$"):
        load_arrays(pickle.dumps(CONTENT, protocol=2)[:keep], "batch")


def test_noise_is_damaged():
    rng = np.random.default_rng(0)
    for _ in range(200):
        with pytest.raises(UserError):
            load_arrays(rng.bytes(40), "batch")


def test_only_a_dictionary_will_do():
    with pytest.raises(UserError, match="it holds a list, not a dictionary"):
        load_arrays(pickle.dumps([1]), "batch")
