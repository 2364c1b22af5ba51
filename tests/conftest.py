"""Eight emulated CPU devices, asked for before anything uses the backend."""

from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).resolve().parent.parent / ".cache/xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
