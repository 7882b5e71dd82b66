"""All-gather by the copy engines: nothing that computes makes room for it, as it must for NCCL's kernel."""

from __future__ import annotations

import torch

from pymesh3d.axis import Axis
from pymesh3d.comm.collectives import Pending
from pymesh3d.comm.native import copier
from pymesh3d.comm.workspace import Workspace
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import wait_for_ranks_kernel

HALF, WORD = 1 << 31, 1 << 32  # of the numbers that a flag can hold


class Copied(Pending):
    """Its tensor stands as long as it is not `overwritten`."""

    overwritten = False


class CopiedGather(Workspace):
    """What all-gathers along one axis, from one stream, share: the memory that each rank's part is copied to, on all ranks.

    Call by call the other half of it is used. A rank copies into what call n - 2 has left once its stream has waited for call n - 1, whose
    rows the others gave away after all that read call n - 2: so nobody needs to be asked.
    """

    def __init__(self, op: str, axis: Axis, device: torch.device) -> None:
        super().__init__(op, axis, device)
        self._copier = copier() if device.type == "cuda" else None
        if device.type == "cuda" and self._copier is None:
            self.refused = "the compiled part has no copy engines here"
        self._of: Slots | None = None  # the memory in which calls are counted, and copied to
        self._calls = 0
        self._order = [
            (axis.rank + turn) % axis.size for turn in range(1, axis.size + 1)
        ]  # of the ranks: the next one first, this one last
        self._places: list[tuple[int, int]] = []  # where on each of them the memory begins, and the flag is; 0 here
        self._last: Copied | None = None

    def start(self, x: torch.Tensor) -> Copied:
        """The ranks' x [rows, ...], contiguous, in rank order. What reads the result must be enqueued before the next start.

        Raises ConfigError while a CUDA graph is captured, and SharingError where ranks cannot share so much.
        """
        if self._last is not None:
            self._last.wait()  # if nobody has: then the others have read what this will write over
            self._last.overwritten = True
        size = x.numel() * x.element_size()
        slots = self.slots(self._axis.size * size, 1)
        if slots is not self._of:
            self._of, self._calls = slots, 0
            self._look_up_places()
        self._calls += 1
        call = (self._calls + HALF) % WORD - HALF
        first = self._calls % 2 * slots.size
        self._copy(x, first + self._axis.rank * size, call)
        gathered = self.parts[self._axis.rank][first : first + self._axis.size * size].view(x.dtype)
        self._last = Copied(gathered.view(self._axis.size * x.shape[0], *x.shape[1:]), lambda: self._finish(x, slots, call))
        return self._last

    def _look_up_places(self) -> None:
        flags = [0 if rank == self._axis.rank else self.flag(rank).data_ptr() for rank in self._order]
        self._places = [(self.parts[rank].data_ptr(), flag) for rank, flag in zip(self._order, flags, strict=True)]

    def _copy(self, x: torch.Tensor, begin: int, call: int) -> None:
        """To its place on all ranks. The others are told."""
        size = x.numel() * x.element_size()
        if self._copier is not None:
            targets = [(memory + begin, flag) for memory, flag in self._places]
            self._copier.start(x.data_ptr(), size, targets, call % WORD, torch._C._cuda_getCurrentRawStream(x.device.index))
            return
        for rank in self._order:
            self.parts[rank][begin : begin + size].copy_(x.view(-1).view(torch.uint8))
            if rank != self._axis.rank:
                self.flag(rank).fill_(call)

    def _finish(self, x: torch.Tensor, slots: Slots, call: int) -> None:
        """The current stream goes on when x has been copied and the others' parts are here."""
        if self._copier is not None:
            self._copier.join(torch._C._cuda_getCurrentRawStream(x.device.index))
        axis, counters = self._axis, self.counters
        patience = int(axis.timeout.total_seconds() * 1e9)
        wait_for_ranks_kernel[(1,)](slots.flags, counters.trouble, counters.told, axis.rank, slots.length, call, patience, axis.size)
