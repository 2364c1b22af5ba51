"""The layers.  Each computes on its own shard; the block that owns them enters and leaves the parallel region."""
