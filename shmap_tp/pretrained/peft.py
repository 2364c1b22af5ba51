"""Adapters in the files of PEFT: adapter_model.safetensors and adapter_config.json, in and out.

r rank.  A factor is a row of a family's table, derived from the row of its matrix: a[in r] is the tensor
lora_A.weight[r in] of the matrix's module, b is lora_B.weight[out r].

Some families fuse q, k and v in one matrix, where PEFT has one pair of factors and this project three.  Two forms of
that pair are equal to the three:

    shared   a is the same for the three: lora_A[r in], and lora_B has the rows of the three
    blocks   a of the three one below the other: lora_A[3r in], and lora_B is block-diagonal; rank and alpha of the
             module are three times as large (rank_pattern, alpha_pattern), and their quotient is the same

PEFT trains the first, training here leads to the second; any other pair is refused.
    https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shmap_tp.config.choices import AdapterScale, Precision
from shmap_tp.config.schema import AdapterConfig, ModelConfig
from shmap_tp.errors import UserError, shown
from shmap_tp.model.adapters import split_factors
from shmap_tp.model.sharded_model import parameter_shapes
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import Declaration, declarations
from shmap_tp.pretrained.config_json import OBJECT, POSITIVE, SIZE, TEXT, checked, require, require_one_of
from shmap_tp.pretrained.configuration import Target
from shmap_tp.pretrained.family import Family, TensorRow
from shmap_tp.pretrained.layout import Layout, sizes_of
from shmap_tp.pretrained.reading import load_parameters, paths_of
from shmap_tp.pretrained.source import Source
from shmap_tp.runtime.files import read_json_file, reading
from shmap_tp.training.resume import require_same_base

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
"""The files of PEFT, and one that says beside which weights the adapter was trained: "path" and "sha256"."""
MODULE = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
FACTOR = ".adapter.a.weight"
BLOCK = re.compile(r"\((\d)/(\d) r\)")
"""The part of a fused matrix that a factor in the form of blocks belongs to, and the number of parts."""

FLOAT32_END = 2.0**128
"""The numbers of float32 are below it."""

_HARMLESS = """
    peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
    exclude_modules lora_dropout fan_in_fan_out megatron_core qalora_group_size r lora_alpha use_rslora rank_pattern
    alpha_pattern
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys of adapter_config.json that are read, or do not change what an adapter computes.  Any other must be off."""
INITIAL = (True, False, "gaussian", "orthogonal", None)
"""Values of init_lora_weights with which the base stays as it was."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a directory, beside a base whose tables are known."""

    directory: Path
    source: Source
    """The files, with the base's config.json."""
    config: AdapterConfig
    shared: frozenset[str]
    """Modules of fused matrices, as in the rows of the family, whose factors are in the shared form."""


def open_adapter(directory: str, base: Source) -> SavedAdapter:
    """The adapter in `directory`, which was trained beside `base`.

    Raises UserError if a file is missing or damaged, for an option that is not supported, for tensors of another
    architecture, and for other weights than those that base.json names.
    """
    root = Path(directory)
    with reading(directory):
        if not (root / CONFIG).is_file():
            raise UserError(f"{shown(directory)} has no {CONFIG}; name a directory as PEFT's save_pretrained writes it")
    given, where = read_json_file(root / CONFIG), str(root / CONFIG)
    config = _read_config(given, where)
    if (root / BASE).is_file():
        recorded = checked(OBJECT, read_json_file(root / BASE), "the content", str(root / BASE))
        for key in ("path", "sha256"):
            checked(TEXT, recorded.get(key), key, str(root / BASE))
        found = {"path": str(base.directory), "sha256": base.sha256()}
        require_same_base(found, recorded, str(root), "--pretrained DIR")
    files = Source(root, base.config, base.family, weights=WEIGHTS, described_by=f"{where} beside {base.config_file}")
    groups = _groups(base.family)
    present = [module for module in groups if _name(module, LORA_A, 0) in files.tensors]
    if not present:
        raise UserError(f"{root / WEIGHTS} has no factor of a matrix of {base.family.architecture}; name another")
    ranks = {module: files.tensors[_name(module, LORA_A, 0)].shape[:1] for module in present}
    shared = frozenset(module for module, rank in ranks.items() if rank == (config.rank,))
    blocks = [module for module in present if module not in shared and len(groups[module]) > 1]
    for key, wanted in _patterns(config, {_suffix(module): len(groups[module]) for module in blocks}).items():
        rule = "is not supported: all matrices have one rank and alpha here"
        require((given.get(key) or {}) == wanted, key, given.get(key), rule, where)
    matrices = [path.split(".")[-2] for module in present for path in groups[module]]
    return SavedAdapter(root, files, replace(config, matrices=matrices), shared)


