"""The sizes of a mesh as files and messages have them: cp only where it is more than 1."""

from collections.abc import Sequence

from shmap_tp.config.schema import MeshConfig


def mesh_shape(mesh: MeshConfig) -> list[int]:
    """[dp, mp], or with context parallelism [dp, cp, mp]."""
    return [mesh.dp, mesh.mp] if mesh.cp == 1 else [mesh.dp, mesh.cp, mesh.mp]


def named_sizes(shape: Sequence[int]) -> list[str]:
    """A `mesh_shape` in words, a size each, such as dp=2."""
    dp, *cp, mp = shape
    return [f"dp={dp}", *(f"cp={size}" for size in cp), f"mp={mp}"]


def product_in_words(mesh: MeshConfig) -> str:
    """Such as dp=2 x mp=4."""
    return " x ".join(named_sizes(mesh_shape(mesh)))


def keys_in_words(mesh: MeshConfig) -> str:
    """The keys of the sizes, and their product."""
    if mesh.cp == 1:
        return "mesh.dp and mesh.mp with dp x mp"
    return "mesh.dp, mesh.cp and mesh.mp with dp x cp x mp"
