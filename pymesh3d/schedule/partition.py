"""Cuts a model's layers into pipeline stages: by cost, and by the memory each stage needs at its peak."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from pymesh3d.config import require_positive
from pymesh3d.errors import ConfigError

Amount = Callable[[int, int, int], float]  # of a stage with layers start to stop (exclusive): (stage, start, stop) -> cost or memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What stages need at their peak, in any one unit, and how much of it a rank has.

    Of a layer: `static` is there all the time (parameters, gradients, optimizer state), `activations` once per microbatch in flight.
    `in_flight` is the largest number of microbatches in flight per stage (`Timeline.in_flight`). `first` and `last` are what the first
    and the last stage need besides layers (embedding; norm and head).
    """

    static: Sequence[float]
    activations: Sequence[float]
    in_flight: Sequence[int]
    limit: float
    first: float = 0.0
    last: float = 0.0


def partition(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, memory: Memory | None = None) -> list[range]:
    """The layers of each stage: contiguous, at least one each. The most costly stage costs least, and none exceeds `memory.limit`.

    `costs` has one number a layer; `first` is the cost of the embedding (on the first stage), `last` that of norm and head (on the last).
    Among equally good cuts the most even one is taken, and among those the one with more layers on earlier stages, so layers of the
    same cost make stages whose sizes differ by at most one, the larger first.

    Raises ConfigError for fewer layers than stages, for costs that are none, and when no cut fits.
    """
    layers = len(costs)
    require_positive("stages", stages)
    require_positive("layers", layers)
    _require_amounts("cost", costs, layers, [first, last])
    if layers < stages:
        raise ConfigError(f"layers={layers}, stages={stages}", "each stage needs at least one layer", f"Use {layers} stages or less")
    if memory is not None:
        _require_amounts("static memory", memory.static, layers, [memory.first, memory.last])
        _require_amounts("activation memory", memory.activations, layers, [memory.limit, *memory.in_flight])
        if len(memory.in_flight) != stages:
            raise ConfigError(f"{len(memory.in_flight)} numbers in_flight", f"there are {stages} stages", f"Give {stages} of them")

    *whole, whole_first, whole_last = _whole_numbers([*costs, first, last])
    cost = _of_stage(whole, [0] * layers, [1] * stages, whole_first, whole_last)
    need = _of_stage(memory.static, memory.activations, memory.in_flight, memory.first, memory.last) if memory else None
    limit = memory.limit if memory else math.inf

    def fits(stage: int, start: int, stop: int) -> bool:
        return need is None or need(stage, start, stop) <= limit

    fair = _best_cut(layers, stages, lambda *cut: cost(*cut) if fits(*cut) else None, max)
    if fair is None:
        assert memory is not None and need is not None, "without a memory limit every cut fits"
        raise _refusal(memory, layers, need)
    most = max(cost(stage, cut.start, cut.stop) for stage, cut in enumerate(fair))
    # The least sum of squares under that maximum is the most even cut.
    even = _best_cut(layers, stages, lambda *cut: cost(*cut) ** 2 if cost(*cut) <= most and fits(*cut) else None, operator.add)
    assert even is not None, "the cut that gave the maximum stays within it"
    return even


def _of_stage(fixed: Sequence[float], repeated: Sequence[float], times: Sequence[int], first: float, last: float) -> Amount:
    """The sum over a stage's layers of `fixed` and, as many times as the stage has `times`, of `repeated`; plus what stands at the ends."""
    fixed_before, repeated_before = [0, *accumulate(fixed)], [0, *accumulate(repeated)]

    def amount(stage: int, start: int, stop: int) -> float:
        ends = (first if stage == 0 else 0) + (last if stage == len(times) - 1 else 0)
        return ends + fixed_before[stop] - fixed_before[start] + times[stage] * (repeated_before[stop] - repeated_before[start])

    return amount


def _best_cut(
    layers: int, stages: int, value: Callable[[int, int, int], float | None], join: Callable[[float, float], float]
) -> list[range] | None:
    """The cut whose stages' values join to the least; among equals the one with more layers on earlier stages.

    `value` is None for a stage that may not be, and there is no cut (None) if every one has such a stage. When a stage takes more layers,
    its value must neither fall nor come back from None. `join` is max or a sum.
    """
    best: dict[int, float] = {layers: 0}  # where the stages from here on start -> what they join to at best
    stops: list[dict[int, int]] = []  # for each stage: where it starts -> where it then stops
    for stage in reversed(range(stages)):
        after, best, stop_at = best, {}, {}
        for start in range(stage, layers):
            for stop in range(start + 1, layers + 1):
                own = value(stage, start, stop)
                if own is None or own > best.get(start, own):
                    break
                if stop in after and join(own, after[stop]) <= best.get(start, math.inf):
                    best[start], stop_at[start] = join(own, after[stop]), stop
        stops.insert(0, stop_at)
    if 0 not in best:
        return None
    cuts = [range(0)]
    for stop_at in stops:
        cuts.append(range(cuts[-1].stop, stop_at[cuts[-1].stop]))
    return cuts[1:]


def _refusal(memory: Memory, layers: int, need: Amount) -> ConfigError:
    """What to say when no cut fits: the stage that stands in the way even in the cut that needs least."""
    least = _best_cut(layers, len(memory.in_flight), need, max)
    assert least is not None, "a cut exists, there are at least as many layers as stages"
    tightest = max(range(len(least)), key=lambda stage: need(stage, least[stage].start, least[stage].stop))
    wanted = need(tightest, least[tightest].start, least[tightest].stop)
    return ConfigError(
        f"memory limit {memory.limit:g}, {layers} layers, {len(least)} stages",
        f"no cut fits: at best stage {tightest} needs {wanted:g} (layers {least[tightest].start} to {least[tightest].stop - 1}, "
        f"{memory.in_flight[tightest]} microbatches in flight)",
        f"Use a limit of {wanted}, more stages, smaller microbatches, or recompute",
    )


def _whole_numbers(numbers: Sequence[float]) -> list[int]:
    """`numbers` times a common power of two that makes them whole: sums are then exact, and equal costs stay equal."""
    ratios = [float(number).as_integer_ratio() for number in numbers]
    scale = max(denominator for _, denominator in ratios)
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _require_amounts(what: str, per_layer: Sequence[float], layers: int, others: Sequence[float]) -> None:
    """Refuse a wrong number of layers and amounts that are no amounts. Raises ConfigError."""
    if len(per_layer) != layers:
        raise ConfigError(f"{what} of {len(per_layer)} layers", f"there are {layers} layers", "Give one number a layer")
    for amount in (*per_layer, *others):
        if not (math.isfinite(amount) and amount >= 0):
            raise ConfigError(f"{what} {amount}", "it must be finite and not negative", "Give one number a layer, 0 or more")
