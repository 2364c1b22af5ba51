"""Ahead of time: what a step would cost on a slice that is not here, and what it says on the wire."""
