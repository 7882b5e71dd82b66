"""Which host each rank runs on, and the slowest link a set of ranks talks over."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence

LINKS = ("none", "NVLink", "unknown", "PCIe", "shared memory", "network")  # fast to slow


def host_name(env: Mapping[str, str] = os.environ) -> str:
    """What tells this host from others: torchrun's node number where there is one, else the host name."""
    return f"node {env['GROUP_RANK']}" if "GROUP_RANK" in env else socket.gethostname()


def parse_nvidia_topology(text: str) -> dict[tuple[int, int], str]:
    """Links between the GPUs of this host, from the matrix that `nvidia-smi topo -m` prints."""
    links = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        cells = line.split()
        if not cells or not re.fullmatch(r"GPU\d+", cells[0]) or "X" not in cells:
            continue
        row = int(cells[0][3:])
        for column, cell in enumerate(cells[1:]):
            if re.fullmatch(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS", cell) is None:
                break
            links[row, column] = "none" if cell == "X" else "NVLink" if cell.startswith("NV") else "PCIe"
    return links


@functools.cache  # nvidia-smi takes a second, and hardware stays
def nvidia_links() -> dict[tuple[int, int], str]:
    """Links between the GPUs of this host; empty where nvidia-smi cannot say."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_nvidia_topology(done.stdout) if done.returncode == 0 else {}


def physical_device(index: int, env: Mapping[str, str] = os.environ) -> int:
    """nvidia-smi's number of the GPU that this process calls `index` (the same, where CUDA_VISIBLE_DEVICES holds no numbers)."""
    visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return int(visible[index]) if index < len(visible) and visible[index].strip().isdecimal() else index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Host and device number of every rank, and the GPU links of one host (hosts are taken to be alike)."""

    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    links: Mapping[tuple[int, int], str]
    on_gpu: bool

    def link(self, a: int, b: int) -> str:
        """The link between two ranks, one of `LINKS`."""
        if a == b:
            return "none"
        if self.hosts[a] != self.hosts[b]:
            return "network"
        return self.links.get((self.devices[a], self.devices[b]), "unknown") if self.on_gpu else "shared memory"

    def slowest(self, ranks: Sequence[int]) -> str:
        """The slowest link among all pairs of `ranks`."""
        if len({self.hosts[rank] for rank in ranks}) > 1:
            return "network"
        return max((self.link(a, b) for a in ranks for b in ranks), key=LINKS.index, default="none")

    def outside_nvlink(self, groups: Sequence[Sequence[int]]) -> Sequence[int] | None:
        """The first of `groups` that leaves its NVLink domain; without GPUs, its host."""
        slow = LINKS[LINKS.index("PCIe" if self.on_gpu else "network") :]
        return next((ranks for ranks in groups if self.slowest(ranks) in slow), None)

    def domain_size(self, groups: Sequence[Sequence[int]]) -> int:
        """How many ranks of a group are in each NVLink domain (without GPUs: on each host), next to one another; 1 where they are not, or
        domains have unlike numbers of them. All of `groups` are equally long."""
        size = next((n for n, rank in enumerate(groups[0]) if self.outside_nvlink([[groups[0][0], rank]])), len(groups[0]))
        firsts = [list(group[::size]) for group in groups]
        runs = [group[start : start + size] for group in groups for start in range(0, len(group), size)]
        alike = len(groups[0]) % size == 0 and self.outside_nvlink(runs) is None
        apart = all(self.outside_nvlink([[a, b]]) for line in firsts for a, b in itertools.combinations(line, 2))
        return size if alike and apart else 1

    def slowest_of(self, groups: Sequence[Sequence[int]]) -> str:
        """The slowest link inside any of `groups`."""
        return max((self.slowest(group) for group in groups), key=LINKS.index)
