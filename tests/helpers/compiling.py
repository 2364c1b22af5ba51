"""What makes XLA's compiler for CPU quick, in these processes and in those that they start."""

import jax

QUICK_TO_COMPILE = "--xla_cpu_parallel_codegen_split_count=1"
"""For XLA_FLAGS.  One LLVM module and, up to jax 0.10, fusions that are emitted without MLIR: later versions end at a
flag that they do not know.  The collectives do not depend on it."""
if jax.__version_info__ < (0, 11):
    QUICK_TO_COMPILE += " --xla_cpu_use_fusion_emitters=false"


def quick_environment() -> dict[str, str]:
    """Environment variables with which a process compiles quickly, and keeps its programs where these tests do."""
    given = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": QUICK_TO_COMPILE}
    if cache := jax.config.jax_compilation_cache_dir:
        given |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return given
