"""Hugging Face checkpoints in and out: read onto any mesh, written from any mesh, one small file per model family."""
