"""Fetching image files from directories and servers, and showing examples."""

import errno
import gzip
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from torchgdu import data
from torchgdu.cli import main
from torchgdu.data import MIRRORS, fetch, show
from torchgdu.tasks import DataError, SequentialMNIST
from torchgdu.tasks.mnist_files import DATASETS, SHAPES, cache_directory

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]


def well(request: BaseHTTPRequestHandler, content: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


def missing(request: BaseHTTPRequestHandler, content: bytes) -> None:
    request.send_error(404)


def broken_off(request: BaseHTTPRequestHandler, content: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content[:20])


def endless(request: BaseHTTPRequestHandler, content: bytes) -> None:
    request.send_response(200)
    request.end_headers()
    try:
        while True:
            request.wfile.write(content)
    except OSError:
        pass  # the client has had enough


def nonsense_length(request: BaseHTTPRequestHandler, content: bytes) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "many")
    request.end_headers()


def other_content(request: BaseHTTPRequestHandler, content: bytes) -> None:
    raw = bytearray(gzip.decompress(content))
    raw[-1] = (raw[-1] + 1) % 10
    well(request, gzip.compress(raw))


def silent(request: BaseHTTPRequestHandler, content: bytes) -> None:
    request.connection.recv(1)  # returns when the client hangs up


