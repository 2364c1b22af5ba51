"""A run around its loop: what it is made of, how it is set up, and what process 0 reports at its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from shmap_tp.config.choices import Resume
from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import mesh_shape, resolve_auto
from shmap_tp.config.yaml_files import flat_values
from shmap_tp.data.batches import Batches, isolating_token
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import DivergedError, UserError
from shmap_tp.hardware.devices import machine_peak
from shmap_tp.hardware.xla_options import compile_with, compiler_options
from shmap_tp.layers.attention_selection import kernel_name
from shmap_tp.model.flops import UncountedError, flops_per_token, frozen_parameters, parameters
from shmap_tp.model.transformer import Transformer
from shmap_tp.runtime.agreement import data_facts, on_process_0, require_agreement
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.distributed import Coordinator
from shmap_tp.runtime.exit_codes import STOPPED
from shmap_tp.runtime.files import replacing, writing
from shmap_tp.runtime.peers import distributed_session
from shmap_tp.runtime.run_lock import lock_directories
from shmap_tp.runtime.shutdown import StopRequest, watch_preemption
from shmap_tp.training import environment
from shmap_tp.training.bad_steps import BadStepMonitor
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.goodput import Profile, TimeCategory, WallClock
from shmap_tp.training.integrity import ReplicaCheck
from shmap_tp.training.local_checkpoints import LocalCheckpoints
from shmap_tp.training.metrics import Meter, check_weights_and_biases, format_samples
from shmap_tp.training.optimizer import describe_schedule
from shmap_tp.training.replay import Replay
from shmap_tp.training.resume import (
    BASE,
    Start,
    find_start,
    refuse_foreign_config,
    restore_or_initialize,
    without_base,
    write_run_config,
)
from shmap_tp.training.run_record import continue_command
from shmap_tp.training.run_report import REPORT, write_report
from shmap_tp.training.step import Components, State, StepFunctions, build_step_functions


@runtime_checkable
class Sampler(Protocol):
    """Continues the prompts of sample.prompts with the parameters of a step.

    It is made by the command (`inference/text.py`), since generation is above training, and has programs of
    its own: the step's program is the same with and without it.
    """

    def __call__(self, params: Transformer, stopped: Callable[[], bool]) -> dict[str, str] | None:
        """{prompt: what the model writes after it}, the same in every process; None if `stopped` came true,
        or, after a line that says so, if the logits are not finite."""
        ...


MakeSampler = Callable[[Config, Mesh, Components, Tokenizer, ChatTemplate | None], Sampler | None]
"""With the chat template of the data, if it has one.  Returns None, and says why, if the model cannot generate; raises
UserError if a prompt does not suit it."""


@dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from its first step to its last."""

    requested: Config
    """The configuration as the user gave it (mesh.dp=auto is not resolved), for config.yaml of the run directory."""
    config: Config
    functions: StepFunctions
    batches: Batches
    checkpoints: Checkpoints
    replicas: ReplicaCheck
    stop: StopRequest
    clock: WallClock
    components: Components
    sampler: Sampler | None
    validation_bytes: dict[str, int] | None
    """UTF-8 bytes of the text of an evaluation of each source, on process 0; None where the tokenizer is not known."""

    def find_start(self) -> Start | None:
        """The newest intact checkpoint, if the run continues from one; see `resume`."""
        return find_start(self.config, self.batches, self.checkpoints, self.components)

    def restore_or_initialize(self, start: Start | None) -> State:
        """The state in that checkpoint, or a new one."""
        given = self.config, self.functions, self.checkpoints, self.components
        return restore_or_initialize(start, *given, self._base)

    def begin(self, first_step: int) -> None:
        """The run has started: write config.yaml and the tokenizer's files, open time.jsonl, print what is trained."""
        config, functions, is_main = self.config, self.functions, jax.process_index() == 0
        directory = Path(config.run.dir)
        if is_main:
            write_run_config(self.requested, directory)
            for name, content in self.batches.companions.items():
                with writing(file := directory / name), replacing(file, "wb") as stream:
                    stream.write(content)
        self.clock.open(directory if is_main else None, first_step, new_run=config.checkpoint.resume == Resume.never)
        size = parameters(config.model, components=self.components)
        trained = size - frozen_parameters(config.model, components=self.components)
        print_on_process_0(
            f"compiling the training step of {config.model.name}, {count_in_words(size)} parameters"
            f"{'' if trained == size else f' ({count_in_words(trained)} trained)'}, "
            f"attention {kernel_name(functions.attention)} ..."
        )
        dtype = compute_dtype(config.train.precision)
        if note := environment.precision_note(dtype, config.train.matmul_precision):
            print_on_process_0(note)
        if self.components.make_optimizer is None:
            print_on_process_0(f"learning rate {describe_schedule(config.optimizer, config.train.steps)}")

    def compile(self, function: Any) -> Any:
        """`functions.step` or `functions.replay`, compiled."""
        functions, options = self.functions, compiler_options(jax.devices()[0].device_kind, self.config)
        lowered = function.lower(functions.shapes, functions.tokens, None, self.batches.sources_shape)
        return compile_with(lowered, options)

    def rows(self, step: int) -> tuple[Any, None, Any]:
        """What a step reads: tokens, no segments of their own, sources.  Steps are counted from 0."""
        return self.batches.training(step), None, self.batches.row_sources(step)

    @cached_property
    def replay(self) -> Replay:
        return Replay(self.compile(self.functions.replay), self.functions.tokens.sharding.mesh)

    def make_monitor(self, skipped_in_a_row: int) -> BadStepMonitor:
        """What counts skipped steps, after so many in a row, and says what they read."""
        where = f"{self.config.data.dir}/train.bin" if self.config.data.dir else "data.sources"
        return BadStepMonitor(self.config.guard, self.batches.sequences, where, skipped_in_a_row)

    def make_meter(self, record: Callable[[dict[str, Any]], None]) -> Meter:
        """A meter that computes MFU from this machine's peak; prints the formula, or why there is none."""
        model, peak, flops = self.config.model, machine_peak(jax.devices()), 0
        why = f"shmap_tp/hardware/devices.py does not list the peak of {jax.devices()[0].device_kind}"
        try:
            flops = flops_per_token(model, components=self.components)
        except UncountedError as error:
            peak, why = None, str(error)
        print_on_process_0(
            f"MFU = tokens/s x model FLOPs per token (causal attention at half, recomputation not counted) / "
            f"{peak.flops / 1e12:.3g} TFLOP/s ({peak.source})"
            if peak
            else f"no MFU: {why}"
        )
        return Meter(record, self.config.train.batch * model.context, flops, peak)

    def save(self, step: int, state: State, skipped_in_a_row: int) -> None:
        """Start to save the checkpoint of `step`: with adapters without the frozen parameters, if these can be read
        again."""
        self.checkpoints.save(step, self._saved(state), self._facts, skipped_in_a_row)

    def save_locally(self, step: int, state: State, skipped_in_a_row: int) -> None:
        """Start to save the same on the disks of the hosts, but not after skipped steps."""
        if not skipped_in_a_row:
            self.checkpoints.save_locally(step, self._saved(state), self._facts)

    def _saved(self, state: State) -> State:
        return state if self._base is None else without_base(state)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What every checkpoint has beside the state."""
        facts = {"config": to_dict(self.config), "data": self.batches.identity, "mesh": mesh_shape(self.config.mesh)}
        facts["components"] = self.components.replaced
        return facts | ({BASE: self._base} if self._base else {})

    @cached_property
    def _base(self) -> dict[str, str] | None:
        """What the frozen parameters are, where checkpoints have that in place of them."""
        identify = self.components.identify_parameters
        return identify(self.config) if self.config.model.adapter.rank and identify else None


@contextmanager
def open_run(
    requested: Config,
    stop: StopRequest,
    coordinator: Coordinator | None,
    components: Components,
    make_sampler: MakeSampler | None,
) -> Iterator[Run]:
    """A run as `requested`, joined with its other processes; its directories are locked, and nothing is trained yet.

    Raises `UserError` if it cannot be one.
    """
    with (
        WallClock() as clock,
        distributed_session(requested, coordinator, stop.stop_event) as stop.peers,
        environment.explained_memory_errors(),
    ):
        config = resolve_auto(requested, len(jax.devices()))
        mesh = environment.mesh_of_devices(config)
        environment.warn_of_many_emulated_devices()
        written = {"run.dir": config.run.dir, "checkpoint.dir": config.checkpoint.dir}
        with lock_directories(written) as require_owner:
            on_process_0("log.wandb", lambda: check_weights_and_biases(config))
            on_process_0("config.yaml", lambda: refuse_foreign_config(config.run.dir))
            environment.prepare_environment(config)
            dtype, end_of_text = compute_dtype(config.train.precision), isolating_token(config.data, config.model)
            functions = build_step_functions(config, mesh, dtype, components, end_of_text)
            environment.require_host_memory(functions.shapes)
            batches = Batches(config, functions.tokens)
            require_agreement("data", data_facts(batches.identity))
            local = None
            if config.checkpoint.local_dir is not None:
                has_base = config.model.adapter.rank and components.identify_parameters
                shapes = without_base(functions.shapes) if has_base else functions.shapes
                local = LocalCheckpoints(config.checkpoint, shapes, print_on_process_0)
            saved = Checkpoints(config.checkpoint, print_on_process_0, require_owner, local=local)
            with watch_preemption(stop.stop_event), saved as checkpoints:
                text = _text_tools(config, mesh, batches, components, make_sampler)
                replicas = ReplicaCheck(functions.shapes)
                yield Run(requested, config, functions, batches, checkpoints, replicas, stop, clock, components, *text)


def _text_tools(
    config: Config, mesh: Mesh, batches: Batches, components: Components, make_sampler: MakeSampler | None
) -> tuple[Sampler | None, dict[str, int] | None]:
    """(the sampler, the UTF-8 bytes of the text of an evaluation by source, on process 0); None, and a line that says
    why, where the data's tokenizer is not known."""
    try:
        tokenizer = batches.text_tokenizer()
    except UserError as error:
        print_on_process_0(f"no samples and no bits per byte: {error}")
        return None, None
    counted = batches.validation_bytes(tokenizer) if jax.process_index() == 0 else None
    if make_sampler is None or not config.sample.prompts:
        return None, counted
    return make_sampler(config, mesh, components, tokenizer, batches.chat_template()), counted


