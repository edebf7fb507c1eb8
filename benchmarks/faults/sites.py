# SPDX-License-Identifier: Apache-2.0
"""Two sites behind routers, a launcher that both reach, and nothing else: no VPN, no open port at a site.

    python benchmarks/faults/sites.py [--sites 2] [--minibatch-s 0.3] [--cuts 3,15]      as root

Each site is a network namespace behind a router that translates its address, with a link of 20 Mbit/s in each
direction; host 0, which has the launcher with its control plane and relay, is 40 ms away, so a packet from one site to
the other takes 80 ms. Each site has a worker that joined with the invitation. A character model of 325,000 parameters
learns Python's standard library under `auto`; a minibatch takes 0.3 s, of which all but a few milliseconds are a sleep
that stands for a device. One after another: one worker alone, the sites undisturbed, one worker alone once more, and
the sites again while the cable of the first site's router is pulled twice, for 3 s and for 15 s; a worker that is
silent for 6 s is lost, and its launcher starts another.

The last line is a JSON object:

    efficiency        minibatches a second of a worker among the sites, undisturbed, over those of one worker alone (the
                      faster of its two runs), in the blocks of the longest period, to which `auto` has come by itself
    efficiency_whole  the same from the first minibatch to the last, with the short blocks at first
    efficiency_cut    that of the run with the cuts, whose workers are lost and come back meanwhile
    lost, repeated    samples that are in the global model less or more often than once, in both runs together. A buffer
                      of the model says which worker's minibatches each exchange has taken in, and each worker wrote
                      down which samples these were before it trained on them (_faults/program.py)
    cuts              seconds of each cut; `gone` workers were declared lost by them
    period            minibatches of the longest blocks; `exchange_s` the median of what an exchange of them takes
    timelines         for every exchange seconds, and minibatches in the model; pulled_s when the cable was out
    relayed_mb        megabytes that host 0 has sent, undisturbed: what the relay passed on
    agree             whether all who came to the end have the same bits
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

from _faults import count
from _faults.cluster import POLL_S, PROGRAM, READY_S, Cluster
from _faults.job import Job
from devtools.emulation import SitesNetwork
from safetensors.torch import save_file

from data import load_corpus

WARM = 5  # minibatches of one worker alone that are not timed


class Sites(Cluster):
    """A launcher without workers on the public host, and one with a worker at each site."""

    def lead(self) -> None:
        """The launcher."""
        options = ["--elastic", f"1:{self.network.hosts - 1 if self.network else 2}", "--workers", "0", "--invite"]
        options += ["--listen", self.address, "--timeout", f"{self.job.timeout_s:g}", "--log", str(self.log(0))]
        self._launch(0, options)

    def join(self, site: int) -> None:
        """A site's launcher, with the line that the first one printed, which stands in a file."""
        path, until = self.log(0) / "certificates" / "invitation", time.monotonic() + READY_S
        while not (path.exists() and path.read_text().endswith("\n")):
            if time.monotonic() > until:
                raise SystemExit(f"the launcher made no {path} within {READY_S:g} s; {self.tail()}")
            time.sleep(POLL_S)
        options = ["--log", str(self.log(site)), str(path), str(PROGRAM), str(self.job_file)]
        self._launch(site, options, "join")

    def alone(self) -> None:
        """One worker of the first site, and no others."""
        self._launch(1, ["--workers", "1", "--log", str(self.log(1)), str(PROGRAM), str(self.job_file)])


