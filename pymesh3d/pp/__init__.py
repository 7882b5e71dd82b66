"""Pipeline parallelism: one stage's share of a model, and the interpreter of a schedule."""
