"""Collective times by hand: bytes over the links that a group uses, and a microsecond per hop."""

import itertools

import numpy as np
import pytest

from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.tpu import HOP_LATENCY, NETWORK_LATENCY, LinkModel

V = 1e9
"""Bytes of the full array."""


def model_of(version: str, *sides: int) -> tuple[LinkModel, np.ndarray]:
    """(the link model of a slice, the numbers of its devices by position)."""
    sides = (*sides, 1)[:3]
    positions = list(itertools.product(*map(range, sides), range(GENERATIONS[version].cores)))
    return LinkModel.of(GENERATIONS[version], positions), np.arange(len(positions)).reshape(*sides, -1)


def gather_rate(version: str, sides: tuple[int, ...], where: tuple) -> tuple[float, int]:
    """(bytes/s of an all-gather among these devices of a slice, hops), from two all-gathers."""
    model, at = model_of(version, *sides)
    group = at[where].ravel().tolist()
    share = (len(group) - 1) / len(group)
    times = [model.collective_seconds("all-gather", size, group) for size in (0.0, V)]
    return V * share / (times[1] - times[0]), round(times[0] / HOP_LATENCY)


ALL = slice(None)
# (version, sides, devices of the group, links that a device receives over, hops of the longest route)
SPANS = [
    ("v5e", (16, 16), (ALL, 0), 2, 8),  # a ring: both directions, half way round
    ("v5e", (8, 16), (ALL, 0), 1, 7),  # a line: its end receives everything over one link
    ("v5e", (16, 16), (slice(4), 0), 1, 3),  # part of a ring is a line
    ("v5e", (16, 16), (slice(4), slice(4)), 2, 6),  # a square: a line in either dimension
    ("v5e", (16, 16), (ALL, ALL), 4, 16),
    ("v5e", (16, 16), (ALL, slice(4)), 3, 11),
    ("v5e", (16, 16), (slice(0, 16, 4), 0), 2 / 4, 8),  # every fourth: a ring whose links are shared by four groups
    ("v5e", (16, 16), (slice(3, 16, 4), slice(1, 16, 4)), 1, 16),  # one device of each 4 x 4 tile
    ("v5e", (4, 4), (slice(0, 4, 2), 0), 1 / 2, 2),
    ("v5e", (4, 4), (slice(2), 0), 1, 1),
    ("v4", (4, 8, 8), (ALL, 0, 0), 2, 2),
    ("v4", (4, 8, 8), (ALL, slice(2), slice(2)), 4, 4),
    ("v4", (4, 8, 8), (ALL, ALL, ALL), 6, 10),
    ("v4", (2, 2, 4), (ALL, 0, ALL), 3, 3),
    ("v3", (4, 4), (ALL, 0, 0, ALL), 1, 3),
    ("v3", (4, 4), (ALL, 0, 0, 1), 1 / 2, 3),  # one core of each chip: half of the links
    ("v3", (4, 4), (0, 0, 0, ALL), 4, 1),  # on one chip: no link between them
    ("v3", (32, 32), (ALL, 0, 0, ALL), 2, 16),
    ("tpu7x", (4, 4, 4), (ALL, ALL, 0, 0), 2, 4),
]


@pytest.mark.parametrize(("version", "sides", "where", "links", "hops"), SPANS)
def test_an_all_gather_uses_the_links_of_its_group(version, sides, where, links, hops):
    rate, found = gather_rate(version, sides, where)
    assert rate == pytest.approx(links * GENERATIONS[version].link_rate)
    assert found == hops


def test_a_gigabyte_on_a_ring_of_16_takes_the_time_computed_by_hand():
    """15/16 of it over two links of 45 GB/s, plus 8 hops of a microsecond."""
    model, at = model_of("v5e", 16, 16)
    assert model.collective_seconds("all-gather", V, at[:, 3].ravel().tolist()) == pytest.approx(15 / 16 / 90 + 8e-6)


def test_an_all_reduce_takes_two_all_gathers():
    model, at = model_of("v4", 4, 4, 8)
    group = at[:, :, 0].ravel().tolist()
    once = model.collective_seconds("all-gather", V, group)
    assert model.collective_seconds("reduce-scatter", V, group) == once
    assert model.collective_seconds("all-reduce", V, group) == 2 * once
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        assert model.collective_seconds(kind, V, [5]) == 0, "a group of one device"


