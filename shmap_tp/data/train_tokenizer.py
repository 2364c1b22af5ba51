"""A subword tokenizer of one's own text."""

from collections.abc import Iterator

from shmap_tp.data.text_sources import TRAIN, TextSource
from shmap_tp.data.tokenizer import END_OF_TEXT, Subwords, tokenizers_library
from shmap_tp.errors import UserError, shown

NAME = "tokenizer.json"
SMALLEST, LARGEST = 257, 1 << 20
"""Ids: the 256 bytes and the end of text; four times the largest vocabularies of published models."""


def train_tokenizer(source: TextSource, vocabulary: int, end_of_text: str | None = None) -> Subwords:
    """Byte-level byte-pair encoding of at most `vocabulary` ids, trained on the training split of `source`, which is
    read once.  Any text can be encoded, since each byte has an id.

    Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al. 2019, "Language Models are Unsupervised
    Multitask Learners", section 2.2.  `end_of_text` is the token after each document (default: END_OF_TEXT).
    Raises UserError if the vocabulary is too small or too large, if that token is ordinary text, or if the `tokenizers`
    library is not there.
    """
    if not SMALLEST <= vocabulary <= LARGEST:
        rule = f"must be at least {SMALLEST}, 256 bytes and the end of text, and at most {LARGEST:,}"
        raise UserError(f"--train-tokenizer {shown(vocabulary)} {rule}")
    tokenizers = tokenizers_library("--train-tokenizer")
    end_of_text = end_of_text or END_OF_TEXT
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end_of_text],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for split, text in source.documents:
            if split == TRAIN:
                yield text

    made.train_from_iterator(texts(), trainer)
    end, content = made.token_to_id(end_of_text), made.to_str(pretty=True).encode()
    found = Subwords(made, NAME, content, end, special_tokens=False)
    if end in found.encode_documents([end_of_text])[0]:
        raise UserError(
            f"--end-of-text {shown(end_of_text)} is ordinary text, too; choose a name such as {END_OF_TEXT}"
        )
    return found
