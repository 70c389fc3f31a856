"""What models read in the lab: stories, text files or data sets, as token ids."""

from __future__ import annotations

from lowtide.lab.corpus.load import Corpus, load_corpus
from lowtide.lab.corpus.texts import stories_folder, story_file
from lowtide.lab.corpus.tokens import BOS_ID, EOS_ID, PAD_ID, UNKNOWN_ID, Samples, TextBatches, TextTokenizer

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
    "stories_folder",
    "story_file",
]
