"""The layers.  Each computes on its own shard and communicates by the tensor-parallel mode that it is called with."""
