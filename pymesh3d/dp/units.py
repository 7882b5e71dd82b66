"""Parameters that are whole only while a module needs them, as in stage 3: gathered before each pass through it, and let go after."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pymesh3d.dp.buckets import Bucket
from pymesh3d.dp.exchange import Exchange
from pymesh3d.dp.outputs import tensors_in
from pymesh3d.errors import ConfigError
from pymesh3d.placement import place, placement_of

Pass = tuple[str, "Unit"]  # "forward" or "backward" through it


class Unit:
    """One module and the buckets of its parameters. Of each bucket this rank keeps a shard; `weights` has memory while it is whole."""

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], shards: Sequence[torch.Tensor], exchange: Exchange, rank: int, *, name: str = ""
    ) -> None:
        """`shards`: memory for those. `name`: of the module, in errors."""
        self.module, self.buckets, self.shards, self.name = module, buckets, shards, name
        self.parameters = {id(slot.parameter) for bucket in buckets for slot in bucket.slots}
        self._memory = torch.empty(
            sum(bucket.size * bucket.dtype.itemsize for bucket in buckets), dtype=torch.uint8, device=shards[0].device
        )
        pieces = self._memory.split([bucket.size * bucket.dtype.itemsize for bucket in buckets])
        self._whole = [piece.view(bucket.dtype) for piece, bucket in zip(pieces, buckets, strict=True)]
        for bucket, flat, shard in zip(buckets, self._whole, shards, strict=True):
            bucket.hold_weights(flat)
            shard.copy_(bucket.shard(flat, rank))
        self._shown = [bucket.parts(flat) for bucket, flat in zip(buckets, self._whole, strict=True)]
        self._hidden = [flat.new_empty(0) for flat in self._whole]
        self._gathering = exchange.gathering(list(zip(shards, self._whole, strict=True)))
        self.held, self._pending = True, False
        self.pinned = False  # within `whole`
        self.readers = 0  # calls of `state_dict` and `load_state_dict` that are under way
        self.missing: set[int] | None = None  # parameters whose gradients the backward pass that is under way has not computed yet
        self.let_go()

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather it, if it is not whole."""
        if self.held:
            return
        self.held = self._pending = True
        self._memory.untyped_storage().resize_(self._memory.numel())
        self._gathering.start()

    def finish(self) -> None:
        """What is enqueued from now on finds it whole."""
        assert self.held, "it has been started"
        if self._pending:
            self._pending = False
            self._gathering.finish()
            for bucket, flat, parts in zip(self.buckets, self._whole, self._shown, strict=True):
                bucket.show_weights(flat, parts)

    def let_go(self) -> None:
        """Keep the shards only."""
        if self._pending:
            self.finish()
        for bucket, nothing in zip(self.buckets, self._hidden, strict=True):
            bucket.show_weights(nothing)
        self._memory.untyped_storage().resize_(0)
        self.held = False

    @torch.no_grad()
    def take_over(self, rank: int) -> None:
        """Give this rank's shards the values that the parameters have."""
        for bucket, shard, flat in zip(self.buckets, self.shards, self._whole, strict=True):
            shard.copy_(bucket.shard(flat, rank))


