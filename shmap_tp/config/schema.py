"""The names and types of all configuration keys, each with a sentence.  Their values are in `conf/` only.

Those of the `model` section are in `model_schema.py`.

This module imports no JAX, so that a configuration can be read, checked and printed on a machine without devices.
"""

from dataclasses import dataclass

from shmap_tp.config.choices import (  # noqa: F401 - the names of all sections can be imported from here
    AttentionKernel,
    Block,
    FsdpGradients,
    Mlp,
    Norm,
    Positions,
    Precision,
    Remat,
    Resume,
    RotaryPairing,
    RotaryScaling,
    SavedActivation,
    TensorParallelMode,
    Zero,
)
from shmap_tp.config.model_schema import ModelConfig, padded_vocabulary  # noqa: F401

AUTO = "auto"
"""Value of mesh.dp that means all devices divided by mesh.mp."""


@dataclass
class RunConfig:
    name: str
    """Name of the run in logs, plots and W&B."""
    dir: str
    """Run directory, which holds config.yaml, metrics.jsonl, loss.png and, by default, checkpoints/."""
    seed: int
    """Seed of the initial parameters and of the data order."""
    compilation_cache: str | None
    """Directory where compiled programs are kept between runs; null disables the cache."""
    join_timeout_seconds: int
    """How long a process waits at the start until all other processes have joined."""
    lost_timeout_seconds: int
    """Heartbeat time-out: a process that is silent for this long is considered lost, and the others exit."""
    compiler_options: dict[str, str]
    """XLA options for compiling the training step; they override those of `hardware/xla_options.py`."""


@dataclass
class MeshConfig:
    dp: int | str
    """Data-parallel size; `auto` (for training only) is the number of devices divided by mesh.mp."""
    mp: int
    """Tensor-parallel (model-parallel) size: the number of devices over which each layer is sharded."""
    tensor_parallel: TensorParallelMode
    """Tensor-parallel mode.  all_reduce: activations between layers are replicated (Megatron).  sequence: they are
    sharded over time, all-gathered before each layer and reduce-scattered after it; mp must divide model.context.
    collective_matmul: as sequence, with both collectives split into ring steps that overlap the matmuls."""
    tile: list[int] | None
    """Shape [x, y, z, cores] of the box of a TPU slice that one mp group occupies; null chooses the fewest hops."""
    zero: Zero
    """What is sharded over dp.  none: nothing.  zero1: the optimizer state and its update (ZeRO-1).  fsdp: also the
    parameters, which are all-gathered layer by layer (ZeRO-3)."""
    fsdp_gradients: FsdpGradients
    """How the gradients of FSDP weights are reduced.  reduce_scatter: one reduce-scatter after each weight-gradient
    matmul.  ring: in ring steps, each of which overlaps the matmul of the next chunk."""
    slices: int
    """Number of slices (groups of devices with a fast network of their own, joined by a slower one) that dp spans; with
    zero=fsdp only shards cross between slices, once per step."""
    processes: int
    """Number of processes: one per host, under Slurm one per GPU.  Without a TPU, GKE or Slurm environment they also
    need --coordinator."""


@dataclass
class DataConfig:
    name: str
    """Name of the data in messages."""
    dir: str
    """Directory with train.bin, validation.bin and meta.json; or its URL, such as gs://bucket/data."""
    cache: str | None
    """Directory on each host for a copy of data whose `dir` is a URL; null: its rows are read from the URL."""
    source: str | None
    """stdlib: the run prepares it.  Else arguments of shmap_tp.prepare, printed if `dir` is empty; null: not known."""


