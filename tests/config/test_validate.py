"""Validation of the configuration: each rule rejects what breaks it, with a message that states the way out."""

import pytest

from shmap_tp.config.compose import load
from shmap_tp.config.process_arguments import validate_process_arguments
from shmap_tp.config.schema import TensorParallelMode
from shmap_tp.config.validate import resolve_auto
from shmap_tp.errors import UserError
from tests.helpers.config_errors import error_message
from tests.helpers.run_fixtures import FIRST

OVERRIDES = {
    # ranges
    "run.seed=-1": "run.seed=-1 is too small; it must be 0 or more",
    "run.seed=4294967296": "run.seed=4294967296 is too large; it must be below 2^32 = 4294967296",
    "optimizer.weight_decay=nan": "optimizer.weight_decay=nan is not a number; give one of 0 or more",
    "optimizer.learning_rate=inf": "optimizer.learning_rate=inf is not finite; give a number",
    "optimizer.final_learning_rate=-1e-3": "optimizer.final_learning_rate=-0.001 is too small; it must be 0 or more",
    "optimizer.beta1=-0.1": "optimizer.beta1=-0.1 is too small; it must be 0 or more",
    "optimizer.beta2=1.0": "optimizer.beta2=1.0 is too large; it must be below 1",
    "optimizer.epsilon=0": "optimizer.epsilon=0.0 must be above 0 and finite; 1.0e-8 is usual",
    "model.init_std=nan": "model.init_std=nan is not a number; give one of 0 or more",
    "guard.max_norm_change=1": "guard.max_norm_change=1.0 is too small; it must be 1.1 or more",
    "train.z_loss=-1": "train.z_loss=-1.0 is too small; it must be 0 or more",
    "model.vocabulary=2147483648": "model.vocabulary=2147483648 is too large; it must be below 2^31 = 2147483648",
    "guard.window=9999999999": "guard.window=9999999999 is too large; it must be below 2^31 = 2147483648",
    "checkpoint.dir=": "checkpoint.dir is empty, which would be the working directory; name one, or . for that",
    "data.source=web": "data.source=web: there is no such source; use stdlib, null, or the arguments of",
    "data.source=": "data.source=: there is no such source; use stdlib, null, or the arguments of",
    "data=[minipile,stdlib]": "data=[minipile,stdlib]: there is no such data; use one of fineweb_edu_llama2, ",
    "mesh.dp=0": "mesh.dp=0 is too small; it must be 1 or more",
    "mesh.dp=many": "mesh.dp=many must be an integer or auto",
    "mesh.dp=1.5": "mesh.dp=1.5 must be of type int | str",
    "train.max_sequences_per_device=-1": "train.max_sequences_per_device=-1 is too small; it must be 1 or more",
    "run.join_timeout_seconds=0": "run.join_timeout_seconds=0 is too small; it must be 1 or more",
    "mesh.mp=-2": "mesh.mp=-2 is too small; it must be 1 or more",
    "model.kv_heads=0": "model.kv_heads=0 is too small; it must be 1 or more",
    "model.vocabulary_multiple=0": "model.vocabulary_multiple=0 is too small; it must be 1 or more",
    "train.loss_chunk=0": "train.loss_chunk=0 is too small; it must be 1 or more",
    "checkpoint.keep=1": "checkpoint.keep=1 is too small; it must be 2 or more",
    "checkpoint.keep_every=-5": "checkpoint.keep_every=-5 is too small; it must be 1 or more",
    "optimizer.learning_rate=nan": "optimizer.learning_rate=nan is not a number; give one of 0 or more",
    "optimizer.decay_steps=30": "optimizer.decay_steps=30 must be above optimizer.warmup_steps=30",
    "optimizer.decay_fraction=0": "optimizer.decay_fraction=0.0 must be above 0 and at most 1; 0.1 is usual",
    "optimizer.decay_fraction=1.1": "optimizer.decay_fraction=1.1 must be above 0 and at most 1; 0.1 is usual",
    "optimizer.schedule=exponential": "optimizer.schedule=exponential must be one of cosine, linear, constant, wsd",
    "optimizer.clip_norm=0": "optimizer.clip_norm=0.0 must be above 0",
    "guard.loss_spike_sigmas=0.5": "guard.loss_spike_sigmas=0.5 is too small; it must be 1 or more",
    "guard.window=1": "guard.window=1 is too small; it must be 2 or more",
    "guard.max_consecutive=0": "guard.max_consecutive=0 is too small; it must be 1 or more",
    "guard.loss_spike_sigmas=true": "guard.loss_spike_sigmas=True must be of type float | None",
    # profiled steps
    "train.profile=[5]": "train.profile=[5] must be [first, last], two steps from 1 to train.steps=300",
    "train.profile=[0,2]": "train.profile=[0, 2] must be [first, last], two steps from 1",
    "train.profile=[9,8]": "train.profile=[9, 8] must be [first, last]",
    "train.profile=[299,301]": "train.profile=[299, 301] must be [first, last], two steps from 1 to train.steps=300",
    "train.profile=7": "train.profile=7 must be of type list[int] | None",
    "train.profile=[1,a]": "train.profile[1]=a must be of type list[int] | None",
    # divisibility and combinations
    "mesh.mp=3": "mesh.mp=3 does not divide heads=8 (model bytes); use mesh.mp in {1, 2, 4, 8}",
    "model.ffn=510": "mesh.mp=4 does not divide ffn=510 (model bytes); use mesh.mp in {1, 2}",
    "model.vocabulary_multiple=3": "mesh.mp=4 does not divide the padded vocabulary=258 (model bytes); use",
    "mesh.tensor_parallel=line": "mesh.tensor_parallel=line must be one of all_reduce, sequence, collective_matmul",
    "mesh.processes=3": "mesh.processes=3 does not divide the 8 devices of mesh dp=2 x mp=4; use",
    "mesh.slices=3": "mesh.slices=3 does not divide mesh.dp=2 (a row or an mp group cannot span slices); "
    "use mesh.slices in {1, 2}",
    "mesh.fsdp_gradients=ring": "mesh.fsdp_gradients=ring needs mesh.zero=fsdp, but mesh.zero=none; set mesh.zero=fsdp",
    "model.offload=[up]": "model.offload has up, which model.remat=none does not save; "
    "use model.remat in {mlp, attention_and_up, all_matmuls}",
    "model.offload=up": "model.offload=up must be a list, for example [a,b]",
    "model.offload=[heads]": "model.offload[0]=heads must be one of input, sublayer_output, "
    "query_key_value, attention_output, gate, up",
    "model.norm_epsilon=0": "model.norm_epsilon=0 must be above 0",
    "model.embedding_scale=0": "model.embedding_scale=0 must be above 0",
    "model.rotary_base=0": "model.rotary_base=0.0 is too small; it must be 1 or more",
    "model.rotary_dim=4": "model.rotary_dim=4 has no effect with model.positions=alibi (model bytes); "
    "use model.positions=rotary, or remove it",
    "model.rotary_pairing=neighbouring": "model.rotary_pairing=neighbouring has no effect with model.positions=alibi",
    "model.rotary_scaling=llama3": "model.rotary_scaling=llama3 has no effect with model.positions=alibi",
    "model.rotary_scaling=longrope": "model.rotary_scaling=longrope must be one of none, llama3, linear, yarn",
    "model.layer_pattern=[local,sliding]": "model.layer_pattern[1]=sliding must be one of local, global, nope",
    "model.layer_pattern=[local,global]": "model.layer_pattern=[local,global] has local layers, which need a window, "
    "but model.window=null (model bytes)",
    "model.layer_pattern=[global,nope]": "model.layer_pattern=[global,nope] with nope has no effect with model.",
    "model.qk_norm_across_heads=true": "model.qk_norm_across_heads=true needs model.qk_norm=true and a norm without",
    "model.norm_placement=after": "model.norm_placement=after needs model.block=sequential, but model.block=parallel",
    "model.norm_placement=both": "model.norm_placement=both needs model.block=sequential, but model.block=parallel",
    "model.logit_softcap=0": "model.logit_softcap=0 must be above 0",
    "model.rotary_local_base=10": "model.rotary_local_base=10.0 has no effect with model.positions=alibi",
    "model.window=0": "model.window=0 is too small; it must be 1 or more",
    "model.kv_heads=3": "model.kv_heads=3 does not divide model.heads=8; choose a divisor",
    "mesh.dp=3": "mesh.dp=3 does not divide a microbatch of 16 sequences (train.batch / train.microbatches); "
    "use mesh.dp in {1, 2, 4, 8, 16}",
    "train.microbatches=5": "train.microbatches=5 does not divide train.batch=32; use train.microbatches in {1, 2,",
}  # fmt: skip