def end_run(
    run: Run, step: int, evaluated: bool, monitor: BadStepMonitor, profile: Profile, texts: dict[str, str] | None
) -> int:
    """Report a run that ended after `step`: the report, where the time went, the last samples, how to resume.

    Returns the exit code.  Raises DivergedError if the last steps were skipped, or why the profile was not written.
    """
    config = run.config
    all_steps = evaluated and step >= config.train.steps
    if jax.process_index() == 0:
        _report(run, step, finished=all_steps and not monitor.in_a_row)
        if all_steps and texts:
            print_on_process_0(format_samples(step, texts))
    if verdict := monitor.verdict or (all_steps and monitor.last_steps_skipped(step)):
        more = f"train.steps={2 * config.train.steps} --resume" if step >= config.train.steps else "--resume"
        raise DivergedError(
            f"{verdict};\ncheckpoint {config.checkpoint.dir}/{step} has the weights of step {step - monitor.in_a_row}: "
            f"{more} continues with the next batches; if those fail too, remove it and resume from an older one with a "
            f"lower optimizer.learning_rate"
        )
    if all_steps and profile.error and jax.process_index() == 0:
        raise profile.error
    return 0 if all_steps else STOPPED


def count_in_words(number: int) -> str:
    """A number of parameters, such as 12.3M."""
    return f"{number / 1e6:,.1f}M" if number >= 10**5 else f"{number:,}"


def _report(run: Run, step: int, finished: bool) -> None:
    """Write the report; print where the time went, where the outputs are and how to resume."""
    config, directory = run.config, Path(run.config.run.dir)
    with run.clock.on(TimeCategory.drawing):
        page = write_report([directory], directory / REPORT)
    lines = [
        run.clock.breakdown.table(),
        f"{'done' if finished else 'stopped and saved'} at step {step} of {config.train.steps}",
        f"  metrics     {directory / 'metrics.jsonl'}",
        f"  report      {page}",
        f"  checkpoint  {config.checkpoint.dir}/{step}",
        f"  to resume   {continue_command(directory, flat_values(directory / 'config.yaml'), finished)}",
        "              (on any mesh.dp=... mesh.cp=... mesh.mp=...)",
    ]
    print_on_process_0("\n".join(lines))
