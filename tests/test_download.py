import contextlib
import fcntl
import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evener.errors import EvenerError
from evener.textbook.download import DownloadError, RemoteFile, fetch

CONTENT = {"a.gz": b"first" * 50_000, "b.gz": b"second"}


def remote(name, content=None):
    content = CONTENT[name] if content is None else content
    return RemoteFile(name, len(content), hashlib.sha256(content).hexdigest())


FILES = (remote("a.gz"), remote("b.gz"))


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT at /, and its misbehaviours in folders of their own."""

    def do_GET(self):
        self.server.asked.append(self.path)
        *_, way, name = self.path.split("/")
        content = CONTENT.get(name, b"")
        if way == "missing":
            self.send_error(404)
            return
        if way == "silent":
            self.server.enough.wait(30)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if way == "dropped":
            content = content[: len(content) // 2]
        if way == "wrong":
            content = content[:-1] + b"?"
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.enough = [], threading.Event()
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.enough.set()
        server.shutdown()
        thread.join()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_arrive_whole_and_progress_is_told(server, tmp_path):
    folder = tmp_path / "new" / "folder"
    told = []
    fetch(server.url, FILES, folder, on_bytes=lambda *args: told.append(args))
    assert {name: (folder / name).read_bytes() for name in names(folder)} == CONTENT
    assert told[-1] == ("b.gz", 6, 6)
    assert ("a.gz", 250_000, 250_000) in told
    assert [bytes_ for name, bytes_, _ in told if name == "a.gz"] == sorted(
        bytes_ for name, bytes_, _ in told if name == "a.gz"
    )


def test_what_is_there_and_right_is_not_asked_for_again(server, tmp_path):
    (tmp_path / "a.gz").write_bytes(CONTENT["a.gz"])
    fetch(server.url, FILES, tmp_path)
    assert server.asked == ["/b.gz"]


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:-1] + b"?"])
def test_what_is_there_and_wrong_is_fetched_again(server, tmp_path, damage):
    (tmp_path / "a.gz").write_bytes(damage(CONTENT["a.gz"]))
    fetch(server.url, FILES, tmp_path)
    assert (tmp_path / "a.gz").read_bytes() == CONTENT["a.gz"]


def test_a_part_left_by_a_killed_process_is_overwritten(server, tmp_path):
    (tmp_path / "a.gz.part").write_bytes(b"x" * 1_000_000)
    fetch(server.url, FILES, tmp_path)
    assert names(tmp_path) == ["a.gz", "b.gz"]
    assert (tmp_path / "a.gz").read_bytes() == CONTENT["a.gz"]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("wrong", r"/wrong/a.gz is not the expected file: got 250000 bytes with SHA-256"),
        ("dropped", r"/dropped/a.gz"),
        ("missing", r"cannot download .*/missing/a.gz: .*404"),
        ("silent", r"cannot download .*/silent/a.gz: .*timed out"),
    ],
)
def test_a_bad_answer_names_the_address_and_leaves_nothing(server, tmp_path, way, message):
    with pytest.raises(DownloadError, match=message):
        fetch(f"{server.url}/{way}/", FILES, tmp_path, timeout_s=0.3)
    assert names(tmp_path) == []


def test_more_bytes_than_expected_are_not_taken_to_the_end(server, tmp_path):
    short = (RemoteFile("a.gz", 10, hashlib.sha256(b"firstfirst").hexdigest()),)
    with pytest.raises(DownloadError, match="expected 10 bytes"):
        fetch(server.url, short, tmp_path)
    assert names(tmp_path) == []


def test_a_failure_keeps_the_files_before_it(server, tmp_path):
    with pytest.raises(DownloadError):
        fetch(server.url, (FILES[0], remote("b.gz", b"other")), tmp_path)
    assert names(tmp_path) == ["a.gz"]


def test_no_server(tmp_path, server):
    server.server_close()
    with pytest.raises(DownloadError, match="cannot download"):
        fetch(server.url, FILES, tmp_path, timeout_s=0.3)


def test_an_interrupt_leaves_nothing_half(server, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server.url, FILES, tmp_path, on_bytes=interrupt)
    assert names(tmp_path) == []


def test_one_process_at_a_time(server, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(DownloadError, match="another process"):
            fetch(server.url, FILES, tmp_path)
    fetch(server.url, FILES, tmp_path)
    assert names(tmp_path) == ["a.gz", "b.gz"]


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match="cannot download into"):
        fetch(server.url, FILES, tmp_path / "file" / "folder")


def test_the_error_is_one_of_ours_and_an_oserror():
    assert issubclass(DownloadError, EvenerError)
    assert issubclass(DownloadError, OSError)
