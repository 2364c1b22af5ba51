"""Small models with the options of each family of pretrained models, and where each of them is compared.

Sizes that differ between families: head dims that are not width / heads, key/value heads fewer than devices of mp.
"""

SIZES = "model.context=8 model.attention_chunk=8"
FAMILIES = {
    "gpt2": "block=sequential norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true positions=learned "
    "tie_embeddings=true remat=attention",
    "gpt_neox": "block=parallel_two_norms norm_bias=true qkv_bias=true attention_output_bias=true mlp_bias=true "
    "mlp=gelu_erf positions=rotary head_dim=6 rotary_dim=4",
    "gptj": "block=parallel norm_bias=true mlp_bias=true head_bias=true positions=rotary head_dim=6 rotary_dim=4 "
    "rotary_pairing=neighbouring",
    "llama3": "block=sequential norm=rmsnorm norm_epsilon=1e-5 mlp=swiglu positions=rotary kv_heads=2 head_dim=8 "
    "rotary_base=10 rotary_scaling=llama3 rotary_original_context=32 remat=mlp",
    "qwen2": "block=sequential norm=rmsnorm mlp=swiglu positions=rotary kv_heads=2 rotary_base=1e6 qkv_bias=true "
    "tie_embeddings=true remat=full",
    "qwen3": "block=sequential norm=rmsnorm mlp=swiglu positions=rotary kv_heads=2 head_dim=6 rotary_base=1e6 "
    "qk_norm=true remat=all_matmuls attention_chunk=4 init_std=0.05",
    "gemma": "block=sequential norm=rmsnorm_unit_offset mlp=geglu positions=rotary kv_heads=1 head_dim=6 "
    "tie_embeddings=true embedding_scale=4.898979485566356 init_std=0.05",
    "mixtral": "block=sequential norm=rmsnorm mlp=swiglu positions=rotary kv_heads=2 ffn=12 experts=8 "
    "experts_per_token=2 router_balance_loss=0.1 router_z_loss=0.1 remat=attention",
    "many experts": "block=sequential norm=rmsnorm mlp=swiglu positions=rotary kv_heads=2 ffn=12 experts=16 "
    "experts_per_token=5 router_normalize=false router_balance_loss=0.1 router_z_loss=0.1 shared_expert_ffn=8 "
    "remat=full",
    "olmo 3": "block=sequential norm=rmsnorm norm_placement=after qk_norm=true qk_norm_across_heads=true mlp=swiglu "
    "kv_heads=2 positions=rotary rotary_base=10 rotary_local_base=100 rotary_scaling=linear layers=3 window=3 "
    "layer_pattern=[local,global] remat=attention init_std=0.05",
    "gemma2 and 3": "block=sequential norm=rmsnorm_unit_offset norm_placement=both qk_norm=true mlp=geglu kv_heads=2 "
    "positions=rotary rotary_local_base=10 layers=5 window=3 layer_pattern=[local,nope,global] attention_chunk=2 "
    "attention_softcap=1 attention_scale_dim=3 logit_softcap=0.5 tie_embeddings=true remat=mlp init_std=0.05",
    "sinks": "block=sequential norm=rmsnorm mlp=swiglu kv_heads=2 positions=rotary attention_sinks=true qkv_bias=true "
    "layers=3 window=3 layer_pattern=[local,global] attention_chunk=4 remat=attention",
}
FAMILIES = {
    name: [*SIZES.split(), *(f"model.{option}" for option in options.split())] for name, options in FAMILIES.items()
}
"""Family -> its settings.  llama3: of its four rates one stays, two are interpolated and one is divided.  gemma and
qwen3 have smaller weights in float32, because factors of norms around two, norms of heads, and the
factor of the embedding amplify rounding errors as larger weights do."""

MESHES = [(1, 1), (2, 2), (1, 4), (8, 1), (2, 4)]
FSDP, RING = ("mesh.zero=fsdp",), ("mesh.zero=fsdp", "mesh.fsdp_gradients=ring")
PARALLELISM = [
    ("all_reduce", ()),
    ("sequence", RING),
    ("collective_matmul", FSDP),
    ("all_reduce", RING),
    ("sequence", ()),
    ("collective_matmul", ()),
]
"""(tensor-parallel mode, data parallelism); the first three have all modes, and each kind of data parallelism once."""

PLACES = [
    (family, MESHES[(i + j) % len(MESHES)], (f"mesh.tensor_parallel={mode}", *data))
    for i, family in enumerate(FAMILIES)
    for j, (mode, data) in enumerate(PARALLELISM)
]
"""(family, mesh, settings): every family on every mesh and in every mode, with FSDP and without, and every mode on
every mesh, but not all combinations: each compiles for seconds."""
