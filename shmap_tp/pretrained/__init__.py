"""Hugging Face checkpoints in and out: read onto any mesh, written from any mesh, two tables per model family."""
