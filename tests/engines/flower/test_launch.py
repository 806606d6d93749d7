"""`fedsap run --engine flower`, as far as it goes without Flower's processes."""

import socket

import pytest
from typer.testing import CliRunner

from fedsap.cli import app
from fedsap.engines.flower.launch import _app, _last_error


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--superlink", "127.0.0.1:{port}"], "--superlink: 127.0.0.1:{port} does not answer"),
        (["--superlink", "nowhere"], "--superlink: got 'nowhere', takes HOST:PORT"),
        (["--superlink", "127.0.0.1:{port}", "--ca", "none.crt"], "--ca: no file none.crt"),
        (["--from", "runs"], "--from: that run's clients are not on Flower's nodes"),
        (["--set", "eval.snapshots=[1]"], "eval.snapshots: embeddings and images do not leave"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    words = [word.format(port=port) for word in words]
    done = CliRunner().invoke(app, ["run", "--engine", "flower", "--out", "out", *words])
    assert done.exit_code == 2
    assert said.format(port=port) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*"))


def test_a_superlink_without_the_engine_is_a_mistake(tmp_path):
    done = CliRunner().invoke(app, ["run", "--superlink", "127.0.0.1:8000", "--out", str(tmp_path / "out")])
    assert (done.exit_code, "takes --engine flower" in done.stderr) == (2, True)


def test_the_app_that_flower_is_given_says_what_was_asked(tmp_path):
    import tomllib

    asked = {"job": '{"layer": {"data": {"root": "/a \\"b\\" \\u00e9 é"}}}', "out": "/o\\p", "resume": True}
    folder = _app(tmp_path / "app", asked)
    found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert found["tool"]["flwr"]["app"]["config"] == asked
    assert [p.name for p in folder.iterdir()] == ["pyproject.toml"]  # no code


def test_the_last_error_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("INFO: fine\nOSError: [Errno 30] Read-only file system: '/x'\nINFO: over\n")
    assert _last_error(log) == " (OSError: [Errno 30] Read-only file system: '/x')"
    log.write_text("INFO: fine\n")
    assert _last_error(log) == ""
