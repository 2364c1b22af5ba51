"""The names and types of everything that can be configured.  Values live in `conf/`, and only there.

Nothing here imports JAX: a configuration can be read, checked and printed on a machine that has no devices.
"""

from dataclasses import dataclass
from enum import StrEnum

AUTO = "auto"


class TensorParallelMode(StrEnum):
    all_reduce = "all_reduce"
    sequence = "sequence"
    collective_matmul = "collective_matmul"


class Block(StrEnum):
    parallel = "parallel"
    sequential = "sequential"


class Norm(StrEnum):
    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class Mlp(StrEnum):
    gelu = "gelu"
    swiglu = "swiglu"


class Positions(StrEnum):
    alibi = "alibi"
    rotary = "rotary"
    learned = "learned"


class Remat(StrEnum):
    none = "none"
    full = "full"
    attention = "attention"
    mlp = "mlp"
    attention_and_up = "attention_and_up"
    all_matmuls = "all_matmuls"


class SavedActivation(StrEnum):
    """Of a block's work, by `remat.py`."""

    input = "input"
    sublayer_output = "sublayer_output"
    query_key_value = "query_key_value"
    attention_output = "attention_output"
    gate = "gate"
    up = "up"


SAVED_BY_REMAT = {
    Remat.none: (),
    Remat.full: (SavedActivation.input,),
    Remat.attention: (
        SavedActivation.input,
        SavedActivation.sublayer_output,
        SavedActivation.query_key_value,
        SavedActivation.attention_output,
    ),
    Remat.mlp: (SavedActivation.input, SavedActivation.sublayer_output, SavedActivation.gate, SavedActivation.up),
    Remat.attention_and_up: (
        SavedActivation.input,
        SavedActivation.sublayer_output,
        SavedActivation.query_key_value,
        SavedActivation.attention_output,
        SavedActivation.up,
    ),
    Remat.all_matmuls: tuple(SavedActivation),
}
"""What can be offloaded of what each keeps by name; `none` keeps all there is, by no name."""


class AttentionKernel(StrEnum):
    auto = "auto"
    chunked = "chunked"
    splash = "splash"
    cudnn = "cudnn"


