"""Plan a run before renting the devices: memory, communication and step time of a mesh, from ahead-of-time compilation.

Nothing in this package runs on an accelerator.
"""