@dataclass
class TrainConfig:
    steps: int
    """Total number of optimizer steps, including those before a resume."""
    batch: int
    """Global batch size: sequences per optimizer step, over all devices and microbatches."""
    microbatches: int
    """Gradient accumulation: the number of microbatches per step; dp must divide batch / microbatches."""
    max_sequences_per_device: int | None
    """Upper limit of the sequences that a device computes at a time; `microbatches` is raised for it, and the batch
    stays the same.  null: batch / microbatches / dp."""
    precision: Precision
    """dtype of activations and matmuls; master weights stay float32.  auto: float32 on CPU, else bfloat16."""
    z_loss: float
    """Weight of the squared log-partition term of the loss (PaLM, section 5); 0 disables it."""
    loss_chunk: int
    """Number of positions per device whose logits are in memory at a time."""
    profile: list[int] | None
    """[first, last]: the steps, counted from 1, that are traced for XProf or TensorBoard; null: none."""
    check_replicas_every: int
    """Steps between checks that all replicas of each parameter are bitwise equal; 0 disables them."""


@dataclass
class OptimizerConfig:
    learning_rate: float
    """Peak learning rate, reached at the end of the warm-up."""
    final_learning_rate: float
    """Learning rate at the end of the cosine decay, and from then on."""
    warmup_steps: int
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: int
    """Step at which the cosine decay ends; separate from train.steps, so that extending a run keeps its schedule."""
    weight_decay: float
    """AdamW weight decay, applied to matrices but not to norm scales."""
    beta1: float
    """Decay rate of Adam's first moment."""
    beta2: float
    """Decay rate of Adam's second moment."""
    epsilon: float
    """Added to the denominator of Adam's update."""
    clip_norm: float
    """Gradients with a larger global norm are scaled down to this norm."""


@dataclass
class GuardConfig:
    """Bad steps.  A step with a non-finite loss, gradient or update is always skipped: it changes no parameter."""

    loss_spike_sigmas: float | None
    """Also skip steps whose loss is this many standard deviations above the running mean (6 is usual); null: never."""
    window: int
    """Number of steps of the running mean and deviation; the first `window` steps are never spikes."""
    max_norm_change: float | None
    """Also skip steps whose update would raise or lower the norm of all weights by more than this factor; null: never.
    At the usual initialisation a learning rate of about 0.2 changes it by a factor of 10."""
    max_consecutive: int | None
    """Number of consecutive skipped steps that stop the run; null: no limit.  A checkpoint saved after three times as
    many is not resumed."""


@dataclass
class EvaluateConfig:
    every: int
    """Steps between evaluations; 0 evaluates only at the end."""
    batches: int
    """Number of validation batches per evaluation, always the same ones."""


@dataclass
class SampleConfig:
    """Texts that the model writes while it is trained: on the terminal, in samples.jsonl, TensorBoard and W&B."""

    every: int
    """Steps between samples; 0 writes them only at the end."""
    prompts: list[str]
    """Texts that the model continues; [] writes no samples."""
    max_new_tokens: int
    """Tokens of each sample."""
    temperature: float
    """0 takes the most likely token each time."""


@dataclass
class CheckpointConfig:
    dir: str
    """Where checkpoints are written: a directory or a gs:// path."""
    every: int
    """Steps between checkpoints (skipped steps have none); 0 saves only at the end.  A stopped run always saves."""
    keep: int
    """How many of the newest checkpoints are kept."""
    keep_every: int | None
    """Checkpoints at multiples of this step are kept forever; null keeps none of them."""
    resume: Resume
    """never: `dir` must hold no checkpoint.  must: continue from the newest.  if_present: continue if there is one."""


@dataclass
class LogConfig:
    every: int
    """Steps between printed lines where stderr is not a terminal, which shows a progress bar instead."""
    tensorboard: bool
    """Whether to write TensorBoard events to the run directory."""
    wandb: bool
    """Whether to log to Weights & Biases (pip install -e '.[wandb]')."""
    wandb_project: str
    """W&B project."""


@dataclass
class Config:
    """A whole configuration, checked; `shmap_tp.load_config` makes one.  docs/configuration.md has every key."""

    run: RunConfig
    mesh: MeshConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    guard: GuardConfig
    evaluate: EvaluateConfig
    sample: SampleConfig
    checkpoint: CheckpointConfig
    log: LogConfig
