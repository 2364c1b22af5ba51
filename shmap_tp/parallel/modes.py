"""The wires there are, by the name of their configuration."""

from shmap_tp.config.schema import TensorParallelMode
from shmap_tp.parallel.collective_matmul import CollectiveMatmul
from shmap_tp.parallel.tensor_parallel import AllReduce, SequenceParallel

TensorParallel = AllReduce | SequenceParallel | CollectiveMatmul


TENSOR_PARALLEL: dict[TensorParallelMode, TensorParallel] = {
    TensorParallelMode.all_reduce: AllReduce(),
    TensorParallelMode.sequence: SequenceParallel(),
    TensorParallelMode.collective_matmul: CollectiveMatmul(),
}
