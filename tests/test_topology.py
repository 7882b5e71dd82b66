"""Links between ranks: what nvidia-smi prints is understood, and the slowest link of a group is found."""

from __future__ import annotations

import pytest

from pymesh3d.config import Layout
from pymesh3d.topology import LINKS, Topology, host_name, parse_nvidia_topology, physical_device

# The shape of `nvidia-smi topo -m`: a coloured header, GPUs, network cards, affinities, a legend.
MATRIX = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPHB\tSYS\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\tPXB\t0-47\t0\t\tN/A
GPU2\tPHB\tNODE\t X \tNV4\tSYS\t48-95\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def hosts_of(layout: Layout, *, nodes: int, gpus: dict[tuple[int, int], str] | None = None) -> Topology:
    """A topology of `layout.world` ranks in order on `nodes` hosts."""
    each = layout.world // nodes
    return Topology(
        hosts=tuple(f"node {rank // each}" for rank in range(layout.world)),
        devices=tuple(rank % each for rank in range(layout.world)),
        links=gpus or {},
        on_gpu=gpus is not None,
    )


def tp_groups(layout: Layout) -> list[list[int]]:
    return [list(range(first, first + layout.tp)) for first in range(0, layout.world, layout.tp)]


def test_the_matrix_of_nvidia_smi_is_read() -> None:
    links = parse_nvidia_topology(MATRIX)
    among_gpus = [[links[row, column] for column in range(4)] for row in range(4)]
    assert among_gpus == [
        ["none", "NVLink", "PCIe", "PCIe"],
        ["NVLink", "none", "PCIe", "PCIe"],
        ["PCIe", "PCIe", "none", "NVLink"],
        ["PCIe", "PCIe", "NVLink", "none"],
    ]


@pytest.mark.parametrize("text", ["", "No devices were found", "Failed to initialize NVML: Driver/library version mismatch\n"])
def test_a_text_without_a_matrix_has_no_links(text: str) -> None:
    assert parse_nvidia_topology(text) == {}


def test_the_slowest_link_of_a_group() -> None:
    gpus = Topology(hosts=("a",) * 4 + ("b",) * 4, devices=(0, 1, 2, 3) * 2, links=parse_nvidia_topology(MATRIX), on_gpu=True)
    assert [gpus.slowest(ranks) for ranks in ([3], [0, 1], [0, 2], [0, 1, 2, 3], [4, 5], [1, 5])] == [
        "none", "NVLink", "PCIe", "PCIe", "NVLink", "network",
    ]  # fmt: skip
    assert gpus.slowest_of([[0, 1], [2, 3]]) == "NVLink"
    assert gpus.slowest_of([[0, 1], [1, 2]]) == "PCIe"
    assert gpus.slowest_of([[0, 1], [0, 4]]) == "network"
    cpu = Topology(hosts=("a", "a", "b"), devices=(0, 0, 0), links={}, on_gpu=False)
    assert [cpu.slowest(ranks) for ranks in ([0], [0, 1], [0, 2])] == ["none", "shared memory", "network"]


def test_16_ranks_on_2_nodes_keep_tp_inside_a_node() -> None:
    for tp in (1, 2, 4, 8):
        layout = Layout(tp=tp, dp=16 // tp)
        topology = hosts_of(layout, nodes=2)
        assert topology.outside_nvlink(tp_groups(layout)) is None
        assert topology.slowest_of(tp_groups(layout)) == ("none" if tp == 1 else "shared memory")


def test_tp_over_two_nodes_is_found_with_its_ranks() -> None:
    layout = Layout(tp=16)
    assert hosts_of(layout, nodes=2).outside_nvlink(tp_groups(layout)) == list(range(16))


def test_tp_over_pcie_is_found_on_gpus() -> None:
    layout = Layout(tp=2, dp=2)
    links = parse_nvidia_topology(MATRIX)
    assert hosts_of(layout, nodes=1, gpus=links).outside_nvlink(tp_groups(layout)) is None
    assert hosts_of(layout, nodes=1, gpus=links).outside_nvlink([[0, 1], [1, 2]]) == [1, 2]
    assert hosts_of(layout, nodes=1, gpus={}).outside_nvlink(tp_groups(layout)) is None, "nobody is warned of what nobody knows"
    assert hosts_of(layout, nodes=1, gpus={}).slowest_of(tp_groups(layout)) == "unknown"


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("aabbcc", 2),
        ("aaabbb", 3),
        *((hosts, 1) for hosts in ["a", "abcd", "aaab", "abbb", "aaaabb", "aabbbb", "abab", "abba", "aabbaa"]),
    ],
)
def test_how_many_neighbours_are_on_each_host(hosts: str, size: int) -> None:
    """Equally many on each, one host after the other."""
    topology = Topology(hosts=tuple(hosts), devices=(0,) * len(hosts), links={}, on_gpu=False)
    assert topology.domain_size([range(len(hosts))]) == size


def test_how_many_neighbours_are_in_each_nvlink_domain() -> None:
    gpus = Topology(hosts=("a",) * 4 + ("b",) * 4, devices=(0, 1, 2, 3) * 2, links=parse_nvidia_topology(MATRIX), on_gpu=True)
    assert gpus.domain_size([range(8)]) == 2, "four pairs"
    assert gpus.domain_size([[0, 1], [2, 3], [6, 7]]) == 2 and gpus.domain_size([[0, 1], [1, 2]]) == 1, "all groups are alike"
    assert gpus.domain_size([[0, 2], [4, 6]]) == gpus.domain_size([[0, 2, 1, 3]]) == 1, "neighbours"
    chain = {(a, b): "NVLink" if abs(a - b) < 2 else "PCIe" for a in range(3) for b in range(3)}
    line = Topology(hosts=("a",) * 3, devices=(1, 0, 2), links=chain, on_gpu=True)
    assert line.domain_size([[0, 1, 2]]) == 1, "each is linked with each"


def test_links_are_ordered_from_fast_to_slow() -> None:
    assert LINKS == ("none", "NVLink", "unknown", "PCIe", "shared memory", "network")


@pytest.mark.parametrize(
    ("visible", "index", "physical"),
    [(None, 3, 3), ("", 1, 1), ("4,5,6,7", 2, 6), ("7", 0, 7), (" 2, 3 ", 1, 3), ("GPU-8f0c,GPU-11aa", 1, 1), ("0", 2, 2)],
)
def test_the_number_of_a_gpu_follows_the_visible_devices(visible: str | None, index: int, physical: int) -> None:
    assert physical_device(index, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == physical


def test_hosts_are_torchruns_nodes_where_there_is_torchrun() -> None:
    assert host_name({"GROUP_RANK": "3"}) == "node 3"
    assert host_name({})
