"""Times on the links, by hand: bytes over the links that a group has, and a microsecond for each hop."""

import itertools

import numpy as np
import pytest

from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.link_model import LATENCY, NETWORK_LATENCY, Links

V = 1e9
"""Bytes of the whole array."""


def links(version: str, *sides: int) -> tuple[Links, np.ndarray]:
    """(the links of a slice, numbers of its devices by place)."""
    sides = (*sides, 1)[:3]
    places = list(itertools.product(*map(range, sides), range(GENERATIONS[version].cores)))
    return Links.of(GENERATIONS[version], places), np.arange(len(places)).reshape(*sides, -1)


def gather(version: str, sides: tuple[int, ...], place: tuple) -> tuple[float, int]:
    """(bytes/s that the devices at `place` of the slice gather with, hops), from two gathers."""
    made, at = links(version, *sides)
    group = at[place].ravel().tolist()
    share = (len(group) - 1) / len(group)
    times = [made.collective("all-gather", whole, group) for whole in (0.0, V)]
    return V * share / (times[1] - times[0]), round(times[0] / LATENCY)


ALL = slice(None)
# (version, sides, which devices, links that everything comes in over, hops of the longest way)
SPANS = [
    ("v5e", (16, 16), (ALL, 0), 2, 8),  # a ring: from both sides, half way round
    ("v5e", (8, 16), (ALL, 0), 1, 7),  # a line: the end gets all over one link, from the other end
    ("v5e", (16, 16), (slice(4), 0), 1, 3),  # part of a ring is a line
    ("v5e", (16, 16), (slice(4), slice(4)), 2, 6),  # a square: a line in either dimension
    ("v5e", (16, 16), (ALL, ALL), 4, 16),
    ("v5e", (16, 16), (ALL, slice(4)), 3, 11),
    ("v5e", (16, 16), (slice(0, 16, 4), 0), 2 / 4, 8),  # every fourth: a ring, shared with three others
    ("v5e", (16, 16), (slice(3, 16, 4), slice(1, 16, 4)), 1, 16),  # the groups between tiles of 4 x 4
    ("v5e", (4, 4), (slice(0, 4, 2), 0), 1 / 2, 2),
    ("v5e", (4, 4), (slice(2), 0), 1, 1),
    ("v4", (4, 8, 8), (ALL, 0, 0), 2, 2),
    ("v4", (4, 8, 8), (ALL, slice(2), slice(2)), 4, 4),
    ("v4", (4, 8, 8), (ALL, ALL, ALL), 6, 10),
    ("v4", (2, 2, 4), (ALL, 0, ALL), 3, 3),
    ("v3", (4, 4), (ALL, 0, 0, ALL), 1, 3),
    ("v3", (4, 4), (ALL, 0, 0, 1), 1 / 2, 3),  # one core of each chip: the other half's links are the other group's
    ("v3", (4, 4), (0, 0, 0, ALL), 4, 1),  # on one chip: no link is between them
    ("v3", (32, 32), (ALL, 0, 0, ALL), 2, 16),
    ("tpu7x", (4, 4, 4), (ALL, ALL, 0, 0), 2, 4),
]


@pytest.mark.parametrize(("version", "sides", "place", "wanted", "hops"), SPANS)
def test_a_gather_takes_the_links_that_its_group_has(version, sides, place, wanted, hops):
    rate, found = gather(version, sides, place)
    assert rate == pytest.approx(wanted * GENERATIONS[version].link_rate)
    assert found == hops


def test_by_hand():
    """A gigabyte over a closed ring of 16 on a v5e: 15/16 of it over two links of 45 GB/s, 8 hops of a microsecond."""
    made, at = links("v5e", 16, 16)
    assert made.collective("all-gather", V, at[:, 3].ravel().tolist()) == pytest.approx(15 / 16 / 90 + 8e-6)


def test_all_reduce_is_two_gathers_and_all_to_all_a_quarter():
    made, at = links("v4", 4, 4, 8)
    group = at[:, :, 0].ravel().tolist()
    once = made.collective("all-gather", V, group)
    assert made.collective("reduce-scatter", V, group) == once
    assert made.collective("all-reduce", V, group) == 2 * once
    assert made.collective("all-to-all", V, group) == once / 4


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_alone_costs_nothing(kind):
    made, _ = links("v3", 2, 2)
    assert made.collective(kind, V, [5]) == 0


def test_groups_of_a_mesh_take_equally_long():
    """Wherever they lie: of the first alone the replay asks."""
    made, at = links("v5e", 16, 16)
    tiles = [at[x : x + 4, y : y + 4].ravel().tolist() for x in range(0, 16, 4) for y in range(0, 16, 4)]
    inter_slice_communication = [at[x::4, y::4].ravel().tolist() for x in range(4) for y in range(4)]
    for groups in (tiles, inter_slice_communication):
        assert len({made.collective("all-reduce", V, group) for group in groups}) == 1


def test_which_sides_wrap():
    for version, sides, wraps in [
        ("v5e", (8, 16), (0, 1, 0)),
        ("v4", (2, 4, 12), (0, 1, 1)),
        ("v3", (16, 32), (0, 1, 0)),
    ]:
        made, _ = links(version, *sides)
        assert tuple(made.wraps(dim) for dim in range(3)) == wraps


def shifted(numbers: np.ndarray, by: int) -> list[tuple[int, int]]:
    line = [int(n) for n in numbers.flat]
    return list(zip(line, line[by:] + line[:by], strict=True))


@pytest.mark.parametrize(
    ("side", "by", "hops"), [(16, 1, 1), (16, 3, 3), (16, 15, 1), (16, 8, 8), (8, 1, 7), (8, 3, 5), (8, 0, 0)]
)
def test_a_permute_takes_the_longest_way(side, by, hops):
    """On a ring the last is next to the first; on a line it sends all the way back."""
    made, at = links("v5e", side, 16)
    found = made.permute(V, shifted(at[:, 0], by))
    assert found == pytest.approx(hops * (V / 4.5e10 + LATENCY))


def test_a_permute_along_two_sides_goes_along_both():
    made, at = links("v4", 4, 4, 4)
    pairs = [(int(at[0, 0, 0, 0]), int(at[1, 3, 2, 0])), (int(at[0, 0, 0, 0]), int(at[0, 0, 1, 0]))]
    assert made.permute(V, pairs) == pytest.approx((1 + 1 + 2) * (V / 4.5e10 + LATENCY))
    assert made.permute(V, []) == 0


def test_between_slices_by_a_devices_share_of_its_host():
    made, _ = links("v5e", 16, 16)  # 4 chips a host
    assert made.network("all-gather", V, 2) == pytest.approx(V / 2 / (2.5e10 / 4) + NETWORK_LATENCY)
    assert made.network("all-gather", V, 32) == pytest.approx(V * 31 / 32 / (2.5e10 / 4) + NETWORK_LATENCY)
    assert made.network("all-reduce", V, 4) == 2 * made.network("all-gather", V, 4)
    cores, _ = links("v3", 4, 4)  # 8 devices a host
    assert cores.network("all-gather", V, 2) == pytest.approx(V / 2 / (2.5e10 / 8) + NETWORK_LATENCY)