class Server(ThreadingHTTPServer):
    """Serves the four small files under /DATASET/; `answers` says how, by file name."""

    daemon_threads = True

    def __init__(self, images: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.images = images
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        _, dataset, file = self.path.split("/")
        self.server.asked.append(self.path)
        content = self.server.images.published[dataset][file.removesuffix(".gz")]
        answer = self.server.answers.get(file.removesuffix(".gz"), well)
        answer(self, self.server.images.packed(content))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(small_images: Any) -> Iterator[Server]:
    with Server(small_images) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def cached() -> list[str]:
    if not cache_directory().exists():
        return []
    return sorted(str(path.relative_to(cache_directory())) for path in cache_directory().rglob("*"))


def complete(dataset: str, ending: str = ".gz") -> list[str]:
    return sorted([dataset, *(f"{dataset}/{name}{ending}" for name in SHAPES)])


class TestFromADirectory:
    @pytest.mark.parametrize("ending", [".gz", ""])
    def test_files_are_cached_and_found(
        self, small_images: Any, tmp_path: Path, ending: str
    ) -> None:
        own = small_images.write(tmp_path / "own", gzipped=ending == ".gz")
        assert fetch("mnist", own) == cache_directory() / "mnist"
        assert cached() == complete("mnist", ending)
        assert SequentialMNIST().provenance()["verified"] is True

    def test_a_missing_file_is_named_and_nothing_is_cached(
        self, small_images: Any, tmp_path: Path
    ) -> None:
        own = small_images.write(tmp_path / "own")
        (own / "t10k-labels-idx1-ubyte.gz").unlink()
        with pytest.raises(DataError, match="holds no t10k-labels-idx1-ubyte"):
            fetch("mnist", own)
        with pytest.raises(DataError, match="nowhere holds no train-images"):
            fetch("mnist", str(tmp_path / "nowhere"))
        assert cached() == []

    def test_wrong_content_is_refused_and_nothing_is_cached(
        self, small_images: Any, tmp_path: Path
    ) -> None:
        own = small_images.write(tmp_path / "own")
        labels = own / "t10k-labels-idx1-ubyte.gz"
        labels.write_bytes(labels.read_bytes()[:-9])
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is a damaged gzip file"):
            fetch("mnist", own)
        with pytest.raises(DataError, match="is not fashion-mnist's train-images-idx3-ubyte"):
            fetch("fashion-mnist", small_images.write(tmp_path / "other"))
        assert cached() == []

    def test_content_without_a_published_sum_is_refused(
        self, small_images: Any, tmp_path: Path
    ) -> None:
        own = small_images.write(tmp_path / "own", "fashion-mnist", gzipped=False)
        with pytest.raises(DataError, match="is not the published gzip file, whose sha256 is"):
            fetch("fashion-mnist", own)
        assert cached() == []


class TestFromAServer:
    def test_files_come_from_a_url(self, server: Server, capfd: pytest.CaptureFixture[str]) -> None:
        assert fetch("fashion-mnist", f"{server.url}/fashion-mnist/") == (
            cache_directory() / "fashion-mnist"
        )
        assert cached() == complete("fashion-mnist")
        assert SequentialMNIST(dataset="fashion-mnist").provenance()["verified"] is True
        assert capfd.readouterr().out == ""

    def test_what_is_there_is_not_fetched_again(self, server: Server) -> None:
        fetch("mnist", f"{server.url}/mnist")
        before = list(server.asked)
        fetch("mnist", f"{server.url}/mnist")
        assert server.asked == before
        path = cache_directory() / "mnist" / "t10k-labels-idx1-ubyte.gz"
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        fetch("mnist", f"{server.url}/mnist")
        assert path.read_bytes() == good
        assert cached() == complete("mnist")

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (missing, "HTTP Error 404|Not Found"),
            (broken_off, "broke off after 20 of|IncompleteRead"),
            (endless, "too long: at most"),
            (nonsense_length, "invalid literal|Content-Length"),
            (other_content, "is not mnist's t10k-labels-idx1-ubyte: the sha256"),
        ],
    )
    def test_a_fault_is_one_error_and_nothing_is_cached(
        self, server: Server, answer: Answer, message: str
    ) -> None:
        server.answers["t10k-labels-idx1-ubyte"] = answer
        with pytest.raises(DataError, match=f"could not be downloaded:\n.*({message})") as caught:
            fetch("mnist", f"{server.url}/mnist")
        assert f"{server.url}/mnist/t10k-labels-idx1-ubyte.gz" in str(caught.value)
        assert "`torchgdu data fetch mnist --from DIR`" in str(caught.value)
        assert cached() == []

    def test_a_silent_server_does_not_hold_us(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data, "TIMEOUT", 0.2)
        server.answers["train-images-idx3-ubyte"] = silent
        with pytest.raises(DataError, match="timed out"):
            fetch("mnist", f"{server.url}/mnist")
        assert cached() == []

    def test_the_next_mirror_steps_in(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dead = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist"
        monkeypatch.setitem(MIRRORS, "mnist", (dead, f"{server.url}/mnist"))
        fetch("mnist")
        assert cached() == complete("mnist")

    def test_offline_says_what_to_do(
        self, small_images: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def offline(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

        monkeypatch.setattr(socket, "getaddrinfo", offline)
        with pytest.raises(DataError) as caught:
            fetch("mnist")
        for part in (*(m + "/train-images-idx3-ubyte.gz" for m in MIRRORS["mnist"]), *SHAPES):
            assert part in str(caught.value)
        assert "Network is unreachable" in str(caught.value)
        assert "--from DIR" in str(caught.value)

    def test_an_address_that_is_none(self, small_images: Any) -> None:
        with pytest.raises(DataError, match=r"could not be downloaded:\n.*\[bad"):
            fetch("mnist", "http://[bad")

    def test_other_schemes_are_refused(self, small_images: Any) -> None:
        for url in ("ftp://example.org/mnist", "file:///etc"):
            with pytest.raises(DataError, match="neither a directory nor an https:// or http://"):
                fetch("mnist", url)


def test_an_interrupted_write_leaves_nothing(
    small_images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = small_images.write(tmp_path / "own")
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device; XDG_CACHE"):
        fetch("mnist", own)
    assert cached() == []


def test_the_public_mirrors_are_https_and_every_file_has_a_sum() -> None:
    assert MIRRORS.keys() == DATASETS.keys()
    for dataset, mirrors in MIRRORS.items():
        assert len(mirrors) >= 2
        assert all(url.startswith("https://") and not url.endswith("/") for url in mirrors)
        assert DATASETS[dataset].keys() == SHAPES.keys()
        sums = [s for pair in DATASETS[dataset].values() for s in pair if s is not None]
        assert all(len(s) == 64 and int(s, 16) for s in sums)
        assert len(sums) == len(set(sums))


def test_show_names_the_task_and_its_goal() -> None:
    lines = show("adding", count=2, length=30).splitlines()
    assert lines[0] == "adding(length=30): 2 inputs, 1 output; chance mse 0.167; goal mse 0.002"
    assert len(lines) == 4
    assert "goal sc 1, lc 1, both 1" in show("reber", multiple=3)
    assert show("reber", data_seed=1) != show("reber", data_seed=2)


def test_show_draws_images(small_images: Any, tmp_path: Path) -> None:
    own = small_images.write(tmp_path / "own")
    text = show("pmnist", count=2, dataset="mnist", directory=str(own))
    assert text.count("as the model reads it") == 2
    assert "█" in text


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["torchgdu", "data", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_commands(
    small_images: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = str(small_images.write(tmp_path / "own"))
    assert command(monkeypatch, "fetch", "mnist", "--from", own) == 0
    assert capsys.readouterr().out == f"{cache_directory() / 'mnist'}\n"
    assert command(monkeypatch, "show", "pmnist", "--count", "1") == 0
    assert capsys.readouterr().out == show("pmnist", 1, dataset="mnist") + "\n"
    assert command(monkeypatch, "show", "reber", "--multiple", "4", "--data-seed", "1") == 0
    assert capsys.readouterr().out == show("reber", data_seed=1, multiple=4) + "\n"
    assert command(monkeypatch, "fetch", "fashion-mnist", "--from", own) == 5
    assert capsys.readouterr().err.startswith(f"Error: {own}/train-images-idx3-ubyte.gz is not")
    assert command(monkeypatch, "show", "mnist", "--dataset", "fashion-mnist") == 2
    assert "`torchgdu data fetch fashion-mnist`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "addin"], "'addin' is not one of adding"),
        (["show", "adding", "--length", "1"], "--length: 1 is not allowed"),
        (["show", "adding", "--multiple", "3"], "--multiple: task adding has no such option"),
        (["show", "adding", "--count", "0"], "'--count'"),
        (["fetch", "cifar"], "must be mnist or fashion-mnist, not 'cifar'"),
    ],
)
def test_bad_arguments_are_named_without_torch(words: list[str], message: str) -> None:
    # The exit code is 2 if torch stayed out.
    program = (
        "import sys; from torchgdu.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: sys.exit(99 if 'torch' in sys.modules else end.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "data", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
