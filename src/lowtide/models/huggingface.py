"""Any Hugging Face config as a model on the meta device: the architecture from its config.json, no weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.errors import BadRecordError, ConfigError, MissingExtraError, UnknownNameError
from lowtide.models import batches
from lowtide.models.source import ModelSource, Pretrained, build_on_meta, finish
from lowtide.runtime.parameters.weight_file import empty_weights

PREFIX = "hf:"
DEFAULT_BATCH = 8
LONGEST_DEFAULT = 2048
"""Default length for models whose own limit is longer, or who have none."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Files of weights, in the forms that a folder may have."""

# transformers has no types that a strict checker could use on its configs.
Config = Any


class Task(NamedTuple):
    """A kind of head that has a loss, and the batch it wants."""

    suffixes: tuple[str, ...]
    """How the names of its architectures end."""
    auto: str
    """Name of transformers' class that builds it from a config."""
    mapping: str
    """Name of transformers' table of the configs that have it."""
    batch_form: Callable[[Config], batches.BatchForm]


def resolve_huggingface(spec: str, *, recompute: bool) -> ModelSource:
    """The source for `hf:FOLDER`, `hf:path/config.json` or `hf:OWNER/MODEL` (in the local cache, never downloaded).

    With a dtype of None the model takes the one its config names, as transformers' own loading does.
    """
    transformers = _transformers(spec)
    values = _read_config(spec.removeprefix(PREFIX))
    config = _make_config(transformers, values, spec)
    task = _find_task(transformers, config, spec)
    form = task.batch_form(config)
    text = json.dumps(values)
    return ModelSource(
        name=spec,
        family=f"{PREFIX}{values['model_type']}",
        default_batch=form.default,
        build=partial(_build, spec, text, task.auto, recompute),
        make_batch=form,
        pretrained=_find_pretrained(spec, text, task.auto),
    )


def _find_pretrained(spec: str, values_json: str, auto: str) -> Pretrained | None:
    """The weights beside the config; None where there are none, or where the config itself was named."""
    target = spec.removeprefix(PREFIX)
    folder = find_config(target).parent
    is_config = Path(target).expanduser().is_file()
    if is_config or not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        return None
    return Pretrained(
        folder=folder,
        build_empty=partial(_build_empty, spec, values_json, auto),
        load=partial(_load, spec, folder, auto),
    )


def _build_empty(spec: str, values_json: str, auto: str, dtype: torch.dtype | None) -> nn.Module:
    transformers = _transformers(spec)
    config = _make_config(transformers, json.loads(values_json), spec)
    chosen = {} if dtype is None else {"dtype": dtype}
    with empty_weights():
        model: nn.Module = getattr(transformers, auto).from_config(config, **chosen)
    # Not `finish`, which takes buffers to meta: what the model computes once is in no weight file.
    return model.train()


def _load(spec: str, folder: Path, auto: str, dtype: torch.dtype | None) -> nn.Module:
    transformers = _transformers(spec)
    chosen = {} if dtype is None else {"dtype": dtype}
    try:
        model: nn.Module = getattr(transformers, auto).from_pretrained(str(folder), local_files_only=True, **chosen)
    except Exception as error:  # transformers reads files of many forms, each with errors of its own
        raise BadRecordError(f"the weights of {spec} cannot be loaded: {error}; fetch the folder again") from error
    return model.train()


def _build(spec: str, values_json: str, auto: str, recompute: bool, dtype: torch.dtype | None) -> nn.Module:
    transformers = _transformers(spec)
    config = _make_config(transformers, json.loads(values_json), spec)
    # The dtype goes in at construction and not through `.to`: transformers keeps some buffers in fp32 whatever the
    # dtype.
    chosen = {} if dtype is None else {"dtype": dtype}
    model: nn.Module = build_on_meta(lambda: getattr(transformers, auto).from_config(config, **chosen), name=spec)
    return finish(model, None, recompute=recompute, name=spec)


def _transformers(spec: str) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", f"the model {spec!r}") from error
    return transformers


