# SPDX-License-Identifier: Apache-2.0
"""The data service in figures: loaders beside their peers, objects of a store, waiting.

    in_process, one_process    samples of 1 KB per second: what `run.share` gives over the bare DataLoader, with no
                               and with one loader process; peers that are installed have rows
    objects                    objects of 16 MB from a double of S3: the cache's rate over obstore's
    waiting                    the part of the time that steps of 100 ms wait behind 50 ms and 200 Mbit/s, and the
                               peak of bytes on disk over the cap; the answers awaited at a time for small files

    python benchmarks/speed/data.py [--only loaders ...] [--rounds 5] [--peers stateful litdata grain webdataset]

What is missing here gives its reason. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _data import loaders, objects, waiting

PARTS = ("loaders", "objects", "waiting")


def of_loaders(options: argparse.Namespace) -> dict[str, Any]:
    """Loaders in turn."""
    found = loaders.measure(options.rounds, options.peers)
    print(f"{'samples of 1 KB a second':26}" + "".join(f"{place:>14}" for place in loaders.PLACES))
    for name, rates in found["rates"].items():
        print(f"{name:26}" + "".join(f"{rate:14,}" for rate in rates.values()))
    for name, reason in found["missing"].items():
        print(f"{name:26}{reason:>28.100}")
    return found


def of_objects(options: argparse.Namespace) -> dict[str, Any]:
    """The cache beside obstore."""
    found = objects.objects(count=options.objects, repeats=options.rounds, idle_s=options.idle_s)
    for name, rate in found.get("mb_per_s", {}).items():
        print(f"{name:26}{rate:10,} MB/s")
    return {"objects": found}


def of_waiting(options: argparse.Namespace) -> dict[str, Any]:
    """Steps behind a slow source."""
    found = waiting.waiting(blocks=options.blocks)
    print(f"{'waiting':26}{100 * found['waiting']:10.2f} % after the first block")
    print(f"{'peak on disk':26}{found['peak_over_cap']:10.3f} of the cap")
    small = waiting.small_files()
    print(f"{'requests in flight':26}{small['in_flight']:10.2f} of {small['threads']}, for small files")
    return {"waiting": found.pop("waiting"), "source": found, "small_files": small}


def main() -> None:
    """Run the parts and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement; medians are taken")
    parser.add_argument("--objects", type=int, default=12, help="that are fetched together")
    parser.add_argument("--blocks", type=int, default=20, help="from the slow source")
    parser.add_argument("--idle-s", type=float, default=0.0, help="wait so long for idle processors before an object")
    parser.add_argument("--peers", nargs="*", choices=list(loaders.PEERS), default=list(loaders.PEERS))
    options = _quick.parse(parser, rounds=1, peers=[], idle_s=0.0, objects=2, blocks=6)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    parts = {"loaders": of_loaders, "objects": of_objects, "waiting": of_waiting}
    found: dict[str, Any] = {}
    for name in options.only:
        found |= parts[name](options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
