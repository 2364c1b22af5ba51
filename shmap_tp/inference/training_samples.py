"""The sampler of a training run: continues sample.prompts with the parameters of the step, on the mesh of the run."""

from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from shmap_tp.config.schema import Config
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.subwords import quoted
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options, check_prompts
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.inference.text import answers, encode_prompts
from shmap_tp.model.transformer import Transformer
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import Components


def make_training_sampler(
    config: Config, mesh: Mesh, components: Components, tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> "TrainingSampler | None":
    """The sampler of a run, which answers the prompts where there is a chat template and else continues them.

    None, and a line that says why, if the blocks of the model cannot generate.
    Compiles nothing.  Raises UserError if a prompt does not suit the model.
    """
    functions = build_model_functions(config, mesh, compute_dtype(config.train.precision), components)
    try:
        programs = GenerationPrograms(config.model, functions.model)
    except UserError as error:
        print_on_process_0(f"no samples: {error}")
        return None
    prompts = {text: encode_prompts(tokenizer, [text])[0] for text in config.sample.prompts}
    if template is not None:
        ordinary = tokenizer.special_tokens()
        asked = {text: template.render([{"role": "user", "content": quoted(text, ordinary)}]) for text in prompts}
        prompts = {f"{text}\n": tokenizer.encode(asked[text], special_tokens=False) for text in prompts}
    return TrainingSampler(config, programs, tokenizer, prompts)


class Stopped(Exception):
    """A stop was requested while a sample was written."""


class TrainingSampler:
    """A `training.run.Sampler`.  The same seed, run.seed, is used each time, so that samples can be compared."""

    def __init__(
        self, config: Config, programs: GenerationPrograms, tokenizer: Tokenizer, prompts: dict[str, Sequence[int]]
    ):
        """`prompts` are what the model reads, by what is shown before its answer."""
        self._programs, self._tokenizer, self._prompts = programs, tokenizer, prompts
        self._options = Options(
            max_new_tokens=config.sample.max_new_tokens,
            temperature=config.sample.temperature,
            seed=config.run.seed % 2**31,
            decode_tokens=min(32, config.sample.max_new_tokens),
        )
        check_prompts([*prompts.values()], config.model)

    def __call__(self, params: Transformer, stopped: Callable[[], bool]) -> dict[str, str] | None:
        """Communication: that of prefill and decode (`inference/programs.py`)."""

        def look(number: int, sample: int, piece: str, ended: str | None) -> None:
            if ended is None and stopped():
                raise Stopped

        try:
            found = answers(
                self._programs, params, self._tokenizer, [*self._prompts.values()], self._options, show=look
            )
        except Stopped:
            return None
        except UserError as error:  # after a step that trained well, too, the logits can be infinite or NaN
            print_on_process_0(f"no samples: {error}")
            return None
        return {prompt: texts[0] for prompt, texts in zip(self._prompts, found, strict=True)}