# (version, sides, devices of the group, directed links that cross its middle, devices on either side)
MIDDLES = [
    ("v5e", (16, 16), (ALL, 0), 2, 8),  # a ring is cut twice
    ("v5e", (8, 16), (ALL, 0), 1, 4),
    ("v6e", (8, 8), (slice(2), slice(4)), 2, 4),  # two rows of four
    ("v6e", (8, 8), (slice(4), slice(4)), 4, 8),
    ("v5e", (16, 16), (slice(0, 16, 4), 0), 2 / 4, 2),  # four groups share the links
    ("v4", (4, 4, 8), (ALL, ALL, 0), 8, 8),
    ("v3", (4, 4), (ALL, 0, 0, ALL), 1, 4),  # of two cores each
    ("v3", (4, 4), (ALL, 0, 0, 1), 1 / 2, 2),
]


@pytest.mark.parametrize(("version", "sides", "where", "links", "half"), MIDDLES)
def test_half_of_what_each_half_of_a_group_has_crosses_its_middle_in_an_all_to_all(version, sides, where, links, half):
    """V bytes of all devices together; each sends equally much to every one."""
    model, at = model_of(version, *sides)
    times = [model.collective_seconds("all-to-all", size, at[where].ravel().tolist()) for size in (0.0, V)]
    crossing = half * (V / (2 * half)) / 2
    assert times[1] - times[0] == pytest.approx(crossing / (links * GENERATIONS[version].link_rate))


def test_all_groups_of_a_mesh_axis_take_equally_long():
    """The simulator relies on it: it computes the time of one group."""
    model, at = model_of("v5e", 16, 16)
    tiles = [at[x : x + 4, y : y + 4].ravel().tolist() for x in range(0, 16, 4) for y in range(0, 16, 4)]
    interleaved = [at[x::4, y::4].ravel().tolist() for x in range(4) for y in range(4)]
    for groups in (tiles, interleaved):
        assert len({model.collective_seconds("all-reduce", V, group) for group in groups}) == 1


def test_sides_that_close_to_a_ring():
    for version, sides, wraps in [("v5e", (8, 16), (0, 1, 0)), ("v4", (2, 4, 12), (0, 1, 1))]:
        model, _ = model_of(version, *sides)
        assert tuple(model.wraps(dim) for dim in range(3)) == wraps


def shifted(numbers: np.ndarray, by: int) -> list[tuple[int, int]]:
    line = [int(n) for n in numbers.flat]
    return list(zip(line, line[by:] + line[:by], strict=True))


@pytest.mark.parametrize(
    ("side", "by", "hops"), [(16, 1, 1), (16, 3, 3), (16, 15, 1), (16, 8, 8), (8, 1, 7), (8, 3, 5), (8, 0, 0)]
)
def test_a_ppermute_takes_the_time_of_its_longest_route(side, by, hops):
    """On a ring the last device is a neighbour of the first; on a line it is farthest away."""
    model, at = model_of("v5e", side, 16)
    found = model.permute_seconds(V, shifted(at[:, 0], by))
    assert found == pytest.approx(hops * (V / 4.5e10 + HOP_LATENCY))


def test_a_ppermute_along_two_dimensions_adds_their_hops():
    model, at = model_of("v4", 4, 4, 4)
    pairs = [(int(at[0, 0, 0, 0]), int(at[1, 3, 2, 0])), (int(at[0, 0, 0, 0]), int(at[0, 0, 1, 0]))]
    assert model.permute_seconds(V, pairs) == pytest.approx((1 + 1 + 2) * (V / 4.5e10 + HOP_LATENCY))
    assert model.permute_seconds(V, []) == 0


def test_between_slices_each_device_has_a_share_of_its_hosts_network():
    model, _ = model_of("v5e", 16, 16)  # 4 chips a host
    assert model.inter_slice_seconds("all-gather", V, 2) == pytest.approx(V / 2 / (2.5e10 / 4) + NETWORK_LATENCY)
    assert model.inter_slice_seconds("all-gather", V, 32) == pytest.approx(V * 31 / 32 / (2.5e10 / 4) + NETWORK_LATENCY)
    assert model.inter_slice_seconds("all-reduce", V, 4) == 2 * model.inter_slice_seconds("all-gather", V, 4)
    two_cores, _ = model_of("v3", 4, 4)  # 8 devices a host
    assert two_cores.inter_slice_seconds("all-gather", V, 2) == pytest.approx(V / 2 / (2.5e10 / 8) + NETWORK_LATENCY)
