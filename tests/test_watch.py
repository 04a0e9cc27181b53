"""`vfl report --watch`: what is answered to whom; and the page in a browser during a run."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.test_report import CHROMIUM, Page, left
from vfl_flower.config.errors import VflError
from vfl_flower.tools.cli import main
from vfl_flower.tools.watch import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "secret.json").write_text('{"secret": "of another run"}')
    left(tmp_path / "a", finished=False)
    with Server([tmp_path / "a"]) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, path: str | None = None, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    """Status, headers and content, for a path and a Host header as they are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, server.path if path is None else path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.server_port}" if host is None else host)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read().decode()


def test_the_page_is_served_and_follows_the_run(server: Server, tmp_path: Path) -> None:
    status, headers, text = ask(server)
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert "after 3 epochs" in Page(text).text and "0.8333" in text
    history = tmp_path / "a" / "history.jsonl"
    entry = history.read_text().splitlines()[-1].replace('"epoch": 3', '"epoch": 4')
    with history.open("a") as file:
        file.write(entry + "\n")
    assert "after 4 epochs" in ask(server)[2]
    assert ask(server, method="HEAD")[::2] == (200, "")


def test_a_run_that_has_not_begun_is_waited_for(server: Server, tmp_path: Path) -> None:
    with Server([tmp_path / "later"]) as other:
        assert "does not exist: name a results folder" in other.live.page().decode()
        left(tmp_path / "later")
        assert "Finished" in other.live.page().decode()
        (tmp_path / "later" / "summary.json").write_text("{half")  # as a reader may find it
        assert "Finished" in other.live.page().decode()


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/report.html", "/history.jsonl", "/../secret.json", "/%2e%2e/secret.json"),
        *("//etc/passwd", "/..%2fsecret.json", "http://127.0.0.1/secret.json", "*", "/\\..\\"),
        *(
            "{page}history.jsonl",
            "{page}../../secret.json",
            "{page}?x",
            "{page}%2e%2e/",
            "{page}//",
        ),
    ],
)
def test_no_other_path_is_answered(server: Server, path: str) -> None:
    status, _, text = ask(server, path.format(page=server.path))
    assert status == 404 and text == "There is no such page.\n"


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("", "0.0.0.0", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "[::1", "192.168.0.1"),
    ],
)
def test_a_foreign_name_for_this_address_is_refused(server: Server, host: str) -> None:
    status, headers, text = ask(server, host=host)
    assert status == 403 and "0.8333" not in text
    assert headers["Cache-Control"] == "no-store"


def test_a_tunnel_may_end_at_another_port(server: Server) -> None:
    assert ask(server, host="localhost:9000")[0] == ask(server, host="127.0.0.1:1")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_only_read(server: Server, method: str) -> None:
    assert ask(server, method=method)[0] == 501


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", server.server_port))  # where one bound to all would answer


def test_each_server_has_a_page_of_another_name(server: Server, tmp_path: Path) -> None:
    with Server([tmp_path / "a"]) as other:
        assert other.path != server.path and len(other.path) >= 22
        assert ask(server, other.path)[0] == 404


def test_headers_and_page_let_in_nothing_from_elsewhere(server: Server) -> None:
    for path in (server.path, "/other"):
        _, headers, _ = ask(server, path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ") and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store" and headers["Server"].strip() == "vfl"
    page = Page(ask(server)[2])
    assert len(page.all("script")) == 1 and not page.all("script")[0].attrib
    assert not [key for each in page.root.iter() for key in each.attrib if key in ("src", "href")]


def test_a_port_that_is_taken_is_one_sentence(server: Server, tmp_path: Path) -> None:
    with pytest.raises(VflError, match="is used by another program"):
        Server([tmp_path / "a"], server.server_port)


def test_what_is_watched_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--watch", str(tmp_path), "--out", str(tmp_path / "a.html")]) == 1
    assert "leave out --out" in capsys.readouterr().err


def command(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "vfl_flower.tools.cli", *arguments]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, **more)


def watching(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`vfl report --watch`, and its address."""
    process = command("report", "--watch", str(folder))
    assert process.stdout
    found = re.match(r"report: (http://127\.0\.0\.1:\d+/[\w-]+/) ", process.stdout.readline())
    assert found
    return process, found[1]


@pytest.mark.nightly
def test_the_command_ends_by_ctrl_c(tmp_path: Path) -> None:
    process, _ = watching(left(tmp_path / "a"))
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_the_live_page_in_a_browser_during_a_run_on_nodes(tmp_path: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    folder = tmp_path / "run"
    keys = "dataset='breast-cancer' strategy='vafl' epochs=400 patience=0 eval-every=10 window=1"
    run = command(
        "run", "-c", keys, "--parties", "2", "--engine", "supernodes", "--out", str(folder)
    )
    process, url = watching(folder)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000
            )
            page = browser.new_page()
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.goto(url)
            minutes = 120_000
            expect(page.locator(".banner")).to_contain_text("last evaluation", timeout=minutes)
            assert run.poll() is None  # it goes on
            figures = page.locator("details", has_text="These figures as a table")
            rows = figures.locator("tbody tr")
            expect(rows.first).not_to_be_visible()
            figures.locator("summary").click()
            expect(rows.first).to_be_visible()
            before = rows.count()
            page.mouse.wheel(0, 200)
            expect(rows.nth(before)).to_be_visible(timeout=minutes)  # a later evaluation
            assert figures.get_attribute("open") is not None  # as it was left
            assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
            tip = page.locator("circle.tip").first
            tip.hover()
            assert tip.evaluate("each => getComputedStyle(each).fillOpacity") == "0.5"
            assert re.search(r"0\.\d+ at ", tip.locator("title").text_content() or "")
            expect(page.locator(".banner.finished")).to_be_visible(timeout=5 * minutes)
            for summary in page.locator("summary").all():  # settings and the like
                summary.click()
            expect(page.locator("details[open]")).to_have_count(page.locator("details").count() - 1)
            assert {each for each in asked if "favicon" not in each} == {url}
            blocked = [each for each in said if "favicon" not in each]
            assert not [each for each in blocked if "404" not in each]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            expect(page.locator("body.stale")).to_be_visible(timeout=minutes)
            browser.close()
        assert run.wait(120) == 0
    finally:
        for started in (process, run):
            if started.poll() is None:
                started.terminate()
            started.wait(60)