@pytest.mark.parametrize("override", OVERRIDES)
def test_the_message_for_a_broken_rule_states_the_rule(override):
    assert OVERRIDES[override] in error_message(FIRST, override)


EXPERTS = ["model.experts=8", "model.block=sequential", "model.mlp=swiglu", "mesh.mp=4", "mesh.dp=2"]
OF_EXPERTS = {
    "model.experts=6": "mesh.mp=4 does not divide experts=6 (model bytes); use mesh.mp in {1, 2}",
    "model.shared_expert_ffn=6": "mesh.mp=4 does not divide shared_expert_ffn=6 (model bytes); use mesh.mp in {1, 2}",
    "model.experts_per_token=9": "model.experts_per_token=9 is above model.experts=8 (model bytes); use at most 8",
    "model.block=parallel": "model.experts=8 cannot be combined with model.block=parallel (model bytes); "
    "use model.block=sequential",
    "model.mlp=gelu": "model.experts=8 cannot be combined with model.mlp=gelu (model bytes); use one of swiglu, geglu",
    "model.mlp_bias=true model.shared_expert_ffn=128": "model.experts=8 cannot be combined with "
    "model.shared_expert_ffn=128 and model.mlp_bias=true (model bytes); use model.mlp_bias=false",
    "model.adapter.rank=4": "model.adapter.matrices has all, but experts have no adapters (model.experts=8); "
    "use model.adapter.matrices=[attention]",
    "model.adapter.rank=4 model.adapter.matrices=[attention] model.router_bias_rate=0.1": "model.router_bias_rate=0.1 "
    "moves biases of routers, but with model.adapter.rank=4 checkpoints have adapters alone; use "
    "model.router_bias_rate=0",
    "model.router_bias_rate=-0.1": "model.router_bias_rate=-0.1 is too small; it must be 0 or more",
    "mesh.ep=4 mesh.dp=4": "mesh.ep=4 x mesh.mp=4 does not divide experts=8 (model bytes); use mesh.ep in {1, 2}",
    "mesh.ep=2 mesh.dp=3": "mesh.ep=2 does not divide mesh.dp=3, of which it is a part; use mesh.ep in {1, 3}",
    "mesh.ep=2 mesh.slices=2": "mesh.ep=2 does not divide mesh.dp=2 / mesh.slices=2, of which it is a part; use "
    "mesh.ep in {1}",
    "mesh.ep=2 mesh.zero=fsdp mesh.fsdp_gradients=ring": "mesh.fsdp_gradients=ring cannot be combined with mesh.ep=2",
    "mesh.ep=2 model.experts=0": "mesh.ep=2 shards experts, and model.experts=0 (model bytes); set model.experts, or",
    "mesh.ep=2 model.expert_capacity=0.9": "model.expert_capacity=0.9 is too small; it must be 1 or more",
    "model.experts=0 model.expert_capacity=2": "model.expert_capacity=2.0 has no effect with model.experts=0 (model "
    "bytes); set model.experts, or model.expert_capacity=null",
    "model.experts=0 model.router_bias_rate=0": "model.router_bias_rate=0.0 has no effect with model.experts=0 (model "
    "bytes); set model.experts, or model.router_bias_rate=null",
    "model.experts=0 model.router_z_loss=0.1": "model.router_z_loss=0.1 has no effect with model.experts=0 (model "
    "bytes); set model.experts, or model.router_z_loss=0",
}  # fmt: skip


