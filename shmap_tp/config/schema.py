"""The names, types and rules of all configuration keys, each with a sentence.  Their values are in `conf/` only."""

from dataclasses import dataclass, field
from typing import Any

from shmap_tp.config import choices

AUTO = "auto"  # mesh.dp: all devices divided by mesh.cp and mesh.mp; checkpoint.every: what loses least


def key(**rules: Any) -> Any:
    """A field whose value has rules, which `values.py` explains and checks."""
    return field(metadata=rules)


@dataclass
class RunConfig:
    name: str
    """Name of the run in logs, plots and W&B."""
    dir: str = key(schemes=())
    """Run directory, which holds config.yaml, metrics.jsonl, report.html and, by default, checkpoints/."""
    seed: int = key(least=0, below=2**32)
    """Seed of the initial parameters and of the data order."""
    compilation_cache: str | None = key(schemes=("gs",))
    """Directory or gs:// path of compiled programs, written by process 0 and read by all; null disables the cache."""
    join_timeout_seconds: int = key(below=10**6)
    """Seconds that a process waits at the start until all other processes have joined."""
    lost_timeout_seconds: int = key(least=5, below=10**6)
    """Heartbeat time-out in seconds: a process that is silent for longer is considered lost, and the others exit."""
    compiler_options: dict[str, str]
    """XLA options for compiling the training step; they override those of `hardware/xla_options.py`."""
    components: str | None
    """FILE.py:NAME, as in --components: your own parts of the model or of the step (docs/extending.md); null: none."""


@dataclass
class MeshConfig:
    dp: int | str = key(below=2**16)
    """Data-parallel size; `auto` (for training only) is the number of devices divided by cp and mp."""
    mp: int = key(below=2**16)
    """Tensor-parallel (model-parallel) size: the number of devices over which each layer is sharded."""
    cp: int = key(below=2**16)
    """Context-parallel size: the devices over which each sequence is split; 2 cp must divide model.context."""
    ep: int = key(below=2**16, unless=1, needs="model.experts")
    """Expert-parallel size: the dp ranks over which experts are sharded, besides mp; it must divide dp / slices."""
    tensor_parallel: choices.TensorParallelMode
    """all_reduce: activations between layers are replicated (Megatron).  sequence: they are sharded over time,
    all-gathered before and reduce-scattered after a layer; mp must divide model.context.  collective_matmul: as
    sequence, with both collectives split into ring steps that overlap the matmuls."""
    tile: list[int] | None
    """Shape [x, y, z, cores] of the box of a TPU slice that one mp group occupies; null chooses the fewest hops."""
    zero: choices.Zero
    """What is sharded over dp and cp.  none: nothing.  zero1: the optimizer state and its update (ZeRO-1).  fsdp: also
    the parameters, which are all-gathered layer by layer (ZeRO-3)."""
    fsdp_gradients: choices.FsdpGradients = key(
        unless="reduce_scatter", needs="mesh.zero=fsdp mesh.cp=1 mesh.ep=1 model.adapter.rank=0"
    )
    """How FSDP reduces a gradient: after its whole matmul, or in ring steps beside the matmul of the next chunk."""
    slices: int = key(below=2**16)
    """How many slices (devices with a fast network of their own) dp spans; FSDP sends only shards between them."""
    processes: int = key(below=2**16)
    """Number of processes: one per host, under Slurm per GPU.  Without TPUs, GKE or Slurm they need --coordinator."""

    @property
    def devices(self) -> int:
        """How many devices the mesh has; dp must be a number."""
        return self.dp * self.cp * self.mp


@dataclass
class AdapterConfig:
    """Low-rank adapters (LoRA): (alpha / rank) (x a) b, added to x @ each of `matrices`; only a and b are trained."""

    rank: int = key(least=0, below=2**16)
    """r, the size between a and b; 0: no adapters, all parameters are trained."""
    alpha: float = key(above=0, usual="the rank, or twice the rank,")
    """What the product of the factors is multiplied by, before it is divided as `scale` says."""
    scale: choices.AdapterScale
    """rank: alpha / r.  sqrt_rank: alpha / sqrt(r) (rsLoRA)."""
    matrices: list[str]
    """Which matrices of the blocks have one: all, attention, mlp, or names: query, key, value, out, gate, up, down."""
    base_dtype: choices.Precision
    """dtype of the other, frozen matrices.  auto: that of the activations, which gives the same results as float32."""


