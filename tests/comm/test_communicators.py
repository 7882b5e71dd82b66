"""C36: all communicators are made at start, and ranks that are out of step go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import two_ranks

STEPS = """
import glob, json, math, sys, time, torch, pymesh3d

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
if mesh.rank == 1:
    time.sleep(5)  # the other is in its first forward meanwhile
losses = [engine.train_step(batch).loss for _ in range(int(sys.argv[3]))]
assert all(map(math.isfinite, losses)), losses
engine.eval_step(batch)
counts.append(communicators())
mesh.close()
print(*counts, flush=True)
"""


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("run", "steps"),
    [
        ('[{"pp": 2}, {}, true]', 3),
        ('[{"pp": 2}, {"schedule": "interleaved", "virtual_pp": 2}, false]', 200),
        ('[{"tp": 2}, {"sequence_parallel": true}, true]', 3),
        ('[{"dp": 2}, {}, false]', 3),
    ],
)
def test_no_communicator_is_made_after_the_start(tmp_path: Path, run: str, steps: int) -> None:
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(tmp_path / "rankRANK.%p")}
    with two_ranks(STEPS, run, str(tmp_path), str(steps), **log) as ranks:
        for process in ranks:
            told, _ = process.communicate(timeout=100)
            assert process.returncode == 0
            at_start, after_steps = map(int, told.split()[-2:])
            assert at_start == after_steps > 0
