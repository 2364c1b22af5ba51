"""The names and types of everything that can be configured.  Values live in `conf/`, and only there.

Nothing here imports JAX: a configuration can be read, checked and printed on a machine that has no devices.
"""


class UserError(ValueError):
    """Something the user gave cannot be used.  The message is one or two lines: the rule, both numbers, the way out."""
