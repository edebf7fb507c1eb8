# SPDX-License-Identifier: Apache-2.0
"""`--notice FILE|URL`: whether this host is about to be taken.

A file is a notice once it exists. A URL is asked with GET every `POLL_S` seconds; it is what clouds tell a spot machine
about itself:

==========  ===============================================================================  ========================
aws         http://169.254.169.254/latest/meta-data/spot/instance-action                     404: none; 200: a notice
gcp         http://metadata.google.internal/computeMetadata/v1/instance/preempted            FALSE: none; TRUE
azure       http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01           JSON: a Preempt, Reboot,
                                                                                             Redeploy, Terminate event
==========  ===============================================================================  ========================

Of any other URL 404, 204, an empty body and `false` or `none` are no notice; any other body of a 200 is one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from paceline.core.printable import plain

CLOUDS = {
    "aws": "http://169.254.169.254/latest/meta-data/spot/instance-action",
    "gcp": "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
    "azure": "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
}
TAKEN = ("Preempt", "Reboot", "Redeploy", "Terminate")
"""Azure's events that end what runs on the machine; Freeze is a pause of some seconds."""
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""What Google and Azure ask for; others ignore it."""
TOKEN_SECONDS = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
POLL_S = 5.0
ANSWER_S = 2.0
MOST_BYTES = 1 << 16


class Notice:
    """Asks for a notice, a URL in a thread of its own.

    Args:
        place: a file, a URL, or aws, gcp or azure.
        warn: gets a sentence when a URL stops answering.
    """

    def __init__(self, place: str, warn: Callable[[str], None]) -> None:
        place = CLOUDS.get(place, place)
        self.place, self._warn, self._found = place, warn, ""
        self._is_url = place.startswith(("http://", "https://"))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="paceline-notice", daemon=True)

    def start(self) -> None:
        """Ask once, then begin to poll.

        Raises:
            OSError, ValueError: the URL does not answer, or answers what has no meaning here.
        """
        if self._is_url:
            self._found = ask(self.place)
            self._thread.start()

    def why(self) -> str:
        """The notice in words; "" while there is none."""
        if not self._found and not self._is_url and Path(self.place).exists():
            self._found = f"a notice lies at {self.place}"
        return self._found

    def close(self) -> None:
        """Ask no more."""
        self._closing.set()

    def _poll(self) -> None:
        warned = False
        while not self._found and not self._closing.wait(POLL_S):
            try:
                self._found = ask(self.place)
            except (OSError, ValueError) as error:
                if not warned:
                    self._warn(f"--notice {self.place} does not answer any more: {error}")
                warned = True
            else:
                warned = False


def ask(url: str) -> str:
    """The notice at a URL; "" where there is none.

    Raises:
        OSError, ValueError: there is no answer, or none that has a meaning here.
    """
    try:
        status, body = _get(url, HEADERS)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        status, body = _get(url, {"X-aws-ec2-metadata-token": _token(url)})
    text = body.decode("utf-8", errors="replace").strip()
    if status in (404, 204) or text.lower() in ("", "false", "none"):
        return ""
    events = None
    with contextlib.suppress(ValueError, AttributeError):
        events = json.loads(text).get("Events")
    if isinstance(events, list):
        kinds = [str(one.get("EventType")) for one in events if isinstance(one, dict)]
        text = ", ".join(kind for kind in kinds if kind in TAKEN)
        if not text:
            return ""
    return f"{url} says {plain(text)[:200]}"


def _get(url: str, headers: dict[str, str], method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # these addresses are of this machine
    try:
        with opener.open(request, timeout=ANSWER_S) as answer:
            return answer.status, answer.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return 404, b""
        raise


def _token(url: str) -> str:
    """Of Amazon's second version of this service."""
    host = urllib.parse.urlsplit(url)
    _, body = _get(f"{host.scheme}://{host.netloc}/latest/api/token", TOKEN_SECONDS, "PUT")
    return body.decode("ascii", errors="replace").strip()
