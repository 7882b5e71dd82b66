"""C36: all communicators are made at start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import two_ranks

STEPS = """
import glob, json, sys, torch, pymesh3d

axes, options, tied = json.loads(sys.argv[1])
mesh = pymesh3d.init_mesh(**axes, device="cuda", timeout_s=60)
config = pymesh3d.TrainConfig(seq=128, global_batch=16, micro_batch=2, dtype="bfloat16", **options)
model = pymesh3d.Llama(pymesh3d.ModelConfig(vocab=256, dim=256, layers=4, heads=4, kv_heads=1, ffn=512, tied=tied), device="meta")
engine = pymesh3d.parallelize(model, mesh, config)

def communicators():
    torch.cuda.synchronize()
    return sum(open(file).read().count("Init COMPLETE") for file in glob.glob(sys.argv[2] + f"/rank{mesh.rank}.*"))

counts = [communicators()]
tokens = torch.arange(16 * 128, device="cuda").view(16, 128) % 256
batch = [(part, part) for part in tokens.chunk(mesh.dp.size)][mesh.dp.rank]
for _ in range(3):
    engine.train_step(batch)
engine.eval_step(batch)
counts.append(communicators())
mesh.close()
print(*counts, flush=True)
"""


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "run",
    [
        '[{"pp": 2}, {}, true]',
        '[{"pp": 2}, {"schedule": "interleaved", "virtual_pp": 2}, false]',
        '[{"tp": 2}, {"sequence_parallel": true}, true]',
        '[{"dp": 2}, {}, false]',
    ],
)
def test_no_communicator_is_made_after_the_start(tmp_path: Path, run: str) -> None:
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(tmp_path / "rankRANK.%p")}
    with two_ranks(STEPS, run, str(tmp_path), **log) as ranks:
        for process in ranks:
            told, _ = process.communicate(timeout=100)
            assert process.returncode == 0
            at_start, after_steps = map(int, told.split()[-2:])
            assert at_start == after_steps > 0