class Precision(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Zero(StrEnum):
    none = "none"
    zero1 = "zero1"
    fsdp = "fsdp"


class FsdpGradients(StrEnum):
    reduce_scatter = "reduce_scatter"
    ring = "ring"


class Resume(StrEnum):
    never = "never"
    if_present = "if_present"
    must = "must"


@dataclass
class RunConfig:
    name: str
    """Names the run in logs, plots and W&B."""
    dir: str
    """Run directory: config.yaml, metrics.jsonl, loss.png, checkpoints/ unless those are placed elsewhere."""
    seed: int
    """Seeds the initial parameters and the order of the data."""
    compilation_cache: str | None
    """Directory that keeps compiled programs between runs; null compiles afresh every time."""
    join_timeout_seconds: int
    """How long a process waits for all the others to be started, where there are several."""
    lost_timeout_seconds: int
    """How long a process may be silent before the others take it for dead, and end."""
    compiler_options: dict[str, str]
    """Options of XLA for the step's program, over those that `hardware` has for these devices."""


@dataclass
class MeshConfig:
    dp: int | str
    """Data-parallel size: how many parts the batch is cut into.  auto: all devices there are / mp (for training)."""
    mp: int
    """Model-parallel size: how many devices share each layer."""
    tensor_parallel: TensorParallelMode
    """How the devices of a layer talk.  all_reduce: activations between layers are whole on each (Megatron).  sequence:
    cut along time, gathered for each layer and scattered after it; mp must divide the context.  ring: the same, in
    steps around a ring, each under the products of the step before (collective matmul)."""
    tile: list[int] | None
    """Which devices of a TPU share a layer: [x, y, z, cores], how far mp reaches along each side of the slice; null
    takes the tile with the fewest hops."""
    zero: Zero
    """What dp shares out instead of keeping it everywhere.  none: nothing.  optimizer: the optimizer's state and update
    (ZeRO-1).  parameters: the weights as well, gathered layer by layer (ZeRO-3, FSDP)."""
    fsdp_gradients: FsdpGradients
    """How gradients of weights that dp shares go home, with zero=parameters.  scatter: one reduce-scatter after each
    product.  ring: in steps around a ring, each under the product of the next part."""
    slices: int
    """How many slices dp spans: groups of devices with a fast network of their own, and a slow one in between.  With
    zero=parameters only shards cross it, once per step."""
    processes: int
    """How many processes train together, one per host.  Start the same command on each: they find each other by their
    TPU, GKE or Slurm environment, or by --coordinator and --process-id of main.py."""


@dataclass
class ModelConfig:
    name: str
    """Names the shape in tables and messages."""
    width: int
    """D, the size of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """H, query heads; mp must divide it."""
    kv_heads: int
    """N, key/value heads; divides `heads`.  mp must divide it or be a multiple of it (heads are then replicated)."""
    head_dim: int
    """K, the size of one head; its own figure, not always width / heads."""
    ffn: int
    """F, hidden size of the MLP; mp must divide it."""
    vocabulary: int
    """V, number of token ids."""
    vocabulary_multiple: int
    """The embedding and head are padded to a multiple of this, which mp must divide; the loss does not change."""
    context: int
    """T, tokens per training window; with mesh.tensor_parallel=sequence or ring mp must divide it."""
    block: Block
    """parallel: attention and MLP side by side, one region per layer.  sequential: one after the other, two."""
    norm: Norm
    mlp: Mlp
    positions: Positions
    tie_embeddings: bool
    """Whether the output head is the embedding transposed."""
    init_std: float
    """Standard deviation of the initial weights; what writes to the residual stream is scaled by (2 layers)^-1/2."""
    remat: Remat
    """What the backward pass of a block finds kept, and need not compute again.  none: all.  full: its input only.
    attention: also q, k, v, what came of them, and what left a region.  mlp: instead of attention's, the MLP's first
    products.  up: besides attention's, the MLP's up.  dots: all of these.  No weight that was gathered over dp is
    kept."""
    offload: list[SavedActivation]
    """What of all that is kept in the host's memory meanwhile: any of input, left, query_key_value, attended, gate, up
    that remat keeps.  On CPU, which is its own host, it changes nothing."""
    attention: AttentionKernel
    """What computes softmax(q k') v.  chunked: XLA, attention_chunk queries at a time.  splash: a TPU kernel, v4 and
    later.  cudnn: NVIDIA's.  auto: the kernel of the devices, where it can run this model; else chunked."""
    attention_chunk: int
    """For `chunked`: queries whose scores are held at a time; a [T, T] score matrix exists only where this is T or
    more."""


@dataclass
class DataConfig:
    name: str
    """Names the data in messages."""
    dir: str
    """Directory with train.bin, validation.bin and meta.json."""
    source: str | None
    """What to prepare when `dir` is empty: 'stdlib' (this machine's Python library); null means prepared before."""


@dataclass
class TrainConfig:
    steps: int
    """Optimizer steps in the whole run, resumed parts included."""
    batch: int
    """Windows per optimizer step, over all devices and microbatches."""
    microbatches: int
    """Parts a step's batch is computed in, one after the other; dp must divide batch / microbatches."""
    max_sequences_per_device: int | None
    """Windows that a device computes at a time, at most, whatever dp comes to: microbatches grows by as much as that
    takes, and the batch stays.  null: batch / microbatches / dp."""
    precision: Precision
    """dtype of the activations and matrix products; masters stay float32.  auto: bfloat16, on CPU float32."""
    z_loss: float
    """Weight of the squared log-partition added to the loss (PaLM, section 5); 0 leaves it out."""
    loss_chunk: int
    """Positions of a device whose logits are held at a time."""
    profile: list[int] | None
    """[first, last]: the steps, counted from 1, of which a trace is written to the run directory, for XProf or
    TensorBoard; null: none."""
    check_replicas_every: int
    """Steps between two looks at whether all copies of each parameter are still the same bits; 0 never looks."""


@dataclass
class OptimizerConfig:
    learning_rate: float
    """Peak, reached after the warm-up."""
    final_learning_rate: float
    """Reached by a cosine at `decay_steps`, and kept from then on."""
    warmup_steps: int
    decay_steps: int
    """Its own figure and not train.steps: a run that is continued must not change its past."""
    weight_decay: float
    """On matrices only; never on norm scales."""
    beta1: float
    beta2: float
    epsilon: float
    clip_norm: float
    """Gradients with a larger global norm are scaled down to it."""


@dataclass
class GuardConfig:
    """A step whose loss or gradient is not finite is always skipped: weights and optimizer stay as they are."""

    loss_spike_sigmas: float | None
    """So is one whose loss is this many standard deviations above the running mean of those before; 6 is usual.  null:
    no finite loss is too large."""
    window: int
    """Steps that mean and deviation remember; a run's first so many are no spikes."""
    max_consecutive: int | None
    """So many skipped steps in a row stop the run; null: it never stops for them."""


@dataclass
class EvaluateConfig:
    every: int
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: int
    """How many batches of the validation windows, always the same ones."""


@dataclass
class CheckpointConfig:
    dir: str
    """Where checkpoints go: a directory or a gs:// path."""
    every: int
    """Steps between checkpoints, but for skipped ones; 0 saves only at the end.  A stopped run always saves."""
    keep: int
    """How many of the newest are kept."""
    keep_every: int | None
    """Checkpoints at multiples of this are kept for good; null keeps none."""
    resume: Resume
    """never: the directory must hold no checkpoint.  must: go on from the newest.  if_present: whichever applies."""


@dataclass
class LogConfig:
    every: int
    """Steps between printed lines where there is no terminal for a progress bar."""
    tensorboard: bool
    wandb: bool
    wandb_project: str


@dataclass
class Config:
    run: RunConfig
    mesh: MeshConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    guard: GuardConfig
    evaluate: EvaluateConfig
    checkpoint: CheckpointConfig
    log: LogConfig


def padded_vocabulary(model: ModelConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up to the multiple that the configuration names."""
    return -(-model.vocabulary // model.vocabulary_multiple) * model.vocabulary_multiple
