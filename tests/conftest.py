"""Eight emulated CPU devices, asked for before anything uses the backend."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
