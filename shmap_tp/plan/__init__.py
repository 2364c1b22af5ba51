"""Ahead of time: what a step says on the wire, and what a machine would make of it."""
