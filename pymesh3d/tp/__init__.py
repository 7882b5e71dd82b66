"""Tensor parallelism: layers, the vocabulary-parallel loss, and a plan that puts them into an existing model."""