@pytest.mark.parametrize("given", OF_EXPERTS)
def test_the_message_for_experts_that_are_not_possible_states_the_rule(given):
    assert OF_EXPERTS[given] in error_message(FIRST, *EXPERTS, *given.split())


def test_mp_need_not_divide_the_hidden_size_of_an_expert():
    load(FIRST, [*EXPERTS, "model.ffn=510"])


@pytest.mark.parametrize("fraction, steps", [("0.001", 0), ("0.91", 273), ("1", 300)])
def test_a_wsd_schedule_decays_in_steps_after_its_warm_up(fraction, steps):
    given = [f"optimizer.decay_fraction={fraction}", "optimizer.warmup_steps=30", "optimizer.decay_steps=300"]
    assert error_message(FIRST, "optimizer.schedule=wsd", *given) == (
        f"optimizer.decay_fraction={float(fraction)} of optimizer.decay_steps=300 is {steps} steps, which must be from "
        "1 to 270,\nthe steps after optimizer.warmup_steps=30; change one of them, or use optimizer.schedule=linear "
        "or constant"
    )
    load(FIRST, ["optimizer.schedule=linear", *given])  # which has no such part


def test_only_a_schedule_with_a_decay_must_end_after_its_warm_up():
    given = ["optimizer.warmup_steps=500", "optimizer.decay_steps=300"]
    assert load(FIRST, ["optimizer.schedule=constant", *given]).optimizer.warmup_steps == 500
    for schedule in ("linear", "wsd"):
        assert "must be above optimizer.warmup_steps=500" in error_message(
            FIRST, f"optimizer.schedule={schedule}", *given
        )


