"""What makes XLA's compiler for CPU quick, in these processes and in those that they start."""

QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""For XLA_FLAGS.  Fusions are emitted without MLIR, in one LLVM module; the collectives do not depend on it."""