def main() -> None:
    """The runs; JSON on the last line."""
    options = parse()
    reason = SitesNetwork.possible()
    if reason:
        print(json.dumps({"skipped": {"all": reason}}))
        return
    directory = options.out or Path(tempfile.mkdtemp(prefix="sites-"))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    save_file({"train": load_corpus().train}, directory / "corpus.safetensors")
    with SitesNetwork(options.sites, options.rate, options.delay) as network:
        alone_s = again_s = alone(directory / "alone", options, network)
        print(f"one worker alone: {alone_s:.4f} s a minibatch", flush=True)
        calm = sites(directory / "calm", options, network, options.cuts if options.quick else [])
        show("undisturbed", calm)
        cut = calm if options.quick else {}  # whose one run of the sites has the cuts
        if not options.quick:
            again_s = alone(directory / "again", options, network)
            print(f"one worker alone, once more: {again_s:.4f} s a minibatch", flush=True)
        if options.cuts and not cut:
            cut = sites(directory / "cut", options, network, options.cuts)
            show("with cuts", cut)
    both_s, alone_s = [alone_s, again_s], min(alone_s, again_s)  # on a busy machine, the one that was hindered less
    found = {
        "efficiency": round(alone_s / calm["longest_s"], 4),
        "efficiency_whole": round(alone_s / calm["whole_s"], 4),
        "efficiency_cut": round(alone_s / cut["whole_s"], 4) if cut else None,
        "lost": calm["lost"] + cut.get("lost", 0),
        "repeated": calm["repeated"] + cut.get("repeated", 0),
        "samples": calm["samples"] + cut.get("samples", 0),
        "cuts": options.cuts,
        "gone": cut.get("gone"),
        "gone_undisturbed": calm["gone"],
        "period": calm["period"],
        "exchange_s": calm["exchange_s"],
        "relayed_mb": calm["relayed_mb"],
        "agree": calm["agree"] and cut.get("agree", True),
        "timelines": {"undisturbed": calm["timeline"], "cut": cut.get("timeline", [])},
        "pulled_s": cut.get("pulled_s", []),
        "alone_s": [round(seconds, 4) for seconds in both_s],
        "sites": options.sites,
        "rate_mbit": options.rate,
        "delay_ms": options.delay,
        "minibatch_s": options.minibatch_s,
        "parameters": 15_000 if options.quick else 325_000,
    }
    print(f"all of it: {directory}")
    print(json.dumps(found))