def test_layers_that_differ_need_a_pattern_that_fits_and_a_scan_without_rings_and_offload():
    pattern = "model.layer_pattern=[local,global,global,global,global]"
    said = error_message(FIRST, "model.window=8", pattern)
    assert "=[local,global,global,global,global] has 5 elements, more than model.layers=4 (model bytes)" in said
    said = error_message(FIRST, "model.window=8", "model.layer_pattern=[global]")
    assert "model.layer_pattern=[global] has no local layer, but model.window=8 (model bytes)" in said
    given = ["model.window=8", "model.layer_pattern=[local,global]", "mesh.zero=fsdp", "model.remat=full"]
    load(FIRST, [*given, "model.offload=[input]"])
    said = error_message(FIRST, *given, "model.offload=[input]", "mesh.fsdp_gradients=ring")
    assert "model.layer_pattern=[local,global] cannot be combined with model.offload where gradients are" in said


def test_fsdp_gradient_ring_cannot_be_combined_with_collective_matmul():
    message = error_message(
        FIRST, "mesh.zero=fsdp", "mesh.fsdp_gradients=ring", "mesh.tensor_parallel=collective_matmul"
    )
    assert message.endswith("use mesh.tensor_parallel=sequence, or mesh.fsdp_gradients=reduce_scatter")


@pytest.mark.parametrize("mode", ["sequence", "collective_matmul"])
def test_mp_must_divide_the_context_when_activations_are_sharded_over_time(mode):
    assert load(FIRST, ["model.context=6"]).mesh.tensor_parallel is TensorParallelMode.all_reduce
    message = error_message(FIRST, "model.context=6", f"mesh.tensor_parallel={mode}")
    assert message == (
        f"mesh.mp=4 does not divide context=6 (model bytes, mesh.tensor_parallel={mode}); use mesh.mp in {{1, 2}}"
    )


def test_every_mp_that_is_advised_suits_all_sizes_of_the_model():
    sizes = ["model.heads=9", "model.kv_heads=3", "model.ffn=1536", "model.vocabulary_multiple=1152", "mesh.dp=1"]
    message = error_message(FIRST, *sizes, "mesh.mp=2")
    assert message == "mesh.mp=2 does not divide heads=9 (model bytes); use mesh.mp in {1, 3}"
    assert [load(FIRST, [*sizes, f"mesh.mp={mp}"]).mesh.mp for mp in (1, 3)] == [1, 3]
    assert error_message(FIRST, *sizes, "mesh.mp=9").endswith(
        "does not divide ffn=1536 (model bytes); use mesh.mp in {1, 3}"
    )


def test_mp_must_divide_kv_heads_or_be_a_multiple_of_them():
    message = error_message(
        FIRST, "model.heads=12", "model.kv_heads=4", "mesh.mp=6", "model.ffn=48", "model.vocabulary_multiple=6"
    )
    assert message == (
        "mesh.mp=6 neither divides kv_heads=4 (model bytes) nor is a multiple of it; use mesh.mp in {1, 2}"
    )


