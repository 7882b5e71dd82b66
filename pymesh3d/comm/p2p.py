"""The links between neighbouring pipeline stages: all are made and used once at start, in one global order."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import warnings
from collections.abc import Callable, Sequence

import torch

from pymesh3d.axis import named
from pymesh3d.comm import native
from pymesh3d.comm.agree import exchange_text
from pymesh3d.comm.links import Expected, Link, NcclLink, TorchLink
from pymesh3d.comm.watch import on_host
from pymesh3d.errors import ConfigError
from pymesh3d.mesh import Mesh

VARIABLE = "PYMESH3D_P2P"  # of the environment; it forces one of `TRANSPORTS`
TRANSPORTS = ("nccl", "torch")
WARM = 8  # numbers that each end sends at first

Pairs = Sequence[Sequence[int]]


class Links:
    """The links of one rank of a pipeline: to the rank before and to the rank after, None at the ends.

    On CUDA they run over our NCCL bindings where those are built, and find the NCCL that torch has, on every rank; elsewhere over
    torch.distributed. PYMESH3D_P2P=nccl or =torch forces one. Raises ConfigError, on all ranks, where a rank asks for what cannot be.
    """

    def __init__(self, mesh: Mesh, *, ring: bool = False) -> None:
        """`ring`: the last rank is joined with the first one too, for ranks that hold several stages. Made once a mesh, they are shared."""
        self.before: Link | None = None
        self.after: Link | None = None
        self.mesh = mesh
        size = mesh.pp.size
        joined = [[rank, (rank + 1) % size] for rank in range(size if ring and size > 1 else size - 1)]
        lines = mesh.along("pp")
        links: list[Link | None] = []
        if joined:
            over = _transport(mesh)
            links = mesh.keep((Links, ring, over), lambda: open_links(mesh, [lines[:, pair].tolist() for pair in joined], over))
        for (before, after), link in zip(joined, links, strict=True):
            if mesh.pp.rank == before:
                self.after = link
            elif mesh.pp.rank == after:
                self.before = link

    def flush(self) -> None:
        """Wait until all that was sent has left; on CUDA the current stream waits, not the host."""
        for link in (self.before, self.after):
            if link is not None:
                link.flush()


@dataclasses.dataclass(frozen=True)
class Wish:
    """Which transport the environment of a rank forces, and why the rank cannot use our NCCL bindings; empty where nothing does."""

    forced: str
    missing: str

    @staticmethod
    def of(device: torch.device) -> Wish:
        """This rank's, for links on `device`."""
        return Wish(os.environ.get(VARIABLE, ""), "it needs GPUs" if device.type != "cuda" else native.no_nccl())


def agreed_transport(wishes: Sequence[Wish]) -> tuple[str, str]:
    """Which of `TRANSPORTS` all ranks use: NCCL where each of them can. With it why some, that could, do not. Raises ConfigError."""
    forces = {wish.forced: rank for rank, wish in reversed([*enumerate(wishes)]) if wish.forced}
    for word, rank in forces.items():
        if word not in TRANSPORTS:
            raise ConfigError(f"{VARIABLE}={word} on rank {rank}", "no such transport", f"Use {' or '.join(TRANSPORTS)}, or leave it unset")
    against = {rank: f"{VARIABLE}=torch" if wish.forced == "torch" else wish.missing for rank, wish in enumerate(wishes)}
    against = {rank: why for rank, why in against.items() if why}
    first = next((f"rank {rank} cannot: {why}" for rank, why in against.items()), "")
    if first and "nccl" in forces:
        raise ConfigError(f"{VARIABLE}=nccl on rank {forces['nccl']}", first, f"Use {VARIABLE}=torch on all ranks, or leave it unset")
    return ("torch" if first else "nccl"), (first if len(against) < len(wishes) else "")


def _transport(mesh: Mesh) -> str:
    """The same on all ranks, which must all call."""
    texts = exchange_text(json.dumps(dataclasses.astuple(Wish.of(mesh.device))), mesh, "agreeing on the transport of links")
    over, why = agreed_transport([Wish(*json.loads(text)) for text in texts])
    if why and mesh.rank == 0:
        warnings.warn(f"stages send over torch.distributed instead of NCCL, because {why}", stacklevel=2)
    return over


def open_links(mesh: Mesh, wanted: Sequence[Pairs], over: str) -> list[Link | None]:
    """Links in the order in which they are wanted, each used once: disjoint pairs of a stage's rank and the next one's.

    All ranks of the mesh must call with the same. Returns for each the end that this rank has, or None.
    """
    opened = _over_nccl(mesh, wanted) if over == "nccl" else _over_torch(mesh)
    links: list[Link | None] = []
    for number, pairs in enumerate(wanted):
        link = opened(number, pairs)
        if link is not None:
            _use_once(link, mesh, next(pair for pair in pairs if mesh.rank in pair))
        links.append(link)
    return links


def _names(first: bool) -> dict[str, str]:
    return {"sends": "activations", "receives": "gradients"} if first else {"sends": "gradients", "receives": "activations"}


def _over_torch(mesh: Mesh) -> Callable[[int, Pairs], Link | None]:
    def opened(_: int, pairs: Pairs) -> Link | None:
        lines = [*mesh.new_lines("pp", pairs), *mesh.new_lines("pp", [pair[::-1] for pair in pairs])]
        if not lines:
            return None
        forth, back = lines  # one a direction, the sender first
        out, into = (forth, back) if forth.rank == 0 else (back, forth)
        return TorchLink(out, into, **_names(forth.rank == 0), device=mesh.device)

    return opened


def _over_nccl(mesh: Mesh, wanted: Sequence[Pairs]) -> Callable[[int, Pairs], Link | None]:
    gpu, nccl = native.libraries()
    leads = [any(pair[0] == mesh.rank for pair in pairs) for pairs in wanted]
    ids = exchange_text(" ".join(nccl.unique_id().hex() if lead else "none" for lead in leads), mesh, "exchanging ids of links")

    def opened(number: int, pairs: Pairs) -> Link | None:
        pair = next((pair for pair in pairs if mesh.rank in pair), None)
        if pair is None:
            return None
        line = mesh.line("pp", pair, mesh.pp.group)
        unique = bytes.fromhex(ids[pair[0]].split()[number])
        with named("connecting stages", line):
            end = native.link(gpu, nccl, unique, line.ranks, line.rank, mesh.device, timeout=mesh.timeout.total_seconds())
        mesh.watched.insert(0, end)  # before the groups: NCCL ends those only when nothing else hangs on the GPU
        # What torch.cuda.current_stream(device).cuda_stream is, without making an object for each transfer.
        stream = functools.partial(torch._C._cuda_getCurrentRawStream, mesh.device.index)
        return NcclLink(end, line, **_names(line.rank == 0), device=mesh.device, stream=stream)

    return opened


def _use_once(link: Link, mesh: Mesh, pair: Sequence[int]) -> None:
    """Send some numbers both ways, so that the connection stands before anybody computes."""
    numbers = torch.zeros(WARM, device=mesh.device)
    expected = Expected((WARM,), numbers.dtype, 0)
    if mesh.rank == pair[0]:
        link.send(numbers, 0)
        link.post(expected)
    else:  # the other way round: torch's NCCL connects the ranks of a direction when it is first used, and both must begin with the same
        link.post(expected)
        link.send(numbers, 0)
    link.flush()
    on_host(link.take(), f"the first message between ranks {pair[0]} and {pair[1]}", mesh.all)