@dataclass
class ModelConfig:
    name: str
    """Name of the model in tables and messages."""
    from_pretrained: str | None
    """A Hugging Face directory (config.json and *.safetensors), or a name on the hub: the other keys of this section
    follow from its config.json, and a new run starts from its weights.  null: random weights."""
    width: int = key(below=2**24)
    """D, the size of the residual stream."""
    layers: int = key(below=2**16)
    """Number of blocks."""
    heads: int = key(below=2**16)
    """H, the number of query heads; mp must divide it."""
    kv_heads: int = key(below=2**16)
    """N, key/value heads; it divides `heads`.  mp must divide it or be a multiple of it (heads are then replicated)."""
    head_dim: int = key(below=2**16)
    """K, the size of one head; it need not be width / heads."""
    ffn: int = key(below=2**24)
    """F, the hidden size of the MLP, which mp must divide, or of each expert."""
    experts: int = key(least=0, below=2**16, unless=0, needs="model.block=sequential")
    """E, the number of experts in place of each MLP; ep x mp must divide it.  0: an MLP."""
    experts_per_token: int = key(below=2**16)
    """How many experts compute each token, those with the highest scores."""
    expert_capacity: float | None = key(needs="model.experts")
    """With mesh.ep above 1: how many rows a device can send to one other, as a multiple of even load; others are
    dropped.  null: all are sent."""
    router_scores: choices.RouterScores
    """Scores of the experts, from a token times the router's weight: softmax over all, or sigmoid of each."""
    router_normalize: bool
    """Whether the scores of a token's chosen experts, its weights, are divided by their sum."""
    router_bias_rate: float | None = key(least=0, needs="model.experts")
    """How far each step raises the bias of experts that fewer tokens chose than the mean, and lowers that of the
    others.  The bias is added to an expert's score for the choice alone; null: no bias."""
    router_balance_loss: float = key(least=0, unless=0, needs="model.experts")
    """Weight of the load-balancing loss, which is 1 in each block where all experts are chosen alike; 0: none."""
    router_z_loss: float = key(least=0, unless=0, needs="model.experts")
    """Weight of the router's squared log-partition term (ST-MoE, section 3.2), in each block; 0: none."""
    shared_expert_ffn: int = key(least=0, below=2**24, unless=0, needs="model.experts model.mlp_bias=false")
    """Hidden size of an MLP beside the experts that computes every token; mp must divide it.  0: none."""
    vocabulary: int
    """V, the number of token ids."""
    vocabulary_multiple: int
    """The embedding and output head are padded to a multiple of this, which mp must divide; the loss is the same."""
    context: int = key(below=2**24)
    """T, the number of tokens per training sequence; mp must divide it unless tensor_parallel=all_reduce."""
    block: choices.Block
    """parallel: attention and MLP read the same normalised input and share their collectives.  parallel_two_norms: the
    same, each with the scale and bias of a norm of its own.  sequential: the MLP after attention."""
    norm: choices.Norm
    """Normalisation layer.  rmsnorm_unit_offset: RMSNorm multiplied by 1 + weight instead of by the weight."""
    norm_epsilon: float | None = key(above=0)
    """Added to the variance in a norm; null is 1e-5 for layernorm and 1e-6 for the others."""
    norm_bias: bool = key(unless=False, needs="model.norm=layernorm")
    """Whether every LayerNorm adds a bias."""
    norm_placement: choices.NormPlacement = key(unless="before", needs="model.block=sequential")
    """before: the inputs of attention and MLP are normalised.  after: their outputs.  both."""
    qk_norm: bool
    """Whether each head of q and k is normalised, before the rotary encoding, by an RMSNorm like that of `norm`."""
    qk_norm_across_heads: bool = key(unless=False, needs="model.qk_norm=true")
    """Whether all heads of q are normalised together, and all of k, each element with a scale of its own."""
    mlp: choices.Mlp
    """Activation of the MLP.  gelu: GELU in its tanh form.  gelu_erf: exact GELU.  swiglu, geglu: up times a gate,
    which has SiLU or the tanh form of GELU.  clamped_swiglu: as swiglu, with gate and up of at most 7, gate x
    sigmoid(1.702 gate) for SiLU, and up + 1."""
    qkv_bias: bool
    """Whether the query, key and value projections add a bias."""
    attention_output_bias: bool
    """Whether the output projection of attention adds a bias."""
    mlp_bias: bool
    """Whether the projections of the MLP add a bias; or those of each expert, and the router."""
    head_bias: bool = key(unless=False, needs="model.tie_embeddings=false")
    """Whether the output head adds a bias."""
    positions: choices.PositionKind
    """Position encoding: biases of the scores (alibi), rotated q and k (rotary), or an embedding (learned)."""
    rotary_base: float
    """For positions=rotary: pair k of R/2 is rotated by position x base^(-2k/R)."""
    rotary_dim: int | None = key(least=2, needs="model.positions=rotary")
    """R, how many elements of each head are rotated, the first ones; null is all of them."""
    rotary_pairing: choices.RotaryPairing = key(unless="half", needs="model.positions=rotary")
    """Which elements form a pair that is rotated.  half: k and k + R/2.  neighbouring: 2k and 2k + 1."""
    rotary_scaling: choices.RotaryScaling = key(unless="none", needs="model.positions=rotary")
    """How the rates are lowered for a longer context.  linear: all are divided by the factor.
    llama3: those whose wavelength exceeds original_context / low_frequency_factor are divided, those below
    original_context / high_frequency_factor stay, and those between are interpolated by wavelength.  yarn: as llama3,
    but interpolated by the number of the pair, from one whole pair to another (yarn_unrounded: from a fraction of one),
    and the rotated elements of q and k are multiplied by rotary_amplitude."""
    rotary_scaling_factor: float
    """For rotary_scaling=llama3, yarn and linear: what low rates, with linear all rates, are divided by."""
    rotary_low_frequency_factor: float = key(least=0)
    """For rotary_scaling=llama3 and yarn: rotations in the original context below which a rate is divided."""
    rotary_high_frequency_factor: float = key(least=0)
    """For rotary_scaling=llama3 and yarn: rotations in the original context above which a rate stays."""
    rotary_original_context: int
    """For rotary_scaling=llama3 and yarn: the context that the model was trained with before its rates were scaled."""
    rotary_amplitude: float | None = key(least=0)
    """For rotary_scaling=yarn: what the rotated elements of q and k are multiplied by; null: 0.1 log(factor) + 1."""
    window: int | None
    """In local layers a token attends to the last `window` tokens, itself included; null: to all before it."""
    layer_pattern: list[choices.LayerKind]
    """Which layers are local, global (without the window) or nope (global, without the rotary encoding), repeated over
    the layers; the first layer has the first element.  []: all are local."""
    rotary_local_base: float | None = key(needs="model.positions=rotary model.window")
    """The rotary base in local layers, whose rates are then not scaled; null: as in the others."""
    attention_softcap: float | None = key(above=0)
    """Scores become softcap x tanh(score / softcap) before the mask; null: they stay as they are."""
    attention_scale_dim: int | None
    """Scores are divided by the square root of this; null: of head_dim."""
    attention_sinks: bool
    """Whether each head has a learned number, the sink, whose exp is added to the denominator of its softmax."""
    logit_softcap: float | None = key(above=0)
    """Logits become softcap x tanh(logit / softcap); null: they stay as they are."""
    tie_embeddings: bool
    """Whether the output head is the transposed embedding."""
    embedding_scale: float = key(above=0)
    """The embedding is multiplied by this, rounded to the dtype of the activations; 1 changes nothing."""
    init_std: float = key(least=0)
    """Standard deviation of the initial weights; projections into the residual stream use init_std / sqrt(2 layers)."""
    remat: choices.Remat
    """Activation checkpointing: which activations of a block are saved, so that the backward pass does not recompute
    them.  none: all.  full: its input.  attention_output: also the output of the attention kernel.  attention: also q,
    k, v and sublayer outputs.  attention_and_up: also up.  mlp: input, sublayer outputs, and the MLP's gate and up.
    all_matmuls: all of these."""
    offload: list[choices.SavedActivation]
    """Which of the saved activations are kept in host memory until the backward pass; no effect on CPU."""
    row_major: bool
    """Whether TPUs store q, k and v row-major, and in sequential blocks the input and the sublayer outputs too; false:
    XLA chooses the layout."""
    attention: choices.AttentionKernel
    """What computes attention.  chunked: plain XLA, attention_chunk queries at a time.  splash: a Pallas kernel for TPU
    v4 and later.  cudnn: NVIDIA's kernel.  auto: the device's kernel where it supports this model, else chunked."""
    attention_chunk: int
    """For attention=chunked: the number of queries whose scores are in memory at a time."""
    adapter: AdapterConfig
    """What is trained beside frozen weights."""