def show(name: str, found: dict[str, Any]) -> None:
    """A line of a run."""
    print(
        f"{name}: {found['exchanges']} exchanges, blocks of up to {found['period']} minibatches, "
        f"{found['longest_s']:.4f} s for each of these with their exchange; {found['gone']} workers lost, "
        f"{found['lost']} samples lost, {found['repeated']} repeated, {found['relayed_mb']} MB relayed",
        flush=True,
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sites", type=int, default=2)
    add("--rate", type=float, default=20.0, help="of each site's link, each direction, Mbit/s")
    add("--delay", type=float, default=40.0, help="between a site and host 0, one way, ms")
    add("--minibatch-s", type=float, default=0.3, help="of the device that a sleep stands for")
    add("--minibatches", type=int, default=1100, help="of a run, all sites together")
    add("--cuts", default="3,15", help="seconds of each cut, commas between; empty for no such run")
    add("--timeout", type=float, default=60.0, help="of the run; a tenth of it is the silence that is allowed")
    add("--rule", default="auto")
    add("--out", type=Path, help="directory for what the runs leave; it is emptied first")
    options = _quick.parse(parser, sites=2, minibatches=60, minibatch_s=0.05, cuts="0.5,1", timeout=60.0)
    options.cuts = [float(text) for text in options.cuts.split(",") if text]
    return options


def job(directory: Path, options: argparse.Namespace, minibatches: int) -> Job:
    """What all workers of a run train."""
    return Job(
        books=str(directory / "books"),
        corpus=str(directory.parent / "corpus.safetensors"),
        rule=options.rule,
        hidden=32 if options.quick else 256,
        minibatches=minibatches,
        minibatch_s=options.minibatch_s,
        timeout_s=options.timeout,
    )


def alone(directory: Path, options: argparse.Namespace, network: SitesNetwork) -> float:
    """Seconds of a minibatch of one worker."""
    cluster = Sites(directory, job(directory, options, WARM + max(20, options.minibatches // 10)), network)
    try:
        cluster.alone()
        cluster.wait(180)
    finally:
        cluster.close()
    times = [line["at"] for lines in cluster.books().values() for line in lines if line["event"] == "step"][WARM:]
    if len(times) < 2:
        raise SystemExit(f"one worker alone made {len(times)} minibatches; {cluster.tail()}")
    return (times[-1] - times[0]) / (len(times) - 1)


def sites(directory: Path, options: argparse.Namespace, network: SitesNetwork, cuts: list[float]) -> dict[str, Any]:
    """A run of all sites; the first one's link is cut, at equal parts of the samples."""
    cluster = Sites(directory, job(directory, options, options.minibatches), network)
    sent, pulled = network.sent_bytes(0), list[tuple[float, float]]()
    try:
        cluster.lead()
        for site in range(1, 1 + options.sites):
            cluster.join(site)
        for number, seconds in enumerate(cuts):
            _reach(cluster, options.minibatches * (1 + number) // (1 + len(cuts)))
            began = time.time()
            network.cut(1)
            time.sleep(seconds)
            network.mend(1)
            pulled.append((began, time.time()))
        cluster.wait(900)
    finally:
        cluster.close()
    relayed = network.sent_bytes(0) - sent
    return {**figures(cluster, pulled), "relayed_mb": round(relayed / 1e6, 1)}


def _reach(cluster: Cluster, minibatches: int) -> None:
    """Wait until the workers have made so many."""
    until = time.monotonic() + 600
    while sum(line["event"] == "step" for lines in cluster.books().values() for line in lines) < minibatches:
        if time.monotonic() > until:
            raise SystemExit(f"{minibatches} minibatches were not made in time; {cluster.tail()}")
        if any(process.poll() for process in cluster.launchers.values()):
            raise SystemExit(f"a launcher has ended; {cluster.tail()}")
        time.sleep(POLL_S)


def figures(cluster: Cluster, pulled: list[tuple[float, float]]) -> dict[str, Any]:
    """What the books of a run say, whose cable was pulled at these times."""
    books = cluster.books()
    seen = count.exchanges(books)
    found = count.samples(books, seen, cluster.job.samples)
    blocks = [block for lines in books.values() for block in _blocks(lines)]
    longest = max(made for made, _, _ in blocks)
    full = [block for block in blocks if block[0] == longest]
    begins = min(line["at"] for lines in books.values() for line in lines if line["event"] == "started")
    ends = max(line["at"] for lines in books.values() for line in lines if line["event"] == "step")
    working = max(len(one.brought) for one in seen.values())
    digests = count.digests(books)
    return {
        **{name: found[name] for name in ("lost", "repeated", "merged", "exchanges")},
        "samples": cluster.job.samples,
        "period": longest,
        "longest_s": sum(seconds for _, seconds, _ in full) / sum(made for made, _, _ in full),
        "whole_s": (ends - begins) * working / found["merged"],
        "exchange_s": round(statistics.median(waited for _, _, waited in full), 3),
        "gone": sum(line["kind"] == "lost" for line in cluster.events()),
        "agree": len(set(digests.values())) == 1,
        "timeline": _timeline(seen, begins),
        "pulled_s": [[round(at - begins, 1) for at in one] for one in pulled],
    }


def _timeline(seen: dict[int, count.Exchange], begins: float) -> list[tuple[float, int]]:
    """For every exchange: seconds since the first worker began, and minibatches that are in the model from then on."""
    found, merged = [(0.0, 0)], 0
    for _, one in sorted(seen.items()):
        merged += sum(made for _, made in one.brought.values())
        if one.over:
            found.append((round(one.done - begins, 2), merged))
    return found


def _blocks(lines: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """A worker's blocks: its minibatches, the seconds from the end of one exchange to that of the next, and of these
    what lay after its last minibatch. The first block, which has no exchange before it, is left out."""
    found, made, last, before = [], 0, 0.0, None
    for line in lines:
        if line["event"] == "step":
            made, last = made + 1, line["at"]
        elif line["event"] == "exchanged":
            if before is not None and made and line["first"] == line["last"]:
                found.append((made, line["at"] - before, line["at"] - last))
            made, before = 0, line["at"]
    return found


if __name__ == "__main__":
    main()
