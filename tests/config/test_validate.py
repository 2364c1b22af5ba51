"""Validation of the configuration: each rule rejects what breaks it, with a message that states the way out."""

from shmap_tp.config.validate import resolve_auto, validate_process_arguments
from tests.helpers.config_errors import broken_rule, check_messages, refusal, with_values

RULES = {
    "mesh.dp=many": "mesh.dp=many must be an integer or auto",
    "data.source=web": "data.source=web: there is no such source; use stdlib, null, or the arguments of",
    # the optimizer
    "optimizer.decay_steps=30": "optimizer.decay_steps=30 must be above optimizer.warmup_steps=30",
    "optimizer.decay_steps=30 optimizer.schedule=wsd": "optimizer.decay_steps=30 must be above optimizer.warmup_steps",
    "optimizer.decay_steps=30 optimizer.schedule=constant": "accepted",
    "optimizer.decay_fraction=0.001 optimizer.schedule=linear": "accepted",  # which has no such part
    # profiled steps
    "train.profile=[5]": "train.profile=[5] must be [first, last], two steps from 1 to train.steps=300",
    "train.profile=[9,8]": "train.profile=[9, 8] must be [first, last]",
    "train.profile=[299,301]": "train.profile=[299, 301] must be [first, last], two steps from 1 to train.steps=300",
    # divisibility
    "mesh.mp=3": "mesh.mp=3 does not divide heads=8 (model bytes); use mesh.mp in {1, 2, 4, 8}",
    "model.ffn=510": "mesh.mp=4 does not divide ffn=510 (model bytes); use mesh.mp in {1, 2}",
    "model.vocabulary_multiple=3": "mesh.mp=4 does not divide the padded vocabulary=258 (model bytes); use",
    "model.context=6": "accepted",
    "model.context=6 mesh.tensor_parallel=sequence": "mesh.mp=4 does not divide context=6 (model bytes, "
    "mesh.tensor_parallel=sequence); use mesh.mp in {1, 2}",
    "model.context=6 mesh.tensor_parallel=collective_matmul": "mesh.mp=4 does not divide context=6",
    "model.kv_heads=3": "model.kv_heads=3 does not divide model.heads=8; choose a divisor",
    "model.heads=12 model.kv_heads=4 mesh.mp=6 model.ffn=48 model.vocabulary_multiple=6": "mesh.mp=6 neither divides "
    "kv_heads=4 (model bytes) nor is a multiple of it; use mesh.mp in {1, 2}",
    "mesh.processes=3": "mesh.processes=3 does not divide the 8 devices of mesh dp=2 x mp=4; use",
    "mesh.slices=3": "mesh.slices=3 does not divide mesh.dp=2 (no row or mp group spans slices); "
    "use mesh.slices in {1, 2}",
    "mesh.dp=3": "mesh.dp=3 does not divide a microbatch of 16 sequences (train.batch / train.microbatches); "
    "use mesh.dp in {1, 2, 4, 8, 16}",
    "train.microbatches=5": "train.microbatches=5 does not divide train.batch=32; use train.microbatches in {1, 2,",
    "train.dpo_length_normalized=true": "train.dpo_length_normalized=true needs a value of train.dpo_beta, but",
    "train.dpo_label_smoothing=0.1": "train.dpo_label_smoothing=0.1 needs a value of train.dpo_beta, but",
    "train.matmul_rounding=stochastic": "train.matmul_rounding=stochastic cannot be combined with "
    "train.matmul_precision=bfloat16, which rounds no gradient to 8 bits (model bytes); use train.matmul_precision=",
    "train.matmul_scope=mlp": "train.matmul_scope=mlp cannot be combined with train.matmul_precision=bfloat16, which "
    "rounds no matrix to 8 bits (model bytes); use train.matmul_precision=int8 or fp8, or train.matmul_scope=blocks",
    # gradients in rings
    "mesh.zero=fsdp mesh.fsdp_gradients=ring mesh.tensor_parallel=collective_matmul": "use mesh.tensor_parallel="
    "sequence, or mesh.fsdp_gradients=reduce_scatter",
    # offload
    "model.offload=[up]": "model.offload has up, which model.remat=none does not save; use one of mlp, "
    "attention_and_up, all_matmuls",
    "model.remat=attention model.offload=[sublayer_output]": "cannot be combined with model.block=parallel",
    "model.remat=attention model.offload=[sublayer_output] model.block=sequential": "accepted",
    # positions
    "model.layer_pattern=[global,nope]": "nope cannot be combined with model.positions=alibi (model bytes)",
    "model.positions=rotary model.rotary_dim=5": "model.rotary_dim=5 must be even for model.positions=rotary",
    "model.positions=rotary model.head_dim=5": "model.head_dim=5 must be even for model.positions=rotary",
    "model.positions=rotary model.rotary_dim=18": "of elements, and at most model.head_dim=16 (model bytes)",
    "model.positions=rotary model.rotary_scaling=yarn model.rotary_base=1": "model.rotary_base=1.0 gives all pairs one",
    "model.positions=rotary model.rotary_scaling=llama3 model.rotary_high_frequency_factor=1": "model."
    "rotary_low_frequency_factor=1.0 must be above 0 and below model.rotary_high_frequency_factor=1.0",
    # layers that differ
    "model.layer_pattern=[local,global]": "model.layer_pattern=[local,global] has local layers, which need a window, "
    "but model.window=null (model bytes)",
    "model.window=8 model.layer_pattern=[global]": "model.layer_pattern=[global] has no local layer, but model.window="
    "8 (model bytes)",
    "model.window=8 model.layer_pattern=[local,global,global,global,global]": "has 5 elements, more than model.layers=4"
    " (model bytes)",
    "model.window=8 model.layer_pattern=[local,global] model.remat=full model.offload=[input]": "accepted",
    "model.window=8 model.layer_pattern=[local,global] mesh.zero=fsdp model.remat=full model.offload=[input] "
    "mesh.fsdp_gradients=ring": "accepted",
}  # fmt: skip


