"""Checkpoints as files that others read: Hugging Face's folders and torch's form of the optimizer, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import CheckpointError, ConfigError, DamagedCheckpointError
from tests.runtime.checkpoints.training_runs import Run, assert_same, make_net, make_optimizer, training
from tests.zoo import bf16_safe


@pytest.fixture(autouse=True)
def safe() -> Iterator[None]:
    with bf16_safe():
        yield


def flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{number}.{key}": torch.as_tensor(value)
        for number, entries in state["state"].items()
        for key, value in entries.items()
    }


@pytest.mark.parametrize(
    "run",
    [
        Run(precision=None),
        Run(precision="fp32", moments="bf16", optimizer="amsgrad"),
        Run(precision="bf16 exact", moments="8bit"),
        Run(precision="fp16 exact"),
        Run(precision="bf16 stochastic", optimizer="sgd"),
        Run(precision="bf16 exact", optimizer="adafactor", has_scheduler=False),
    ],
    ids=str,
)
def test_torchs_form_is_what_state_dict_gives(run: Run, tmp_path: Path) -> None:
    with training(run) as made:
        made.steps(2)
        made.session.save(tmp_path / "run")
        expected, weights = made.optimizer.state_dict(), made.values()
        flat_expected = {name: value.clone() for name, value in flat(expected).items()}
    out = lowtide.export(tmp_path / "run", tmp_path / "out")
    saved = torch.load(out / "optimizer.pt", weights_only=True)
    assert_same(flat(saved), flat_expected)
    assert saved["param_groups"] == expected["param_groups"]
    # A plain loop takes both.
    model = make_net(run.dtype)
    optimizer = make_optimizer(run.optimizer, model)
    lowtide.load_weights(out, model)
    assert_same(dict(model.state_dict()), weights)
    optimizer.load_state_dict(saved)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    # And so does a session, which goes on with the same numbers.
    with training(run) as made:
        lowtide.load_weights(out, made.session)
        made.optimizer.load_state_dict(torch.load(out / "optimizer.pt", weights_only=True))
        assert_same(flat(made.optimizer.state_dict()), flat_expected)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]  # imported where it is there


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]  # as above


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=16,
    )
    return transformers.MixtralForCausalLM(config)  # type: ignore[no-any-return]  # as above


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text("a\nb\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}', encoding="utf-8")
    (folder / "notes.md").write_text("not a tokenizer's", encoding="utf-8")
    return folder


@pytest.mark.parametrize("make", [gpt2, t5, mixtral])
def test_a_checkpoint_of_a_hugging_face_model_is_a_folder_of_it(make: Any, tmp_path: Path) -> None:
    model = make()
    kind: Any = type(model)
    model.config.name_of_mine = "kept"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(50, (2, 8))
    plan = lowtide.make_plan(model)
    with lowtide.manage(model, optimizer, plan, device="cpu") as session:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint = session.save(tmp_path / "run", tokenizer=write_tokenizer(tmp_path / "tokenizer"))
        values = {name: value.clone() for name, value in model.state_dict().items()}
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=ids, labels=ids).logits
    assert {"config.json", "generation_config.json", "vocab.txt", "tokenizer_config.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    assert not (checkpoint / "notes.md").exists()
    out = lowtide.export(tmp_path / "run", tmp_path / "out")
    for folder in (checkpoint, out):
        loaded = kind.from_pretrained(folder, local_files_only=True)
        assert_same(dict(loaded.state_dict()), values)
        assert loaded.config.name_of_mine == "kept"
        assert loaded.config.architectures == [kind.__name__]
        with torch.no_grad():
            assert torch.equal(loaded.eval()(input_ids=ids, labels=ids).logits, logits)
    # And back again, into a model of other values.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    lowtide.load_weights(out, model)
    assert_same(dict(model.state_dict()), values)


def test_the_cache_that_recomputation_turns_off_is_on_in_the_saved_config(tmp_path: Path) -> None:
    model: Any = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.make_plan(model, activations="recompute")
    with pytest.warns(UserWarning, match="the key-value cache is off"):
        session = lowtide.manage(model, optimizer, plan, device="cpu")
    with session:
        assert not model.config.use_cache
        checkpoint = session.save(tmp_path)
    loaded = type(model).from_pretrained(checkpoint, local_files_only=True)
    assert loaded.config.use_cache


def test_a_tokenizer_comes_with_the_export_too(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "tokenizer.model").write_bytes(b"\xff\xfe")
    with training(Run()) as made:
        with pytest.raises(ConfigError, match=r"tokenizer.model is not text, .* give its folder to lowtide.export"):
            made.session.save(tmp_path / "run", tokenizer=tokenizer)
        with pytest.raises(ConfigError, match="there is no tokenizer in"):
            made.session.save(tmp_path / "run", tokenizer=tmp_path)
        made.session.save(tmp_path / "run")
    out = lowtide.export(tmp_path / "run", tmp_path / "out", tokenizer=tokenizer)
    assert (out / "tokenizer.model").read_bytes() == b"\xff\xfe"
    assert not (out / "notes.md").exists()


def test_nothing_is_overwritten_and_nothing_half_made_stays(tmp_path: Path) -> None:
    with training(Run()) as made:
        made.steps(1)
        checkpoint = made.session.save(tmp_path / "run")
    (tmp_path / "out").mkdir()
    lowtide.export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is there already, and not an empty folder"):
        lowtide.export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no tokenizer in"):
        lowtide.export(tmp_path / "run", tmp_path / "other", tokenizer=tmp_path)
    data = bytearray((checkpoint / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "optimizer.safetensors").write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpointError, match="step-00000001/optimizer.safetensors"):
        lowtide.export(checkpoint, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    """A file that would run code when it is unpickled is refused as a file of weights, not opened."""
    with training(Run()) as made:
        checkpoint = made.session.save(tmp_path / "run")
        torch.save({"a": 1}, checkpoint / "model.safetensors")
        with pytest.raises(DamagedCheckpointError, match="model.safetensors"):
            lowtide.load(checkpoint, made.session)