def load_factors(adapter: SavedAdapter, model: ModelConfig, shapes: Transformer) -> Transformer:
    """The factors in the directory, with the dtypes and shardings of `shapes`; the other parameters are None.

    Raises UserError if a tensor is missing, has another shape or a value that is not finite, or belongs to no matrix.
    """
    family = _with_factors(adapter.source.family, model, adapter.shared)
    parameters = load_parameters(replace(adapter.source, family=family), model, split_factors(shapes)[0])
    _check_blocks(adapter, family, model)
    for path, factor in paths_of(parameters).items():
        if not jnp.all(jnp.isfinite(factor)):
            raise UserError(
                f"{adapter.directory / WEIGHTS}: {path} has values that are not finite, and so would all logits; "
                f"copy it again, or train it again with a lower learning rate"
            )
    return parameters


def adapter_target(
    target: Target, model: ModelConfig, factors: Transformer, base: Mapping[str, str] | None, *, rslora: bool = False
) -> Target:
    """What a directory will contain of the `factors` of a model that `target` describes; `base` is what they were
    trained beside.

    rsLoRA is written as plain LoRA with alpha times sqrt(r), the same product, since some engines ignore use_rslora
    (https://github.com/vllm-project/vllm/issues/10798); or with `rslora` as it is.
    """
    arrays, groups = paths_of(factors), _groups(target.family)
    modules = {module: [path for path in paths if _factor(path) in arrays] for module, paths in groups.items()}
    modules = {module: [arrays[_factor(path)] for path in paths] for module, paths in modules.items() if paths}
    shared = {module for module, own in modules.items() if all(bool(jnp.array_equal(own[0], a)) for a in own)}
    family = _with_factors(target.family, model, shared)
    blocks = [module for module in modules if module not in shared]
    first = next(row for row in target.family.rows if row.theirs in modules)
    adapter = model.adapter
    if adapter.scale == AdapterScale.sqrt_rank and not rslora:
        adapter = replace(adapter, scale=AdapterScale.rank, alpha=adapter.alpha * adapter.rank**0.5)
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else base["path"],
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": _number(adapter.alpha),
        "use_rslora": adapter.scale == AdapterScale.sqrt_rank,
        "target_modules": [_suffix(module) for module in modules],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": _dims(first)[0][0] == _sides(first, _described(model)[first.ours])[0],
        **_patterns(adapter, {_suffix(module): len(groups[module]) for module in blocks}),
    }
    documents = {CONFIG: document} | ({} if base is None else {BASE: dict(base)})
    return replace(target, family=family, weights=WEIGHTS, documents=documents)


def _groups(family: Family) -> dict[str, list[str]]:
    """The tensor of each matrix of the blocks that may have factors, which experts' have not, with the paths of ours
    that it has."""
    groups: dict[str, list[str]] = {}
    for row in family.rows:
        if row.ours.startswith("blocks.") and row.ours.endswith(".weight") and "{expert}" not in row.theirs:
            groups.setdefault(row.theirs, []).append(row.ours)
    return groups


def _with_factors(family: Family, model: ModelConfig, shared: Collection[str]) -> Family:
    """The family, with a row for each factor of the model, and names as in PEFT's files."""
    described, rows = _described(model), []
    for module, paths in _groups(family).items():
        adapted = [path for path in paths if _factor(path) in described]
        for row in [row for row in family.rows if row.ours in adapted]:
            is_block = len(paths) > 1 and module not in shared
            rank = f"({paths.index(row.ours)}/{len(paths)} r)" if is_block else "r"
            rows += _factor_rows(row, described[row.ours], rank)
    return replace(family, rows=(*family.rows, *rows), prefix="")


def _factor_rows(row: TensorRow, declared: Declaration, rank: str) -> list[TensorRow]:
    """The rows of a and b of a matrix."""
    _, ours = _dims(row)
    theirs_in, theirs_out, ours_in = _sides(row, declared)
    field, module = row.ours.removesuffix("weight") + "adapter.", MODULE + row.theirs.removesuffix(".weight")
    b = " ".join("r" if dim == ours_in else dim for dim in ours)
    return [
        TensorRow(f"{field}a.weight", module + LORA_A, f"{rank} {theirs_in} -> {ours_in} r"),
        TensorRow(f"{field}b.weight", module + LORA_B, f"{theirs_out} {rank} -> {b}"),
    ]