def _read_config(target: str) -> dict[str, Any]:
    path = find_config(target)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRecordError(f"{path} cannot be read as a Hugging Face config: {error}; fetch it again") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise BadRecordError(
            f"{path} names no model_type, so it is no Hugging Face config; give a model's own config.json"
        )
    return values


def find_config(target: str) -> Path:
    """The config.json of a folder, a file or a model id in the local cache.

    Raises:
        UnknownNameError: There is none.
    """
    path = Path(target).expanduser()
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):  # not even the form of an id
        cached = try_to_load_from_cache(target, "config.json")
        if isinstance(cached, str):
            return Path(cached)
    raise UnknownNameError(
        "Hugging Face config (a folder with config.json, a config.json, or a model id in the local cache)", target
    )


def _make_config(transformers: ModuleType, values: dict[str, Any], spec: str) -> Config:
    known = transformers.CONFIG_MAPPING
    if values["model_type"] not in known:
        raise UnknownNameError("transformers model type", values["model_type"], known.keys())
    try:
        return known[values["model_type"]].from_dict(values)
    except Exception as error:  # transformers validates with several libraries, each with errors of its own
        raise ConfigError(f"{spec} is not a valid {values['model_type']} config: {error}") from error


def _find_task(transformers: ModuleType, config: Config, spec: str) -> Task:
    architectures = tuple(config.architectures or ())
    fitting = [task for task in TASKS if type(config) in getattr(transformers, task.mapping)]
    named = [task for task in fitting if any(name.endswith(task.suffixes) for name in architectures)]
    chosen = named if architectures else fitting
    if chosen:
        return chosen[0]
    # Not the nearest head instead: the peak would be another model's.
    classes = [getattr(transformers, task.mapping)[type(config)] for task in fitting]
    heads = sorted((kind[0] if isinstance(kind, tuple) else kind).__name__ for kind in classes)
    others = f"put one of {', '.join(heads)} there, or " if heads else ""
    raise ConfigError(
        f"{spec} is a {config.model_type} config for {', '.join(architectures) or 'no architecture'}, and there is no "
        f"batch known that gives it a loss; {others}write a function that returns (model, batch) and pass it as "
        "package.module:function"
    )


def _tokens(config: Config) -> batches.TokenBatch:
    text = config.get_text_config()  # itself, except for configs that hold one per modality
    positions: int | None = getattr(text, "max_position_embeddings", None)
    # Rotary positions are computed, so they never run out; learned ones do.
    is_rotary = any(getattr(text, name, None) is not None for name in ("rope_parameters", "rope_theta"))
    return batches.TokenBatch(
        vocab_size=text.vocab_size,
        default_batch=DEFAULT_BATCH,
        default_length=min(positions or LONGEST_DEFAULT, LONGEST_DEFAULT),
        max_length=None if is_rotary else positions,
    )


def _images(config: Config) -> batches.ImageBatch:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return batches.ImageBatch(
        num_classes=config.num_labels,
        default_batch=DEFAULT_BATCH,
        num_channels=getattr(config, "num_channels", 3),
        height=height,
        width=width,
    )


# In the order of preference for a config that names no architecture with a loss: BERT is in the causal table too.
# fmt: off
TASKS = (
    Task(("ForConditionalGeneration",), "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
         lambda config: batches.PairBatch(tokens=_tokens(config))),
    Task(("ForMaskedLM",), "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", _tokens),
    Task(("ForCausalLM", "LMHeadModel"), "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", _tokens),
    Task(("ForImageClassification",), "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
         _images),
    Task(("ForSequenceClassification",), "AutoModelForSequenceClassification",
         "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
         lambda config: replace(_tokens(config), labels=partial(batches.sequence_labels, config.num_labels))),
    Task(("ForTokenClassification",), "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
         lambda config: replace(_tokens(config), labels=partial(batches.token_labels, config.num_labels))),
    Task(("ForQuestionAnswering",), "AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
         lambda config: replace(_tokens(config), labels=batches.spans)),
)
# fmt: on
