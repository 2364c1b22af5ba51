"""The forward and backward pass of a model as a traced program, and its equations, for counting: no device, array or
compiler is needed.

B batch, T time (queries), S time (keys), H query heads, N key/value heads, G = H / N, K head dim.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from shmap_tp.config.activation_names import ATTENTION_OUTPUT
from shmap_tp.layers.attention import Chunked
from shmap_tp.layers.causal_attention import Pattern
from shmap_tp.layers.context import DeferredResiduals
from shmap_tp.model.transformer import Carried, Execution, Transformer
from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.context_parallel import time_ranks
from shmap_tp.parallel.fsdp import Fsdp, Replicated
from shmap_tp.parallel.mesh import DP, MP, abstract_mesh, token_axes
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.parallel.tensor_parallel import TensorParallel

ONE_DEVICE = {DP: 1, MP: 1}
SCORES, VALUES = "attention_scores", "attention_values"
"""Named scopes of the two products of `TracedAttention`."""
WINDOW = "attention_window_"
"""A scope around them, followed by the window of their layer, or 0."""


@dataclass(frozen=True)
class TracedAttention(Chunked):
    """Stands for every way to compute attention: softmax(q k') v of the whole sequence, as two products.

    It computes all pairs of queries and keys, without a mask, which changes no shape; the scope of the two products
    names the window of their layer.
    """

    recomputes_scores: bool = False
    """Whether its backward pass recomputes the scores from q and k, as that of a kernel does."""

    def __call__(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSNK: Float[Array, "B S N K"],
        v_BSNK: Float[Array, "B S N J"],
        pattern: Pattern,
    ) -> tuple[Float[Array, "B T H J"], DeferredResiduals]:
        attend = jax.checkpoint(_attend) if self.recomputes_scores else _attend
        with jax.named_scope(f"{WINDOW}{pattern.window or 0}"):
            return checkpoint_name(attend(q_BTHK, k_BSNK, v_BSNK), ATTENTION_OUTPUT), ()


def _attend(
    q_BTHK: Float[Array, "B T H K"], k_BSNK: Float[Array, "B S N K"], v_BSNK: Float[Array, "B S N J"]
) -> Float[Array, "B T H J"]:
    (batch, time, heads, head_dim), groups = q_BTHK.shape, k_BSNK.shape[2]
    q_BTNGK = q_BTHK.reshape(batch, time, groups, heads // groups, head_dim)
    with jax.named_scope(SCORES):
        scores_BNGTS = jnp.einsum("btngk,bsnk->bngts", q_BTNGK, k_BSNK)
    weights_BNGTS = jax.nn.softmax(scores_BNGTS, axis=-1)
    with jax.named_scope(VALUES):
        mixed_BTNGJ = jnp.einsum("bngts,bsnj->btngj", weights_BNGTS, v_BSNK)
    return mixed_BTNGJ.reshape(batch, time, heads, v_BSNK.shape[-1])


def trace_gradients(
    shapes: Transformer,
    tp: TensorParallel,
    tokens: tuple[int, int],
    *,
    sizes: Mapping[str, int] = ONE_DEVICE,
    dtype: DTypeLike = jnp.float32,
    is_gathered: Any = None,
    is_trained: Any = None,
    isolated: bool = False,
) -> Any:
    """The jaxpr of one device of a mesh of these axis sizes: from its tokens[B T] to the output of the final norm and
    the auxiliary losses of the blocks, and the backward pass.

    `shapes` are the parameters as `parameter_shapes` gives them, `tokens` is (B, T).  Every rematerialisation policy
    does what it does in training; `is_gathered`, a tree like the parameters, says which of them FSDP gathers before
    their use (None: none), and `is_trained` of which there are gradients (None: all).  The rows are
    `isolated` documents, or one each.  Not part of it: the output projection and the loss, and what gathers parameters
    and reduces their gradients over token axes.
    """
    is_gathered = jax.tree.map(lambda _: False, shapes) if is_gathered is None else is_gathered
    is_trained = jax.tree.map(lambda _: True, shapes) if is_trained is None else is_trained
    placements = jax.tree.map(lambda gathered: Fsdp((), 0, None) if gathered else Replicated(()), is_gathered)
    execution = Execution(tp, dtype, placements)

    def gradients(params: Transformer, ids_BT: Int[Array, "B T"]) -> Any:
        # with positions given, the rotation is computed without a matmul
        batch, time = ids_BT.shape
        segments = jnp.zeros((batch, time * time_ranks(sizes)), jnp.int32) if isolated else None
        carried = Carried(jnp.broadcast_to(jnp.arange(time), ids_BT.shape), segments)
        marked = mark_varying(params, (*token_axes(), *tp.time_axes))
        trained, frozen = eqx.partition(marked, is_trained)

        def outputs(trained: Transformer) -> Any:
            h_BTD, extras = eqx.combine(trained, frozen)(ids_BT, execution, carried)
            return h_BTD, extras.auxiliary_loss

        found, pull = jax.vjp(outputs, trained)
        return jax.tree.map(jnp.ravel, pull(found)[0])

    mesh = abstract_mesh(dict(sizes))
    specs = partition_specs(shapes, sizes)
    # what each device computes, whether it varies or not
    local = jax.tree.map(lambda _: P(tuple(sizes)), eqx.filter(shapes, is_trained))
    program = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, P()), out_specs=local)
    return jax.make_jaxpr(program)(shapes, jax.ShapeDtypeStruct(tokens, jnp.int32)).jaxpr


# All equations of a traced program, those of its loops and nested programs included, and how often each runs

LOOPS_OF_UNKNOWN_LENGTH = ("while", "cond")
"""Primitives whose bodies run an unknown number of times."""
WITHOUT_COMMUNICATION = {"pvary", "pcast", "axis_index"}
"""Primitives that name a mesh axis but communicate nothing."""
WITHOUT_NAME = {"rematted_computation", "checkpoint", "while", "body", "closed_call", ""}
"""Parts of a name stack that JAX adds."""


@dataclass(frozen=True)
class Visit:
    """An equation, and where it stands."""

    equation: Any
    outer: str
    """The scope of the equation that contains it."""
    scans: int
    """How many scans it is nested in."""
    times: int
    """How often it runs, within `loop`."""
    loop: str | None
    """The primitive of a while loop or a branch around it, which runs an unknown number of times."""

    @property
    def scope(self) -> str:
        """The named scopes around it, outermost first, separated by slashes."""
        return f"{self.outer}/{self.equation.source_info.name_stack}".strip("/")

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def part(self) -> str:
        """The part of the program that it belongs to: its innermost named scope."""
        names = [name for name in re.sub(r"\w+\(|\)", "", self.scope).split("/") if name not in WITHOUT_NAME]
        return names[-1] if names else "step"

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which it communicates; the `axes` of other primitives are integers, dims of an array."""
        params = self.equation.params
        axes = params.get("axes", params.get("axis_name", ()))
        if not axes or self.name in WITHOUT_COMMUNICATION:
            return ()
        return tuple(axis for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)) if isinstance(axis, str))

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward pass recomputes it.  JAX marks such equations in their name stack."""
        return "rematted_computation" in self.scope

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass, and is not a recomputation."""
        return "transpose(" in self.scope and not self.is_recomputed


def equations(jaxpr: Any) -> Iterator[Visit]:
    """Every equation of `jaxpr` and of the jaxprs inside it; one that contains others comes before them."""
    return _equations(jaxpr, outer="", scans=0, times=1, loop=None)


def _equations(jaxpr: Any, outer: str, scans: int, times: int, loop: str | None) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        visit = Visit(equation, outer, scans, times, loop)
        yield visit
        if not (contained := bodies(equation.params)):
            continue
        inside = scans, times, loop
        if visit.name == "scan":
            inside = scans + 1, times * equation.params["length"], loop
        elif visit.name in LOOPS_OF_UNKNOWN_LENGTH:
            inside = scans, times, visit.name
        for body in contained:
            yield from _equations(body, visit.scope, *inside)


def bodies(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for param in params.values():
        for x in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(x, core.ClosedJaxpr):
                found.append(x.jaxpr)
            elif isinstance(x, core.Jaxpr):
                found.append(x)
    return found
