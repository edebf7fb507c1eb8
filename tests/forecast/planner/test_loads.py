# SPDX-License-Identifier: Apache-2.0
"""Bytes of links: routes of two and three dimensions by hand, and against the slices that the routes themselves cut."""

from __future__ import annotations

from collections import defaultdict

import pytest

from paceline.errors import RuleError
from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline.rules.topology import Hierarchical
from paceline_plugins.forecast.planner import Network, NetworkLink, network_from_text, recommend
from paceline_plugins.forecast.planner.timing import exchange, scatter

from .examples import MIB, NUMEL, wire, work

FLAT = Layout.vector(NUMEL)


def racks(host_s: float = 0.1, rack_s: float = 0.1, inside_s: float = 0.01, hosts: int = 2, each: int = 2) -> Network:
    """The model's bytes take so long over a host's link, over a rack's, and within a host."""
    links = [NetworkLink(0.0, MIB / seconds) for seconds in (host_s, inside_s, rack_s)]
    return Network("racks", links[0], links[1], each, links[2], hosts)


def payload_s(route: str, network: Network, workers: int) -> float:
    return exchange(rule_from_text(f"sync(chunks=1, {route})"), FLAT, 0, network, workers).payload_s


def test_hosts_of_different_sizes_by_hand() -> None:
    """8 workers and 1: rank 0 owns all of its host's numbers, so it gets seven times the model, sends as much, and has
    the host's link for itself."""
    assert payload_s("dimensions='hosts'", wire(0.1, per_host=8, faster=10), 9) == pytest.approx(14 * 0.01 + 0.1)


def test_three_dimensions_by_hand() -> None:
    """2 x 2 x 2. Within a host 2 x 1/2 of S; a rack's hosts send 2 x 1/2 of S/2 for each of 2 workers; and 4 workers of
    a rack S/4 each to the other rack."""
    assert payload_s("dimensions=(2, 2, 2)", racks(rack_s=0.3), 8) == pytest.approx(0.01 + 0.1 + 0.3)
    assert payload_s("dimensions=(2, 2, 2)", racks(rack_s=0.01), 8) == pytest.approx(0.01 + 0.1 + 0.05)  # hosts' links
    assert payload_s("dimensions='hosts'", racks(rack_s=0.3), 8) == pytest.approx(0.01 + 1.5 * 0.3)


@pytest.mark.parametrize(
    ("dimensions", "workers", "each"),
    [("hosts", 11, 4), ("hosts", 12, 4), ((4, 3), 12, 4), ((2, 2, 3), 12, 4), ((3, 4), 12, 2), ((2, 3, 2), 12, 1)],
)
def test_links_carry_what_the_route_sends(dimensions: str | tuple[int, ...], workers: int, each: int) -> None:
    """The bytes of each link, counted message by message from the slices of the workers."""
    topology, elements = Hierarchical(dimensions), 12 * 12 * 100  # type: ignore[arg-type]
    network = racks(hosts=2, each=each)
    plan = topology.plan(network.hosts(workers))
    slices = [list(plan.slices(rank, elements)) for rank in range(workers)]
    group_elements = float(elements)
    for level, groups in enumerate(plan.levels[:-1]):
        sent: dict[tuple[str, int, bool], float] = defaultdict(float)
        for group in groups:
            for source in group:
                for place, target in enumerate(group):
                    if source == target:
                        continue
                    size = slices[source][level].sizes[place]
                    hosts, halls = (
                        [of(rank) for rank in (source, target)] for of in (network.host_of, network.rack_of)
                    )
                    for kind, (here, there) in (("host", hosts), ("rack", halls)):
                        if here != there:
                            sent[kind, here, True] += size
                            sent[kind, there, False] += size
                    if hosts[0] == hosts[1]:
                        sent["worker", source, True] += size
                        sent["worker", target, False] += size
        found = scatter(topology, network, workers, level)
        for kind, load in (("host", found.host), ("rack", found.rack), ("worker", found.worker)):
            most = max((size for (what, _, _), size in sent.items() if what == kind), default=0.0)
            assert load * group_elements == pytest.approx(most, abs=1e-6), (level, kind)
        group_elements /= min(map(len, groups))


def test_racks_in_words_and_in_text() -> None:
    found = network_from_text("link(mbit=8, per_host=4, per_rack=16, rack_mbit=80, rack_ms=1)")
    assert found.per_rack == 16 and found.between == NetworkLink(1e-3, 1e7)
    assert "16 hosts a rack, 80 Mbit/s and 1 ms one way" in found.describe()
    assert [found.rack_of(rank) for rank in (0, 63, 64)] == [0, 0, 1]
    for text, says in (
        ("link(rack_mbit=1)", "and no racks; give per_rack"),
        ("link(per_rack=1.5)", "per_rack must be a whole number of hosts, at least 0, got 1.5"),
    ):
        with pytest.raises(RuleError, match=says):
            network_from_text(text)


def test_the_route_of_racks_is_recommended_where_it_is_faster() -> None:
    """Racks' links are slow: only a rack's share crosses them, which one step among all hosts does not achieve."""
    network = racks(0.001, 0.2, 0.0005, hosts=4, each=2)
    assert "dimensions=(2, 4, 4)" in recommend(work(), network, 32).rule
    assert "hosts" in recommend(work(), network, 30).rule  # racks that are not full
