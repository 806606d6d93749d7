"""Files that are there whole or not at all."""

import os

import pytest

from fedsap.errors import UserError
from fedsap.files import write


def test_a_written_file_is_readable_to_whom_new_files_are(tmp_path):
    (tmp_path / "usual").touch()
    write(tmp_path / "mine", "text")
    assert (tmp_path / "mine").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path):
    write(tmp_path / "mine", "old")
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "mine", "new \ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "old")]


@pytest.mark.skipif(os.name != "posix", reason="makes a pipe")
def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(UserError, match="is no file; choose another place"):
            write(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.a.json: cannot be written: No such file or directory"):
        write(tmp_path / "nowhere" / "a.json", "{}")
