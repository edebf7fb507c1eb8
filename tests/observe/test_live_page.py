# SPDX-License-Identifier: Apache-2.0
"""The page of a run that still trains: it is the report's, follows the logs, and answers only those who may ask."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.http_server import MAX_CONNECTIONS, Answer
from paceline.observe.reports import read
from paceline.observe.reports.read import read_run
from paceline_plugins.report import live_page, write_report
from paceline_plugins.report.live_page import LivePage, RunFollower, Status
from paceline_plugins.report.totals import summarize

from .conftest import Event, lines, pushing, served, waiting

Write = Callable[..., Path]


def asked(page: LivePage, path: str = "/", **headers: str) -> Answer:
    message = Message()
    for name, value in {"Host": "localhost:8765", **headers}.items():
        message[name.replace("_", "-")] = value
    return page.answer(path, message)


def news(page: LivePage, since: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked(page, f"/data?since={since}").body)
    return found


def of(directory: Path, status: Status = Status("at work"), **more: Any) -> LivePage:
    page = LivePage(directory, lambda: status, **more)
    page.refresh()
    return page


# -- what it shows -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [waiting, pushing])
def test_of_a_finished_run_it_is_the_report(write_run: Write, tmp_path: Path, change: Any) -> None:
    directory = write_run("run", 4, change=change)
    report = write_report(directory, tmp_path / "page").read_text(encoding="utf-8")
    live = asked(of(directory, Status("over", over=True))).body.decode()
    section = re.compile(r'<section id="part-.*?</section>', re.DOTALL)
    assert section.findall(live) == section.findall(report) != []

    def data(page: str) -> Any:
        return json.loads(page.partition('id="data">')[2].partition("</script>")[0])

    assert data(live)["charts"] == data(report)["charts"]
    assert data(report)["live"] is None and data(live)["live"]["over"] is True


def cut(directory: Path, until_s: float) -> dict[Path, list[Event]]:
    """Keep the events of the logs up to a time; returns all of them."""
    whole = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in directory.glob("*.jsonl")}
    for path, events in whole.items():
        path.write_text(lines([event for event in events if event["at_s"] <= until_s]))
    return whole


def test_a_browser_gets_what_is_new_and_nothing_twice(write_run: Write) -> None:
    directory = write_run()
    whole = cut(directory, 20)
    page = of(directory, Status("busy", states={0: "at work", 1: "silent"}))
    first = news(page)
    assert first["order"][:3] == ["head", "problem", "tiles"] and set(first["parts"]) == set(first["order"])
    assert max(first["charts"]["loss-by-time"]["lines"][0]["x"]) == 20
    assert "silent" in first["parts"]["workers-0"] and "never closed" not in str(first["parts"])
    page.refresh()  # nothing was written
    assert news(page, first["revision"]) | {"order": []} == {
        "revision": first["revision"], "status": "busy", "over": False, "order": [], "parts": {}, "charts": {}
    }  # fmt: skip
    for path, events in whole.items():
        with path.open("a") as file:
            file.write(lines([event for event in events if 20 < event["at_s"] <= 30]))
    page.refresh()
    second = news(page, first["revision"])
    assert second["revision"] > first["revision"]
    assert max(second["charts"]["loss-by-time"]["lines"][0]["x"]) == 30
    assert "head" not in second["parts"] and "15,360" not in second["parts"]["numbers"]
    assert "7,680" in second["parts"]["numbers"]
    assert news(page)["charts"] == second["charts"]


def test_of_several_runs_in_a_directory_it_is_the_newest(write_run: Write) -> None:
    write_run("run", rule="first()")
    follower = RunFollower(write_run("run", rule="second()", number=2))
    run = follower.poll()
    assert run is not None and (run.rule, run.number) == ("second()", 2)
    write_run("run", rule="third()", number=3)
    again = follower.poll()
    assert again is not None and again.rule == "third()"


def test_a_long_log_is_followed_in_little_memory(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MOST_LINES", 4)
    monkeypatch.setattr(live_page, "MOST_REPORTS", 4)
    directory = write_run("run", 3)
    run = RunFollower(directory).poll()
    assert run is not None
    assert all(len(worker.exchanges) <= 9 and len(worker.values) <= 9 for worker in run.workers)
    short, whole = summarize(run), summarize(read_run(directory))
    assert (short.minibatches, short.samples, short.blocks) == (whole.minibatches, whole.samples, whole.blocks)
    assert read.MOST_LINES > 1000  # the report's own limit


def test_damaged_lines_and_files_that_vanish_end_nothing(write_run: Write) -> None:
    directory = write_run()
    path = directory / "rank-000.jsonl"
    path.write_bytes(b'\0\0\n[1]\n{"kind": "exchange", "at_s": "soon"}\n' + path.read_bytes() + b'{"kind": "va')
    page = of(directory)
    assert "10,240" in news(page)["parts"]["numbers"]
    path.unlink()
    page.refresh()
    assert "10,240" in news(page)["parts"]["numbers"]


# -- who may ask -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:8765", "[::1]:8765", "LOCALHOST"])
def test_a_browser_of_this_machine_may(write_run: Write, host: str) -> None:
    page = of(write_run())
    assert asked(page, Host=host).status == asked(page, "/data", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "localhost.evil.example", "127.0.0.1.evil", "", "[", "a@localhost@b"]
)
def test_a_name_that_was_bent_to_this_machine_may_not(write_run: Write, host: str) -> None:
    page = of(write_run())
    for path in ("/", "/data?since=0"):
        answer = asked(page, path, Host=host)
        assert answer.status == 403 and b"loss" not in answer.body


def test_elsewhere_a_token_is_needed(write_run: Write) -> None:
    page = of(write_run(), token="secret")
    for query in ("", "?token=", "?token=secre", "?token=secret2", "?token=%ff", "?Token=secret"):
        assert asked(page, f"/{query}", Host="node7:8765").status == 403
        assert asked(page, f"/data{query}").status == 403
    assert asked(page, "/?token=secret", Host="node7:8765").status == 200
    assert asked(page, "/data?token=secret&since=0", Host="node7:8765").status == 200
    assert "secret" not in asked(page, "/?token=secret").body.decode()


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/rank-000.jsonl", "/%2e%2e/rank-000.jsonl", "//etc/passwd", "/assets/page.js", "/data/"],
)
def test_no_path_leads_to_a_file(write_run: Write, path: str) -> None:
    answer = asked(of(write_run()), path)
    assert (answer.status, answer.body) == (404, b"")


def test_a_page_may_not_be_framed_kept_or_guessed(write_run: Write) -> None:
    page = of(write_run())
    for path in ("/", "/data"):
        headers = asked(page, path).headers
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert asked(page, "/favicon.ico").status == 204  # or each browser would report an error


# -- over a real socket ------------------------------------------------------------------------------------------------
def test_clients_that_read_nothing_keep_neither_the_page_nor_browsers_waiting(write_run: Write) -> None:
    page = of(write_run())
    with served(page) as port:
        slow = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(MAX_CONNECTIONS + 4)]
        for client in slow:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and never reads
        page.refresh()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data?since=0", timeout=30) as answer:
            assert json.load(answer)["parts"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": "evil.example"})
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 403
        refused.value.close()
        for client in slow:
            client.close()