@dataclass
class DataConfig:
    name: str
    """Name of the data in messages."""
    dir: str | None = key(schemes=("gs",))
    """Directory with train.bin, validation.bin and meta.json, or its URL, such as gs://bucket/data; null: `sources`."""
    sources: dict[str, Any]
    """Directories in place of `dir`: {name: {dir, weight, from_step}}.  Weights are shares of the sequences that add up
    to 1: 0.7, 1/3, or {0: 0.7, 1000: 0.5} by step.  A source is left out of the first from_step steps."""
    cache: str | None = key(schemes=())
    """Directory on each host for a copy of data whose `dir` is a URL; null: its rows are read from the URL."""
    source: str | None
    """Where the data comes from.  stdlib, or `--source stdlib --train-tokenizer N`: a run prepares an empty `dir`
    itself.  Other arguments of shmap_tp.prepare: a run prints the command for an empty `dir`.  null: not known."""
    documents: choices.Documents
    """isolated: a token sees earlier tokens of its own document alone, whose first position is 0; the first token of a
    document is no target.  joined: a sequence is one text."""


@dataclass
class TrainConfig:
    steps: int
    """Total number of optimizer steps, with those before a resume; or as tokens that they read, such as 10B tokens."""
    batch: int = key(below=2**24)
    """Global batch size: sequences per optimizer step, over all devices and microbatches."""
    microbatches: int
    """Gradient accumulation: the number of microbatches per step; dp must divide batch / microbatches."""
    max_sequences_per_device: int | None = key(zero_is_null=True)
    """Upper limit of the sequences that a device computes at a time, for which `microbatches` is raised; null: none."""
    precision: choices.Precision
    """dtype of activations and matmuls; master weights stay float32.  auto: float32 on CPU, else bfloat16."""
    matmul_precision: choices.MatmulPrecision
    """int8, fp8: linear layers and experts round what they multiply to 8 bits (docs/precision.md); bfloat16: not."""
    matmul_scope: choices.MatmulScope
    """Where matmul_precision applies: to all matrices of blocks, or to MLPs and experts alone (docs/precision.md)."""
    matmul_rounding: choices.MatmulRounding
    """How gradients are rounded to 8 bits: to the nearest number, or at random up or down, right on average."""
    z_loss: float = key(least=0)
    """Weight of the squared log-partition term of the loss (PaLM, section 5); 0 disables it."""
    loss_chunk: int
    """Number of positions per device whose logits are in memory at a time."""
    dpo_beta: float | None = key(above=0, usual=0.1)
    """beta of direct preference optimisation, on data of `prepare --preferences`; 0.1 is usual.  null: none."""
    dpo_label_smoothing: float = key(least=0, below=0.5, unless=0, needs="train.dpo_beta")
    """The share of pairs whose preference is taken to be wrong; 0 is plain DPO."""
    dpo_length_normalized: bool = key(unless=False, needs="train.dpo_beta")
    """Whether log-probabilities are means over an answer's tokens, not sums; 5 is then a usual beta."""
    profile: list[int] | None
    """[first, last]: the steps, counted from 1, that are traced for XProf or TensorBoard; null: none."""
    check_replicas_every: int = key(least=0)
    """Steps between checks that all replicas of each parameter are bitwise equal; 0 disables them."""
    replay_every: int = key(least=0)
    """Steps between replays, which compute a microbatch twice and compare (docs/checkpoints.md); 0 disables them."""


