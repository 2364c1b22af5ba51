"""Eight emulated CPU devices, shapes and types checked at every call: all set before shmap_tp or a backend is touched.

Programs are compiled as in a run up to the machine code, which LLVM leaves unoptimised here: the HLO, and so every
collective, is the same, and compiling takes a third of the time.  Compiled programs are kept between test runs.
"""

from pathlib import Path

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
install_import_hook("shmap_tp", "beartype.beartype")
