"""Data parallelism with ZeRO: flat buckets, the sharded optimizer, and the norm that is also the vote on a step."""
