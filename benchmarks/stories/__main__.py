"""Write the stories that recipes with `data: {kind: stories}` read.

    python -m benchmarks.stories

makes the 20,000 stories and 500 for the evaluation that `peak_memory/*` ask for, in the folder where the lab looks for
them. They take three seconds and 18 MB, and are the same on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.stories.generator import Part, make_stories
from lowtide.lab.corpus.texts import stories_folder, story_file


def write_stories(folder: Path, *, seed: int, training: int, validation: int) -> list[Path]:
    """Write both parts, stories parted by blank lines, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part, count in ((Part.TRAINING, training), (Part.VALIDATION, validation)):
        path = story_file(folder, seed, part.name.lower())
        unfinished = path.with_suffix(".part")
        unfinished.write_text("\n\n".join(make_stories(seed, count, part=part)) + "\n", encoding="utf-8")
        unfinished.replace(path)
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="write the stories that the lab's recipes read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--training", type=int, default=20_000, help="stories to train on")
    parser.add_argument("--validation", type=int, default=500, help="stories to evaluate on")
    parser.add_argument("--out", type=Path, default=stories_folder(), help="folder of the files")
    asked = parser.parse_args()
    for path in write_stories(asked.out, seed=asked.seed, training=asked.training, validation=asked.validation):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