@pytest.mark.parametrize(
    ("devices", "given", "dp", "microbatches"),
    [
        (8, "mesh.dp=auto mesh.mp=2", 4, 2),
        (2, "mesh.dp=auto mesh.mp=2", 1, 2),
        (8, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2", 8, 2),
        (4, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2", 4, 4),
        (1, "mesh.dp=auto mesh.mp=1 train.max_sequences_per_device=2", 1, 16),
        (
            None,
            "mesh.dp=4 mesh.mp=2 train.max_sequences_per_device=3",
            4,
            4,
        ),  # 4 exceed the limit, and 3 do not divide them
        (None, "mesh.dp=4 mesh.mp=2", 4, 2),
    ],
)
def test_auto_uses_all_devices_and_respects_the_limit_of_sequences_per_device(devices, given, dp, microbatches):
    made = resolve_auto(load(FIRST, given.split()), devices)
    assert (made.mesh.dp, made.train.microbatches, made.train.batch) == (dp, microbatches, 32)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (6, "mesh.mp=4 does not divide the 6 available devices (mesh.dp=auto); use mesh.mp in {1, 2}"),
        (12, "mesh.dp=auto is 3 on 12 devices, and mesh.dp=3 does not divide a microbatch of 16 sequences"),
        (None, "mesh.dp=auto is only for training, on all available devices; give mesh.dp as a number"),
    ],
)
def test_the_message_for_an_impossible_auto_states_the_problem(devices, message):
    with pytest.raises(UserError) as caught:
        resolve_auto(load(FIRST, ["mesh.dp=auto"]), devices)
    assert str(caught.value).startswith(message)


def test_an_activation_cannot_be_offloaded_twice():
    message = error_message(FIRST, "model.remat=all_matmuls", "model.offload=[up,input,up]")
    assert message == "model.offload=[up,input,up] names an activation twice; name each once"


def test_a_parallel_block_cannot_offload_its_sublayer_output():
    given = ["model.remat=attention", "model.offload=[sublayer_output]"]
    assert "which the backward pass of model.block=parallel does not read" in error_message(
        FIRST, "model.block=parallel", *given
    )
    assert load(FIRST, ["model.block=sequential", *given]).model.offload == ["sublayer_output"]


def test_an_mlp_without_gate_cannot_offload_the_gate():
    given = ["model.remat=all_matmuls", "model.offload=[gate]"]
    assert "gate, but model.mlp=gelu has no gate" in error_message(FIRST, "model.mlp=gelu", *given)
    assert load(FIRST, ["model.mlp=swiglu", *given]).model.offload == ["gate"]


@pytest.mark.parametrize(
    "coordinator", ["localhost:٣٣٣٣", "localhost:99999999999999999999", "local\nhost:80", ":80", "a:0x50"]
)
def test_the_port_of_the_coordinator_is_a_number_of_ascii_digits(coordinator):
    with pytest.raises(UserError, match=r"is not HOST:PORT; use for example --coordinator 10\.0\.0\.2:8476"):
        validate_process_arguments(coordinator, 0, 2)
    validate_process_arguments("localhost:3333", 0, 2)


ROTARY = "model.positions=rotary"
OPTIONS = {
    (ROTARY, "model.rotary_dim=5"): "model.rotary_dim=5 must be even for model.positions=rotary",
    (ROTARY, "model.head_dim=5"): "model.head_dim=5 must be even for model.positions=rotary",
    (ROTARY, "model.rotary_dim=18"): "model.rotary_dim=18 is above model.head_dim=16 (model bytes); use at most 16",
    (ROTARY, "model.rotary_scaling=yarn", "model.rotary_base=1"): "model.rotary_base=1.0 gives all pairs one rate",
    (ROTARY, "model.rotary_scaling=llama3", "model.rotary_high_frequency_factor=1"): (
        "model.rotary_low_frequency_factor=1.0 must be above 0 and below model.rotary_high_frequency_factor=1.0"
    ),
    ("model.norm=rmsnorm", "model.norm_bias=true"): "model.norm_bias=true needs model.norm=layernorm, but "
    "model.norm=rmsnorm (model bytes) has no bias; set model.norm_bias=false",
    ("model.tie_embeddings=true", "model.head_bias=true"): "model.head_bias=true needs an output head of its own",
    ("model.remat=mlp", "model.offload=[gate]", "model.mlp=gelu_erf"): "but model.mlp=gelu_erf has no gate",
    ("model.remat=attention", "model.offload=[sublayer_output]", "model.block=parallel_two_norms"): (
        "which the backward pass of model.block=parallel_two_norms does not read"
    ),
}


@pytest.mark.parametrize("overrides", OPTIONS, ids=" ".join)
def test_the_message_for_options_that_do_not_fit_together_names_both(overrides):
    assert OPTIONS[overrides] in error_message(FIRST, *overrides)