class Units:
    """All of them. While one computes, the one that came after it the last time is gathered already.

    `once`: what a pass has gathered stays until the step, for pipelines, where several microbatches go through in turns.
    """

    def __init__(self, units: Sequence[Unit], exchange: Exchange, rank: int, *, once: bool) -> None:
        self._units, self._exchange, self._rank, self._once = units, exchange, rank, once
        self.open = False  # within `whole`
        self._after: dict[Pass, Pass] = {}
        self._latest: Pass | None = None
        for unit in units:
            unit.module.register_forward_pre_hook(functools.partial(self._before_forward, unit))
            unit.module.register_forward_hook(functools.partial(self._after_forward, unit))
            for bucket in unit.buckets:
                for slot in bucket.slots:
                    slot.node.register_hook(functools.partial(self._arrived, unit, id(slot.parameter)))
            for inner in unit.module.modules():
                if inner is unit.module or next(inner.parameters(recurse=False), None) is not None:
                    self._keep_whole_in_dicts(unit, inner)

    def _keep_whole_in_dicts(self, unit: Unit, inner: nn.Module) -> None:
        """`state_dict` and `load_state_dict` of a module within the unit, and of all around it, find it whole. All ranks must call."""

        def gather(*_: object) -> None:
            unit.readers += 1  # modules call those within them
            unit.start()
            unit.finish()
            if unit.readers == 1:
                self._exchange.meet()  # before any rank changes its shard

        def copy(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
            unit.readers -= 1
            if not unit.readers:
                for name, value in state.items():
                    if name.startswith(prefix) and (not isinstance(value, nn.Parameter) or id(value) in unit.parameters):
                        state[name] = _copy(value)  # what is returned must not be let go
                self._let_go_if_unused(unit)

        def take_over(*_: object) -> None:
            unit.readers -= 1
            if not unit.readers:
                unit.take_over(self._rank)
                self._exchange.meet()
                self._let_go_if_unused(unit)

        inner.register_state_dict_pre_hook(gather)
        inner.register_state_dict_post_hook(copy)
        inner.register_load_state_dict_pre_hook(gather)
        inner.register_load_state_dict_post_hook(take_over)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters are whole within; what is written into them counts. All ranks must enter."""
        if self.open:  # once more
            yield
            return
        self.open = True
        for unit in self._units:
            unit.pinned = True
            unit.start()
            unit.finish()
        self._exchange.meet()  # before any rank changes its shard
        try:
            yield
        finally:
            self.open = False
            for unit in self._units:
                unit.take_over(self._rank)
                unit.pinned = False
                self._let_go_if_unused(unit)
            self._exchange.meet()

    def let_go(self) -> None:
        """Let go of all: their values are about to change."""
        self._latest = None
        for unit in self._units:
            unit.missing, unit.readers, unit.pinned = None, 0, False
            if unit.held:
                unit.let_go()

    def _let_go_if_unused(self, unit: Unit) -> None:
        if not self._once and unit.missing is None and not unit.pinned:
            unit.let_go()

    def _enter(self, this: Pass) -> None:
        unit = this[1]
        unit.start()
        unit.finish()
        if self._latest is not None:
            self._after[self._latest] = this
        self._latest = this
        if this in self._after:
            self._after[this][1].start()

    def _before_forward(self, unit: Unit, *_: object) -> None:
        if unit.missing is None:  # else backward computes it again
            self._enter(("forward", unit))

    def _after_forward(self, unit: Unit, _: object, __: object, output: object) -> None:
        if unit.missing is not None:
            return
        found = None
        if torch.is_grad_enabled():
            found = list(tensors_in(output))
            for tensor in found:
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._before_backward(unit))
            if found and self._after.get(("forward", unit)) == ("backward", unit):
                return
        self._let_go_if_unused(unit)
        if found == [] and not unit.held:
            raise ConfigError(
                f"{unit.name or 'a module'} ({type(unit.module).__name__}) has returned a {type(output).__name__} without tensors",
                "backward finds what stage 3 has to gather for it by the tensors that each of `units` returns, in containers, dataclasses "
                "or attributes of objects",
                "Return what it computes, choose other units, use once_a_step=True, or switch gradients off with torch.no_grad()",
            )

    @torch.no_grad()
    def _before_backward(self, unit: Unit) -> None:
        if unit.missing is None:
            unit.missing = set(unit.parameters)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._after_backward(unit))
            self._enter(("backward", unit))

    @torch.no_grad()
    def _arrived(self, unit: Unit, parameter: int, *_: object) -> None:
        if unit.missing is not None:
            unit.missing.discard(parameter)
            if not unit.missing:
                self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        if unit.missing is not None:
            unit.missing = None
            self._let_go_if_unused(unit)


def _copy(value: Any) -> Any:
    """Of a value in a state dict: with what says where it lives, if it is a parameter itself."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    if isinstance(value, nn.Parameter):
        copy = nn.Parameter(copy, requires_grad=value.requires_grad)
        place(copy, placement_of(value))
    return copy


def find_units(module: nn.Module) -> list[nn.Module]:
    """The modules that a model keeps in lists, dicts and sequences, as its layers; of nested ones the outermost."""
    found: list[nn.Module] = []

    def look(container: nn.Module, listed: bool) -> None:
        for child in container.children():
            inner = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                found.append(child)
            else:
                look(child, inner)

    look(module, isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential))
    return found
