"""All-gather by the copy engines, which take no processor from what the GPU computes meanwhile, as NCCL's kernel does. (1B model, tp 2 on
2 x H200, 33 MB of each rank under GEMM + reduce-scatter: NCCL's took 322 us, these 115, and the step 515 ms, then 500.)
"""

from __future__ import annotations

import torch

from pymesh3d.axis import Axis, named
from pymesh3d.comm.collectives import Pending
from pymesh3d.comm.native import copier, steps
from pymesh3d.comm.workspace import Workspace, as_int32, raw_stream
from pymesh3d.triton_kernels.matmul_reduce_scatter import Slots
from pymesh3d.triton_kernels.signals import tell_ranks, wait_for_ranks

OPERATION = "all-gather"


class Copied(Pending):
    """Its tensor stands until the next start, which makes it `superseded`. It is waited for, and read, on the `stream` of its start."""

    stream = 0
    superseded = False


class CopiedGather(Workspace):
    """What all-gathers along one axis, from one stream, share: the memory that each rank's part is copied to, on all ranks.

    Call n uses half n % 2 of it. Before a rank copies, its stream has waited for call n - 1 of all ranks; each of them gave that away after
    all of its own reads of call n - 2, which were from the same half. So nobody needs to be asked.
    """

    def __init__(self, op: str, axis: Axis, device: torch.device) -> None:
        super().__init__(op, axis, device)
        self._copier = copier() if device.type == "cuda" else None
        if device.type == "cuda" and self._copier is None:
            self.refused = "the compiled part has no copy engines here"  # nor on any other rank of this host
        self._counted_in: Slots | None = None  # the memory to which `_calls` belongs
        self._calls = 0
        self._order = [*range(axis.rank + 1, axis.size), *range(axis.rank + 1)]  # the next rank first, this one last
        self._places: list[tuple[int, int]] = []  # where on each of them the memory begins, and this rank's flag is; 0 here
        self._last: Copied | None = None

    def start(self, x: torch.Tensor) -> Copied:
        """The ranks' x [rows, ...], contiguous, in rank order. What reads the result must be enqueued on this stream before the next start.

        Not while a CUDA graph is captured. Raises SharingError where ranks cannot share so much, DistributedError where the GPU refuses.
        """
        gpu = x.is_cuda
        assert x.is_contiguous() and not (gpu and torch.cuda.is_current_stream_capturing()), f"{tuple(x.shape)}, {x.stride()}"
        if self._last is not None:
            self._last.wait()  # if nobody has: then the others have read what this will write over
            self._last.superseded, self._last = True, None
        size = x.numel() * x.element_size()
        slots = self.slots(self._axis.size * size, 1)
        if slots is not self._counted_in:
            self._counted_in, self._calls = slots, 0
            flags = [0 if rank == self._axis.rank else self.flag_address(rank) for rank in self._order]
            self._places = [(self.parts[rank].data_ptr(), flag) for rank, flag in zip(self._order, flags, strict=True)]
        self._calls += 1
        call, half = as_int32(self._calls), self._calls % 2 * slots.size
        gathered = self.parts[self._axis.rank][half : half + self._axis.size * size].view(x.dtype)
        self._last = Copied(gathered.view(self._axis.size * x.shape[0], *x.shape[1:]), lambda: self._finish(x, slots, call))
        self._last.stream = raw_stream(x.device)
        begin = half + self._axis.rank * size
        if self._copier is not None:
            with named(OPERATION, self._axis):
                wanted = steps()
                for memory, flag in self._places:
                    wanted.copy(memory + begin, x.data_ptr(), size)
                    if flag:
                        wanted.tell(flag)
                self._copier.start(wanted, self._calls % (1 << 32), self._last.stream)
        else:
            for rank in self._order:
                self.parts[rank][begin : begin + size].copy_(x.view(-1).view(torch.uint8))
            tell_ranks(slots.flags, self._axis.rank, slots.length, call)
        return self._last

    def _finish(self, x: torch.Tensor, slots: Slots, call: int) -> None:
        """The current stream goes on when x has been copied and the others' parts are here. One program leaves room for any other kernel:
        this takes no turn.
        """
        axis = self._axis
        if self._copier is not None:
            with named(OPERATION, axis):
                self._copier.join(raw_stream(x.device))
        wait_for_ranks(slots.flags, self.counters, axis.rank, slots.length, call, axis.timeout.total_seconds())

    def _named(self, tile: int) -> str:
        return "its part"

    def close(self) -> None:
        """Give the memory back, when what was started has ended."""
        if self._last is not None:
            self._last.wait()
        if self._copier is not None:
            torch.cuda.synchronize(self._device)  # the others' copies come here, and the kernel above waits for them
        self._last = self._counted_in = None
        self._places = []
        super().close()
