"""What models read in the lab: stories from the built-in generator, text files or data sets, as token ids."""

from __future__ import annotations

from lowtide.lab.corpus.batches import TextBatches
from lowtide.lab.corpus.load import Corpus, load_corpus
from lowtide.lab.corpus.samples import Samples
from lowtide.lab.corpus.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNKNOWN_ID, TextTokenizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "UNKNOWN_ID",
    "Corpus",
    "Samples",
    "TextBatches",
    "TextTokenizer",
    "load_corpus",
]
