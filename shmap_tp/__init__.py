"""Tensor-parallel transformer training in JAX: every layer under `shard_map`, every collective written by hand."""