@dataclass
class OptimizerConfig:
    name: choices.OptimizerName
    """What updates the parameters.  muon: Muon for matrices of blocks, AdamW for the rest, with one learning rate."""
    learning_rate: float = key(least=0)
    """Peak learning rate, reached at the end of the warm-up."""
    final_learning_rate: float = key(least=0)
    """Learning rate at the end of the decay, and from then on."""
    schedule: choices.Schedule
    """Learning rate after the warm-up.  cosine, linear: it decays until step decay_steps.  wsd (warm-up, stable,
    decay): the peak, then a linear decay in the last decay_fraction of decay_steps.  constant: the peak."""
    warmup_steps: int = key(least=0)
    """Steps over which the learning rate rises linearly; step n of them has n / warmup_steps of the peak."""
    decay_steps: int
    """Step at which the decay ends: train.steps unless it is set.  The config.yaml of a run has it as a number."""
    decay_fraction: float = key(above=0, most=1, usual=0.1)
    """For schedule=wsd: the fraction of decay_steps, counted from its end, in which the learning rate decays."""
    weight_decay: float = key(least=0)
    """Decoupled weight decay, applied to matrices but not to norm scales."""
    embedding_rate: float = key(least=0)
    """Factor of the learning rate for the embedding and learned positions."""
    head_rate: float = key(least=0, unless=1, needs="model.tie_embeddings=false")
    """Factor of the learning rate for the head."""
    vector_rate: float = key(least=0)
    """Factor of the learning rate for scales and biases."""
    hyperball: bool = key(unless=False, needs="model.adapter.rank=0")
    """Matrices of blocks keep their norms; a step moves each by learning_rate times its norm (AdamH, MuonH)."""
    beta1: float = key(least=0, below=1)
    """Decay rate of Adam's first moment."""
    beta2: float = key(least=0, below=1)
    """Decay rate of Adam's second moment."""
    epsilon: float = key(above=0, usual=1e-8)
    """Added to the denominator of Adam's update."""
    momentum: float = key(least=0, below=1)
    """For name=muon: what the (Nesterov) momentum is multiplied by before each gradient is added."""
    momentum_dtype: choices.MomentumDtype
    """dtype of Adam's first moment and of Muon's momentum; bfloat16 saves 2 bytes a parameter, in checkpoints too."""
    newton_schulz_steps: int = key(below=2**6)
    """For name=muon: iterations that orthogonalize a matrix; 5 is usual."""
    clip_norm: float = key(above=0, infinite=True, usual=1)
    """Gradients with a larger global norm are scaled down to this norm."""


