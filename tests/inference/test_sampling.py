"""The choice of the next token over a vocabulary sharded over mp, against the definitions on whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shmap_tp.inference.generator import Options
from shmap_tp.inference.sampling import NO_TOKEN, Sequences, next_token
from shmap_tp.parallel.mesh import DP, MP
from tests.helpers.model_fixtures import mesh

VOCABULARY, ROWS = 50, 64


def choose(logits: np.ndarray, options: Options, shape: tuple[int, int], seen: np.ndarray | None = None) -> np.ndarray:
    """The chosen token of each row: logits[B, ROWS]."""
    batch = len(logits)
    sequences = Sequences(jnp.arange(batch), jnp.zeros(batch, int), jnp.full(batch, 3), seen)

    def run(logits, sequences, sampling):
        return next_token(logits, sequences, sampling, options.filters, VOCABULARY)

    specs = (P(DP, MP), Sequences(P(DP), P(DP), P(DP), None if seen is None else P(DP, MP)), P())
    mapped = jax.shard_map(run, mesh=mesh(shape), in_specs=specs, out_specs=P(DP))
    return np.asarray(jax.jit(mapped)(logits, sequences, options.sampling))


def logits(batch: int) -> np.ndarray:
    """Padding rows are the largest, which must never be chosen."""
    found = np.random.default_rng(0).normal(size=(batch, ROWS)).astype(np.float32) * 2
    found[:, VOCABULARY:] = 100
    return found


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (1, 8)], ids=str)
def test_greedy_is_the_first_largest_real_id(shape):
    rows = logits(8)
    rows[3, 7] = rows[3, 41] = 50
    expected = rows[:, :VOCABULARY].argmax(1)
    assert expected[3] == 7
    np.testing.assert_array_equal(choose(rows, Options(), shape), expected)


FILTERS = [(0, 1.0), (5, 1.0), (0, 0.6), (12, 0.7), (1, 1.0), (0, 1e-6), (500, 1.0)]


@pytest.mark.parametrize(("shape", "top_k", "top_p"), [((1, 1), 12, 0.7), *(((1, 8), *each) for each in FILTERS)])
def test_sampled_frequencies_are_the_filtered_softmax(shape, top_k, top_p):
    """6000 draws of one row: frequencies within 4 standard deviations, and nothing outside of the candidates."""
    row, draws = logits(1), 6000
    options = Options(temperature=1.3, top_k=top_k, top_p=top_p, seed=2)
    found = choose(np.repeat(row, draws, axis=0), options, shape)
    p = np.exp(row[0, :VOCABULARY].astype(np.float64) / 1.3)
    order = np.argsort(-p)
    p[order[top_k or VOCABULARY :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p /= p.sum()
    frequency = np.bincount(found, minlength=VOCABULARY)[:VOCABULARY] / draws
    assert (frequency[p == 0] == 0).all()
    assert (np.abs(frequency - p) <= 4 * np.sqrt(p * (1 - p) / draws) + 1e-9).all()


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_but_of_stop_tokens():
    row = np.full((2, ROWS), -9, np.float32)
    row[0, [4, 30]] = 3.0, 2.0  # 3 / 2 < 2
    row[1, :VOCABULARY] = -5
    row[1, [9, 45]] = -1.0, -1.5  # -1 x 2 < -1.5
    seen = np.zeros((2, ROWS), bool)
    seen[0, 4] = seen[1, 9] = True
    np.testing.assert_array_equal(choose(row, Options(repetition_penalty=2.0), (1, 4), seen), [30, 45])
    np.testing.assert_array_equal(choose(row, Options(), (1, 4)), [4, 9])
    exempt = Options(repetition_penalty=2.0, stop_tokens=(50, 4, -1, 2**40))  # as ends that earlier turns have
    np.testing.assert_array_equal(choose(row, exempt, (1, 4), seen), [4, 45])


@pytest.mark.parametrize("options", [Options(), Options(temperature=1.0, top_k=3, top_p=0.9)], ids=["greedy", "top"])
def test_no_token_is_drawn_from_logits_that_are_not_finite(options):
    """One value suffices, on any device; logits of padding rows do not count."""
    rows = logits(6)
    rows[0], rows[1, 20], rows[2, 49] = np.nan, np.nan, -np.float32(np.nan)
    rows[3, 7], rows[4, :VOCABULARY], rows[5, VOCABULARY:] = np.inf, -np.inf, np.nan
    assert (choose(rows, options, (1, 8)) == NO_TOKEN).tolist() == [True] * 5 + [False]


PROCESSED = [
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.7, "repetition_penalty": 1.8},
    {"temperature": 1.0, "repetition_penalty": 0.6},
]


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("given", PROCESSED, ids=str)
def test_sampled_frequencies_are_those_of_the_logits_processors_of_transformers(shape, given):
    """In the order of its `generate`: penalty, temperature, top-k, top-p.  6000 draws, within 4 standard deviations."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
    torch = pytest.importorskip("torch", reason="pip install -e '.[test-pretrained]'")
    row, draws, prompt = logits(1), 6000, [3, 11, 11, 40]
    steps = {
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
    }
    process = transformers.LogitsProcessorList([make(given[name]) for name, make in steps.items() if name in given])
    scores = process(torch.tensor([prompt]), torch.tensor(row[:, :VOCABULARY]))
    p = torch.softmax(scores.double(), -1)[0].numpy()
    seen = np.zeros((draws, ROWS), bool)
    seen[:, prompt] = True
    options = Options(**given, seed=4)
    found = choose(np.repeat(row, draws, axis=0), options, shape, seen if options.filters.penalty else None)
    frequency = np.bincount(found, minlength=VOCABULARY)[:VOCABULARY] / draws
    assert (frequency[p == 0] == 0).all() and (p > 0).sum() > 3
    assert (np.abs(frequency - p) <= 4 * np.sqrt(p * (1 - p) / draws) + 1e-9).all()
