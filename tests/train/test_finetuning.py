"""A Hugging Face folder trained on, on a text: its own weights, its own tokenizer, and a result that `from_pretrained` loads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.errors import ConfigError, RunStoppedError
from lowtide.lab import training
from lowtide.train.inputs import RunTokenizer, find_tokenizer
from lowtide.train.model import find_subject, prepared
from lowtide.train.recipe import TrainRecipe, read_train_recipe
from lowtide.train.team import Team
from tests.train.runs import TEXT, losses, train

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def _quiet_with_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


def write_text(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"{number}. {TEXT}" for number in range(80)), encoding="utf-8")
    return text


def write_tokenizer(folder: Path) -> None:
    level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def write_model(folder: Path, kind: str, **others: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(7)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, **others)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, **others,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def finetuned(folder: Path, text: Path, *settings: str) -> TrainRecipe:
    """What `lowtide train finetune --set model=... --set data.text=...` runs, in a few steps."""
    asked = [f"model=hf:{folder}", f"data.text={text}", "device_memory=1MiB", "device=cpu", "batch=2x32", "steps=4"]
    return read_train_recipe("finetune", [*asked, "optimizer.settings.lr=0.003", "scheduler.warmup_steps=1", *settings])


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_result_is_a_folder_of_the_same_kind(tmp_path: Path, kind: str) -> None:
    folder, text = write_model(tmp_path / "model", kind), write_text(tmp_path)
    result = train(finetuned(folder, text), tmp_path / "out")
    assert result.model is not None
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    after, report = transformers.AutoModelForCausalLM.from_pretrained(result.model, output_loading_info=True)
    assert not any(report.values()), report
    assert type(after) is type(before)
    assert after.dtype == torch.bfloat16
    assert after.config.use_cache
    moved = [
        name for name, value in after.named_parameters() if not torch.equal(value.float(), before.get_parameter(name))
    ]
    assert moved
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    ids = tokenizer(TEXT * 2, return_tensors="pt")["input_ids"][:, :32]
    assert after.float()(ids, labels=ids).loss < before(ids, labels=ids).loss - 0.05
    names = {path.name for path in result.model.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert not {"optimizer.safetensors", "checkpoint.json"} & names


def test_the_first_step_has_the_loss_of_the_folders_weights(tmp_path: Path) -> None:
    folder, text = (
        write_model(tmp_path / "model", "gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        write_text(tmp_path),
    )
    recipe = finetuned(folder, text, "dtype=float32", "precision=null", "steps=1", "data.shuffle=false")
    train(recipe, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"][:64]).view(2, 32)
    with torch.no_grad(), training.arithmetic(recipe, torch.device("cpu")):
        expected = float(model(input_ids=ids, labels=ids).loss)
    assert losses(tmp_path / "out")[0][1] == pytest.approx(expected, abs=1e-6)


def test_weights_come_group_by_group_without_a_second_copy(tmp_path: Path) -> None:
    folder, text = write_model(tmp_path / "model", "llama"), write_text(tmp_path)
    subject = find_subject(finetuned(folder, text, "dtype=float32", "precision=null"))
    assert subject.source.pretrained is not None
    empty = subject.source.pretrained.build_empty(torch.float32)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    with prepared(subject, Team(None, None), lambda words: None) as trained:
        found = {name: value.clone() for name, value in trained.model.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_files_of_another_form_go_through_transformers(tmp_path: Path) -> None:
    folder, text = write_model(tmp_path / "model", "gpt2"), write_text(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    (folder / "model.safetensors").unlink()
    # As OpenAI's own files have them: the names of the inner model, in torch's form.
    torch.save(
        {name: value.clone() for name, value in model.transformer.state_dict().items()}, folder / "pytorch_model.bin"
    )
    said: list[str] = []
    with prepared(
        find_subject(finetuned(folder, text, "dtype=float32", "precision=null")), Team(None, None), said.append
    ) as trained:
        found = {name: value.clone() for name, value in trained.model.state_dict().items()}
    assert any(words.startswith("loading hf:") for words in said)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_config_without_weights_is_drawn_and_says_so(tmp_path: Path) -> None:
    folder, text = write_model(tmp_path / "model", "gpt2"), write_text(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="has no weights: they are drawn from the seed 0"):
        result = train(finetuned(folder, text, "steps=1"), tmp_path / "out")
    assert result.is_finished


@pytest.mark.slow
def test_a_run_on_a_folder_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    folder, text = write_model(tmp_path / "model", "llama"), write_text(tmp_path)
    steady = ("scheduler.decay=none", "checkpoints.every=2")
    train(finetuned(folder, text, *steady), tmp_path / "whole")
    train(finetuned(folder, text, *steady, "steps=2"), tmp_path / "parts")
    train(finetuned(folder, text, *steady, "device_memory=2MiB"), tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(file.parent).state_dict() for file in files)
    assert all(torch.equal(one[name], other[name]) for name in one)


class TestTokenizer:
    def test_documents_end_and_their_tokens_are_kept(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path / "tokenizer")
        texts = tmp_path / "texts"
        texts.mkdir()
        for name in ("a", "b"):
            (texts / f"{name}.txt").write_text(TEXT + name, encoding="utf-8")
        tokenizer = find_tokenizer(f"hf:{tmp_path / 'tokenizer'}", "gpt2")
        files = sorted(texts.iterdir())
        said: list[str] = []
        first = tokenizer.tokens_of(files, said.append)
        plain = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        for file, ids in zip(files, first, strict=True):
            assert plain.decode(ids.tolist()) == file.read_text() + "<end>"
        assert said == ["tokenizing a.txt, 0 MiB", "tokenizing b.txt, 0 MiB"]
        said.clear()
        again = tokenizer.tokens_of(files, said.append)
        assert not said
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        (texts / "a.txt").write_text("changed")
        assert plain.decode(tokenizer.tokens_of(files, said.append)[0].tolist()) == "changed<end>"

    def test_a_long_text_is_cut_at_ends_of_lines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lowtide.train.inputs._PIECE", 100)
        write_tokenizer(tmp_path / "tokenizer")
        (tmp_path / "text.txt").write_text(TEXT * 5, encoding="utf-8")
        tokenizer = RunTokenizer(folder=tmp_path / "tokenizer")
        (ids,) = tokenizer.tokens_of([tmp_path / "text.txt"], lambda _: None)
        plain = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        assert plain.decode(ids.tolist()) == TEXT * 5 + "<end>"

    def test_a_cache_that_cannot_be_written_costs_only_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "no_folder").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_folder"))
        write_tokenizer(tmp_path / "tokenizer")
        (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
        said: list[str] = []
        (ids,) = RunTokenizer(folder=tmp_path / "tokenizer").tokens_of([tmp_path / "text.txt"], said.append)
        assert len(ids) > 5
        assert "the tokens are not cached: cannot write" in said[-1]

    def test_what_is_no_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"has no tokenizer: give data.tokenizer=hf:FOLDER, data.tokenizer=bytes"):
            find_tokenizer(None, f"hf:{tmp_path}")
        (tmp_path / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
        with pytest.raises(ConfigError, match=r"the tokenizer of .* cannot be loaded"):
            _ = find_tokenizer(None, f"hf:{tmp_path}").vocab_size
        assert find_tokenizer(None, "gpt-tiny").folder is None
        assert find_tokenizer("bytes", f"hf:{tmp_path}").folder is None

    def test_one_with_more_tokens_than_the_model_is_refused(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model", "gpt2")
        recipe = read_train_recipe(
            "gpt_tiny", [f"data.text={write_text(tmp_path)}", f"data.tokenizer=hf:{folder}", "device=cpu"]
        )
        with pytest.raises(ConfigError, match=r"has \d+ tokens, and gpt-tiny has rows for 256"):
            train(recipe, tmp_path / "out")

    def test_text_that_is_no_text_is_refused(self, tmp_path: Path) -> None:
        write_tokenizer(tmp_path / "tokenizer")
        (tmp_path / "text.txt").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"text.txt is not text in UTF-8"):
            RunTokenizer(folder=tmp_path / "tokenizer").tokens_of([tmp_path / "text.txt"], lambda _: None)


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_still_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, text = write_model(tmp_path / "model", "gpt2"), write_text(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(
            RunStoppedError, match="finished and saved, and its model cannot be copied.*No space left.*--resume"
        ):
            train(finetuned(folder, text, "steps=1"), tmp_path / "out")
    assert train(finetuned(folder, text, "steps=1"), tmp_path / "out", resume=True).model is not None