def _dims(row: TensorRow) -> tuple[list[str], list[str]]:
    """The dims of the file's tensor, and of our array."""
    left, right = (re.findall(r"\([^)]*\)|\S+", side) for side in row.pattern.split("->"))
    return left, right


def _sides(row: TensorRow, declared: Declaration) -> tuple[str, str, str]:
    """(the file's dim of features in, its dim of features out, our dim of features in)."""
    left, right = _dims(row)
    (ours_in,) = (right[dim] for dim in declared.inputs)
    theirs_in = next(dim for dim in left if set(re.findall("[a-z]", dim)) & set(re.findall("[a-z]", ours_in)))
    return theirs_in, next(dim for dim in left if dim != theirs_in), ours_in


def _described(model: ModelConfig) -> dict[str, Declaration]:
    return paths_of(declarations(parameter_shapes(model)))


def _factor(matrix: str) -> str:
    """The path of the first factor beside a matrix."""
    return matrix.removesuffix(".weight") + FACTOR


def _name(module: str, factor: str, layer: int) -> str:
    return MODULE + module.format(layer=layer).removesuffix(".weight") + factor


def _suffix(module: str) -> str:
    """The last two names of a module's path, such as self_attn.q_proj, which no other module of a block has."""
    return ".".join(module.removesuffix(".weight").split(".")[-2:])


def _block_alpha(adapter: AdapterConfig, parts: int) -> int | float:
    """The alpha with which a rank `parts` times as large has the same scale."""
    return _number(adapter.alpha * (parts if adapter.scale == AdapterScale.rank else parts**0.5))


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _patterns(adapter: AdapterConfig, parts: Mapping[str, int]) -> dict[str, dict[str, int | float]]:
    """What adapter_config.json says of block-diagonal factors, by module with its number of parts."""
    return {
        "rank_pattern": {module: adapter.rank * count for module, count in parts.items()},
        "alpha_pattern": {module: _block_alpha(adapter, count) for module, count in parts.items()},
    }


def _read_config(given: Any, where: str) -> AdapterConfig:
    """The adapter, without its matrices.  Raises UserError for an option that changes what it computes, and is not
    read here."""
    require_one_of(["LORA"], "peft_type", checked(OBJECT, given, "the content", where).get("peft_type"), where)
    for key in sorted(given.keys() - HARMLESS):
        off = INITIAL if key == "init_lora_weights" else (None, False, "none", {}, [])
        require(given[key] in off, key, given[key], "is not supported; only plain LoRA and rsLoRA are", where)
    rank = checked(SIZE, given.get("r"), "r", where)
    alpha = checked(POSITIVE, given.get("lora_alpha"), "lora_alpha", where)
    require(alpha < FLOAT32_END, "lora_alpha", alpha, "must be below 2^128", where)
    scale = AdapterScale.sqrt_rank if given.get("use_rslora") else AdapterScale.rank
    return AdapterConfig(rank, float(alpha), scale, [], Precision.auto)


def _check_blocks(adapter: SavedAdapter, family: Family, model: ModelConfig) -> None:
    """Raise UserError unless the factors of fused matrices that are not shared are block-diagonal in every layer."""
    sizes, tensors = sizes_of(model), adapter.source.tensors
    for row in [row for row in family.rows if row.theirs.endswith(LORA_B) and BLOCK.search(row.pattern)]:
        part, parts = map(int, BLOCK.search(row.pattern).groups())
        for other in set(range(parts)) - {part}:
            layout = Layout(BLOCK.sub(f"({other}/{parts} r)", row.pattern), sizes)
            for name in [row.theirs.format(layer=layer) for layer in range(model.layers)]:
                whole = tuple((0, size) for size in layout.our_shape)
                if layout.read(tensors[name], whole, np.dtype(np.float32)).any():
                    raise UserError(
                        f"{adapter.directory / WEIGHTS}: {name} is neither shared by its {parts} parts nor "
                        f"block-diagonal, so that {parts} adapters cannot express it; "
                        f"train one of rank {sizes['r']} on the fused matrix"
                    )