def test_the_message_for_a_broken_rule_states_the_rule():
    check_messages(broken_rule, RULES)


EXPERTS = ["model.experts=8", "model.block=sequential", "model.mlp=swiglu", "mesh.mp=4", "mesh.dp=2"]
OF_EXPERTS = {
    "model.ffn=510": "accepted",  # the hidden size of an expert
    "model.experts=6": "mesh.mp=4 does not divide experts=6 (model bytes); use mesh.mp in {1, 2}",
    "model.shared_expert_ffn=6": "mesh.mp=4 does not divide shared_expert_ffn=6 (model bytes); use mesh.mp in {1, 2}",
    "model.experts_per_token=9": "model.experts_per_token=9 is above model.experts=8 (model bytes)",
    "model.experts_per_token=1": "cannot be combined with model.router_normalize=true (model bytes); use model.",
    "model.block=parallel": "model.experts=8 needs model.block=sequential, but model.block=parallel (model bytes); "
    "change that, or use model.experts=0",
    "model.mlp=gelu": "model.experts=8 cannot be combined with model.mlp=gelu (model bytes); use one of swiglu, geglu",
    "model.mlp_bias=true model.shared_expert_ffn=128": "=128 needs model.mlp_bias=false, but model.mlp_bias=true",
    "model.adapter.rank=4": "model.experts=8 cannot be combined with adapters of them, model.adapter.matrices=",
    "model.adapter.rank=4 model.adapter.matrices=[attention] model.router_bias_rate=0.1": "model.adapter."
    "rank=4, whose checkpoints have adapters alone (model bytes); use model.router_bias_rate=null",
    "mesh.ep=4 mesh.dp=4": "mesh.ep=4 x mesh.mp=4 does not divide experts=8 (model bytes); use mesh.ep in {1, 2}",
    "mesh.ep=2 mesh.dp=3": "mesh.ep=2 does not divide mesh.dp=3; use mesh.ep in {1, 3}",
    "mesh.ep=2 mesh.slices=2": "mesh.ep=2 does not divide mesh.dp=2 / mesh.slices=2; use "
    "mesh.ep in {1}",
    "mesh.ep=2 mesh.zero=fsdp mesh.fsdp_gradients=ring": "mesh.fsdp_gradients=ring needs mesh.ep=1, but mesh.ep=2;",
}  # fmt: skip


def test_the_message_for_experts_that_are_not_possible_states_the_rule():
    check_messages(broken_rule, OF_EXPERTS, *EXPERTS)


def test_a_wsd_schedule_decays_in_steps_after_its_warm_up():
    given = ["optimizer.warmup_steps=30", "optimizer.decay_steps=300", "optimizer.schedule=wsd"]
    for fraction, steps in [("0.001", 0), ("0.91", 273), ("1", 300)]:
        assert broken_rule(f"optimizer.decay_fraction={fraction}", *given) == (
            f"optimizer.decay_fraction={float(fraction)} of optimizer.decay_steps=300 is {steps} steps, which must be "
            "from 1 to 270,\nthe steps after optimizer.warmup_steps=30; change one of them, or use "
            "optimizer.schedule=linear or constant"
        )


def test_every_mp_that_is_advised_suits_all_sizes_of_the_model():
    sizes = ["model.heads=9", "model.kv_heads=3", "model.ffn=1536", "model.vocabulary_multiple=1152", "mesh.dp=1"]
    found = [broken_rule(*sizes, f"mesh.mp={mp}").partition("does not ")[2] for mp in (2, 9, 1, 3)]
    advice = "(model bytes); use mesh.mp in {1, 3}"
    assert found == [f"divide heads=9 {advice}", f"divide ffn=1536 {advice}", "", ""]


AUTO = {
    (8, "mesh.dp=auto mesh.mp=2"): (4, 2),
    (2, "mesh.dp=auto mesh.mp=2"): (1, 2),
    (8, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2"): (8, 2),
    (4, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2"): (4, 4),
    (1, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2"): (1, 16),
    (None, "mesh.dp=4 mesh.mp=2 train.max_sequences_per_device=3"): (4, 4),  # 4 exceed the limit; 3 do not divide them
    (None, "mesh.dp=4 mesh.mp=2"): (4, 2),
}


def test_auto_uses_all_devices_and_respects_the_limit_of_sequences_per_device():
    for (devices, given), expected in AUTO.items():
        made = resolve_auto(with_values(*given.split()), devices)
        assert (made.mesh.dp, made.train.microbatches, made.train.batch) == (*expected, 32), (devices, given)


def test_the_message_for_an_impossible_auto_states_the_problem():
    for devices, message in {
        6: "mesh.mp=4 does not divide the 6 available devices (mesh.dp=auto); use mesh.mp in {1, 2}",
        12: "mesh.dp=auto is 3 on 12 devices, and mesh.dp=3 does not divide a microbatch of 16 sequences",
        None: "mesh.dp=auto is only for training, on all available devices; give mesh.dp as a number",
    }.items():
        assert refusal(resolve_auto, with_values("mesh.dp=auto"), devices).startswith(message)


def test_the_port_of_the_coordinator_is_a_number_of_ascii_digits():
    for coordinator in ["localhost:٣٣٣٣", "localhost:99999999999999999999", "local\nhost:80", ":80", "a:0x50"]:
        message = refusal(validate_process_arguments, coordinator, 0, 2)
        assert "is not HOST:PORT; use for example --coordinator 10.0.0.2:8476" in message, coordinator
    validate_process_arguments("localhost:3333", 0, 2)
