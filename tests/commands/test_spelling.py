"""What the library says as fields is said as options, and nothing else is changed."""

from __future__ import annotations

import itertools

import pytest

from pymesh3d.cli import parser
from pymesh3d.commands.spelling import as_typed, fields_of, option_of
from pymesh3d.config import Layout, TrainConfig
from pymesh3d.errors import ConfigError

TRAIN = vars(parser().parse_args(["train"]))
HINT = " (names in quotes are fields of the file that --model takes)"


@pytest.mark.parametrize(
    ("given", "rule", "instead", "typed"),
    [
        ("global_batch=10, dp=4", "dp must divide global_batch", "Use global_batch=12",
         "--global-batch-size 10, --dp 4: dp must divide --global-batch-size. Use --global-batch-size 12"),
        ("seq=7, tp=2, sequence_parallel=True", "tp must divide seq, so", "Use seq=8, or sequence_parallel=False",
         "--seq 7, --tp 2, --sequence-parallel: tp must divide seq, so. Use --seq 8, or no --sequence-parallel"),
        ("max_norm=-1.0", "max_norm must be above 0", "Use max_norm=None to switch clipping off",
         "--max-norm -1.0: --max-norm must be above 0. Use --max-norm 0 to switch clipping off"),
        ("reduce_dtype='x'", "no", "Use reduce_dtype=None", "--reduce-dtype x: no. Use no --reduce-dtype"),
        ("zero_stage=2, zero_once_a_step=False", "no", "Use zero_once_a_step=True",
         "--zero-stage 2, --no-zero-once-a-step: no. Use --zero-once-a-step"),
        ("zero_once_a_step=None", "no", "No", "no --zero-once-a-step: no. No"),
        ("tied=True, pp=2", "no", "Use tied=False, or pp=1.", f'"tied": true, --pp 2: no. Use "tied": false, or --pp 1.{HINT}'),
        ("heads=4, dim='x'", "dim must be heads", "Try it", '"heads": 4, "dim": "x": dim must be heads. Try it'),
        ("data='my file, a.txt', seq=8", "it is empty (seq=8)", "No", "--data my file, a.txt, --seq 8: it is empty (--seq 8). No"),
        ('data="it\'s"', "gone", "No", "--data it's: gone. No"),
        ("resume='lr=0.01' with corpus='9 bytes of seq=8.txt'", "no", "No", "--resume lr=0.01 with corpus='9 bytes of seq=8.txt': no. No"),
        ("pp=-1 and dp=-1", "at most one can be left open", "No", "--pp -1 and --dp -1: at most one can be left open. No"),
        # What only looks like a field stays: paths, quoted texts, names of nothing, values of other records, text that is typed already.
        ("a folder/max_norm=3 in /log_json/x", "rank's 'max_norm=1' is \"log_json\"", "betas=(0.9, 0.95), x=3",
         "a folder/max_norm=3 in /log_json/x: rank's 'max_norm=1' is \"log_json\". betas=(0.9, 0.95), x=3"),
        ("--save log_json", "max_norm=3", "seq=3", "--save log_json: max_norm=3. seq=3"),
        ("the data", "a seed must fit", "See the steps", "the data: a seed must fit. See the steps"),
    ],
)  # fmt: skip
def test_fields_are_spelled_as_options(given: str, rule: str, instead: str, typed: str) -> None:
    assert as_typed(ConfigError(given, rule, instead), TRAIN) == typed


def test_only_options_that_the_command_has() -> None:
    draw = vars(parser().parse_args(["draw"]))
    assert as_typed(ConfigError("pp=0, microbatches=0, seq=3", "no", "Try pp=1"), draw) == "--pp 0, --microbatches 0, seq=3: no. Try --pp 1"


def test_every_field_of_the_command_line_is_found_under_its_option() -> None:
    typed = "--global-batch-size 6 --micro-batch-size 3 --tp 2 --reduce-dtype fp32 --virtual-pp 1"
    args = parser().parse_args(["train", *typed.split()])
    fields = fields_of(TrainConfig, vars(args))
    assert (fields["global_batch"], fields["micro_batch"], fields["reduce_dtype"]) == (6, 3, "float32")
    assert TrainConfig(**fields).seq == TrainConfig().seq and not {"betas", "tp", "model"} & fields.keys()
    assert fields_of(Layout, vars(args)) == {"tp": 2, "pp": 1, "dp": None, "cp": 1}


def test_options_are_the_parsers_own() -> None:
    """Each spelling is one that the parser understands."""
    given = {**fields_of(TrainConfig, TRAIN), **fields_of(Layout, TRAIN), "dp": 4, "reduce_dtype": "float64", "virtual_pp": 2}
    given |= {"accumulate_dtype": "float32", "zero_once_a_step": True, "optimizer_offload": True}
    words = [[option_of(field)] if isinstance(value, bool) else [option_of(field), str(value)] for field, value in given.items()]
    args = parser().parse_args(["train", *itertools.chain.from_iterable(words)])
    assert (args.dp, args.reduce_dtype, args.compile, args.micro_batch_size) == (4, "float64", True, TrainConfig().micro_batch)
    assert args.virtual_pp == 2 and args.accumulate_dtype == "float32" and args.zero_once_a_step is True and args.optimizer_offload is True
    assert parser().parse_args(["train", "--no-zero-once-a-step"]).zero_once_a_step is False
