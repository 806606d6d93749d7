"""The live view's server: what it says, and to whom."""

import http.client
import json
import shutil
import threading
import time

import pytest

from fedsap.errors import UserError
from fedsap.report.live import Server, Watch


@pytest.fixture
def served(trained, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(trained / "fedsap-1", root / "one")
    (tmp_path / "secret.txt").write_text("secret")
    server = Server(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server, root
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_page_and_data(served):
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    status, text, headers = ask(server, "/")
    assert status == 200
    assert "<table" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    data = json.loads(ask(server, "/data.json")[1])
    assert data["live"]
    assert ask(server, f"/data.json?since={data['revision']}")[0] in (200, 204)  # 200: embeddings came meanwhile


def test_new_rounds_and_new_runs_appear(served, trained):
    server, root = served
    before = json.loads(ask(server, "/data.json")[1])
    rows = (trained / "fedproto-1" / "metrics.jsonl").read_text().splitlines(keepends=True)
    shutil.copytree(trained / "fedproto-1", root / "two", ignore=shutil.ignore_patterns("result.json", "snapshots"))
    (root / "two" / "metrics.jsonl").write_text("".join(rows[:2]))
    half = json.loads(ask(server, "/data.json")[1])
    two = next(v for v in half["variants"] if v["label"] == "FedProto")
    assert (two["round"], two["planned"], two["over"]) == (2, 4, False)
    assert "FedProto" in half["tables"]
    assert half["revision"] != before["revision"]
    with (root / "two" / "metrics.jsonl").open("a") as file:
        file.write("".join(rows[2:]))
    two = next(v for v in json.loads(ask(server, "/data.json")[1])["variants"] if v["label"] == "FedProto")
    assert two["curves"]["head"]["x"] == [2, 4]


def test_embeddings_come_when_they_are_laid_out(served):
    server, _ = served
    until = time.monotonic() + 90
    data = {"explorer": []}
    while not data["explorer"] and time.monotonic() < until:
        data = json.loads(ask(server, "/data.json")[1])
        time.sleep(0.2)
    assert [r["t"] for r in data["explorer"][0]["rounds"]] == [2, 4]


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/%2e%2e/secret.txt", "/one/config.json", "//etc/passwd", "/..%2fsecret.txt", "/one"]
)
def test_no_way_to_files(served, path):
    status, text, _ = ask(served[0], path)
    assert status == 404
    assert "secret" not in text


def test_links_out_of_the_folder_are_not_followed(served, trained):
    server, root = served
    (root / "link").symlink_to(trained / "fedproto-1")
    assert "FedProto" not in ask(server, "/data.json")[1]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "192.168.0.9", "[", "127.0.0.1.evil.example"])
def test_other_hosts_get_nothing(served, host):
    status, text, _ = ask(served[0], "/data.json", host)
    assert status == 403
    assert "FedSAP" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_reading_only(served, method):
    assert ask(served[0], "/", method=method)[0] == 501


def test_an_empty_folder_waits(tmp_path):
    watch = Watch(tmp_path)
    try:
        data = watch.data()
        assert (data["runs"], data["notes"]) == (0, [])
    finally:
        watch.close()
    with pytest.raises(UserError, match="no such folder"):
        Watch(tmp_path / "missing")


def test_as_many_runs_as_fit(trained, tmp_path):
    for name in ("fedsap-1", "fedproto-1", "fedavg-1"):
        shutil.copytree(trained / name, tmp_path / name, ignore=shutil.ignore_patterns("snapshots"))
    watch = Watch(tmp_path, most=2)
    try:
        data = watch.data()
        assert data["runs"] == 2
        assert any("3 runs are there" in note for note in data["notes"])
    finally:
        watch.close()