@dataclass
class GuardConfig:
    """Bad steps.  A step with a non-finite loss, gradient or update is always skipped: it changes no parameter."""

    loss_spike_sigmas: float | None
    """Also skip steps whose loss is this many standard deviations above the running mean (6 is usual); null: never."""
    window: int = key(least=2)
    """Number of steps of the running mean and deviation; the first `window` steps are never spikes."""
    max_norm_change: float | None = key(least=1.1)
    """Also skip steps whose update would raise or lower the norm of all weights by a larger factor; null: never."""
    max_consecutive: int | None
    """Consecutive skipped steps that stop a run; null: no limit.  A checkpoint after 3 times as many is not resumed."""


@dataclass
class EvaluateConfig:
    every: int = key(least=0)
    """Steps between evaluations; 0: only at the end, else a run from pretrained weights also has one before step 1."""
    batches: int
    """Number of validation batches per evaluation, always the same ones."""


@dataclass
class SampleConfig:
    every: int = key(least=0)
    """Steps between samples, texts that the model writes (terminal, samples.jsonl, ...); 0: only at the end."""
    prompts: list[str]
    """Texts that the model continues; [] writes no samples."""
    max_new_tokens: int
    """Tokens of each sample."""
    temperature: float = key(least=0)
    """0 takes the most likely token each time."""


@dataclass
class CheckpointConfig:
    dir: str = key(schemes=("gs",))
    """Where checkpoints are written: a directory or a gs:// path."""
    every: int | str = key(least=0)
    """Steps between checkpoints; 0: only at the end, or when stopped; auto: the interval that loses least."""
    hours_between_failures: float | None = key(above=0, below=10**6, needs="checkpoint.every=auto")
    """Mean hours between two failures or preemptions; null: learnt from the starts of the run."""
    local_dir: str | None = key(schemes=())
    """Directory of each host, a disk or ram disk, for checkpoints that are newer than those in `dir`; null: none."""
    local_every: int = key(least=1)
    """Steps between checkpoints in local_dir."""
    keep: int = key(least=2)
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = key(zero_is_null=True)
    """Checkpoints at multiples of this step are kept forever; null keeps none of them."""
    resume: choices.Resume
    """never: `dir` must hold no checkpoint.  must: continue from the newest.  if_present: continue if there is one."""


@dataclass
class LogConfig:
    every: int
    """Steps between printed lines where stderr is no terminal; the first step, and 30 silent seconds, have one too."""
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
