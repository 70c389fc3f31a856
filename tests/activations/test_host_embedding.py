"""A table on the host: the same bits as a plain lookup there, whatever the settings; and what travels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.activations import apply, host_embedding
from lowtide.activations.host_embedding import RowSums, find_repeats, put_on_host
from lowtide.errors import ConfigError, ModelChangedError, UnknownNameError
from tests.zoo import assert_same_tensors, zoo
from tests.zoo import train as train_plainly

NUM_ROWS, WIDTH = 40, 6


class Reader(nn.Module):
    """An embedding and something after it."""

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.table = nn.Embedding(NUM_ROWS, WIDTH, dtype=dtype, **settings)
            self.head = nn.Linear(WIDTH, 3, dtype=torch.float32)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids).float())
        return out


class PlainReader(Reader):
    """The reference: looked up on the host by plain torch, and copied."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids.cpu()).to(self.head.weight.device).float())
        return out


def ids_of(step: int, num_ids: int) -> Tensor:
    """Some come often, some once."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(num_ids, generator=generator).square() * NUM_ROWS).long().view(2, -1)


def run(model: Reader, *, num_ids: int, device: str = "cpu", accumulation: int = 1, num_steps: int = 4) -> list[Tensor]:
    is_sparse = model.table.sparse
    kind: Any = torch.optim.SGD if is_sparse else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.05)
    seen: list[Tensor] = []
    for step in range(num_steps):
        for part in range(accumulation):
            out = model(ids_of(10 * step + part, num_ids).to(device))
            loss = out.square().mean() * 7
            loss.backward()
            seen.append(loss.detach())
            assert model.table.weight.grad is not None
            assert model.table.weight.grad.is_sparse == is_sparse
            seen.append(model.table.weight.grad.to_dense().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


def assert_same_bits(expected: list[Tensor], found: list[Tensor]) -> None:
    first, second = ({str(index): tensor for index, tensor in enumerate(seen)} for seen in (expected, found))
    assert_same_tensors(first, second)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 0},
    {"padding_idx": -1},
    {"scale_grad_by_freq": True},
    {"max_norm": 0.5},
    {"sparse": True, "padding_idx": 1},
]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_ids", [8, 160], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_same_bits_as_plain(settings: dict[str, Any], dtype: torch.dtype, num_ids: int, accumulation: int) -> None:
    expected = run(PlainReader(dtype, **settings), num_ids=num_ids, accumulation=accumulation)
    model = Reader(dtype, **settings)
    put_on_host(model, "table", device="cpu")
    assert_same_bits(expected, run(model, num_ids=num_ids, accumulation=accumulation))


def test_rows_travel_once_where_ids_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    to_device = host_embedding.to_device

    def counted(tensor: Tensor, device: torch.device) -> Tensor:
        sent.append(tensor)
        return to_device(tensor, device)

    monkeypatch.setattr(host_embedding, "to_device", counted)
    model = Reader()
    put_on_host(model, "table", device="cpu")
    ids = ids_of(0, 160)
    model(ids)
    num_rows = ids.unique().numel()
    assert num_rows < 80
    assert [tuple(tensor.shape) for tensor in sent] == [(num_rows, WIDTH), (160,)]
    sent.clear()
    model(torch.arange(NUM_ROWS).repeat(1, 1))
    assert [tuple(tensor.shape) for tensor in sent] == [(NUM_ROWS, WIDTH)]


def test_repeats_are_worth_a_search() -> None:
    assert find_repeats(torch.zeros(8, dtype=torch.int64)) is None
    assert find_repeats(torch.arange(100)) is None
    found = find_repeats(torch.arange(100).view(2, 50) % 10)
    assert found is not None
    assert torch.equal(found.rows[found.positions], torch.arange(100).view(2, 50) % 10)


def test_accumulation_adds_rows_in_place() -> None:
    model = Reader()
    put_on_host(model, "table", device="cpu")
    model(ids_of(0, 160)).sum().backward()
    gradient = model.table.weight.grad
    assert gradient is not None
    where = gradient.data_ptr()
    seen: list[torch.layout] = []
    model(ids_of(1, 160)).sum().backward()
    assert model.table.weight.grad is gradient
    assert gradient.data_ptr() == where
    # A hook sees what plain torch shows it.
    model.table.weight.register_hook(lambda addend: seen.append(addend.layout))
    model(ids_of(2, 160)).sum().backward()
    assert seen == [torch.strided]


def test_gradients_by_autograd_grad() -> None:
    plain, model = PlainReader(), Reader()
    put_on_host(model, "table", device="cpu")
    for _ in range(2):
        expected, found = (
            torch.autograd.grad(reader(ids_of(0, 160)).square().sum(), reader.table.weight)[0]
            for reader in (plain, model)
        )
        assert torch.equal(expected, found)
        assert model.table.weight.grad is None or not model.table.weight.grad.any()
        model.table.weight.grad = torch.zeros_like(model.table.weight)


def test_sums_on_the_device_are_close() -> None:
    expected = run(PlainReader(padding_idx=0), num_ids=160, accumulation=2)
    model = Reader(padding_idx=0)
    put_on_host(model, "table", device="cpu", row_sums=RowSums.ON_DEVICE)
    for one, other in zip(expected, run(model, num_ids=160, accumulation=2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_frozen_and_without_gradients() -> None:
    model = Reader()
    plain = copy.deepcopy(model)
    model.table.requires_grad_(requires_grad=False)
    put_on_host(model, "table", device="cpu")
    ids = ids_of(0, 160)
    assert torch.equal(model(ids), plain(ids))
    model(ids).sum().backward()
    assert model.table.weight.grad is None
    with torch.no_grad():
        assert torch.equal(model(ids.int()), plain(ids))


def test_second_derivatives_are_refused() -> None:
    model = Reader()
    put_on_host(model, "table", device="cpu")
    loss = model(ids_of(0, 160)).square().sum()
    (gradient,) = torch.autograd.grad(loss, model.table.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


class ScaledEmbedding(nn.Embedding):
    """As some models have it: a forward of its own around the lookup."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


def test_a_forward_of_its_own_and_hooks_run() -> None:
    model = nn.Sequential(ScaledEmbedding(NUM_ROWS, WIDTH))
    ids = ids_of(0, 160)
    expected = model(ids) + 1
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    handle = put_on_host(model, "0", device="cpu")
    assert torch.equal(model(ids), expected)
    handle.remove()
    handle.remove()
    assert torch.equal(model(ids), expected)


def test_state_dict_and_copies_are_plain() -> None:
    model = Reader()
    plain = copy.deepcopy(model)
    weight = model.table.weight
    handle = put_on_host(model, "table", device="cpu")
    assert model.table.weight is weight
    assert_same_tensors(plain.state_dict(), model.state_dict())
    again = copy.deepcopy(model)
    handle.remove()
    assert torch.equal(again(ids_of(0, 160)), plain(ids_of(0, 160)))


def test_a_whole_model_trains_to_the_same_bits() -> None:
    sample = zoo("llama")
    models = [sample.build(True, torch.float32) for _ in range(2)]
    put_on_host(models[1], "model.embed_tokens", device="cpu")
    results = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results.append(train_plainly(model, optimizer, sample.batches(8), accumulation=2, clip=1.0, loss=sample.loss))
    assert results[0] == results[1]
    assert_same_tensors(models[0].state_dict(), models[1].state_dict())


def test_refusals() -> None:
    model = Reader()
    with pytest.raises(UnknownNameError, match="no module named 'tabel'; did you mean 'table'"):
        put_on_host(model, "tabel", device="cpu")
    with pytest.raises(ConfigError, match="'head' is a Linear; give the path of an nn.Embedding"):
        put_on_host(model, "head", device="cpu")
    tied = zoo("gpt").build(False, torch.float32)
    with pytest.raises(ConfigError, match="'token_embedding' .* is tied to 'head.weight'"):
        put_on_host(tied, "token_embedding", device="cpu")
    with torch.device("meta"):
        empty = Reader()
    with pytest.raises(ConfigError, match="'table' is on meta"):
        put_on_host(empty, "table", device="cpu")
    handle = put_on_host(model, "table", device="cpu")
    with pytest.raises(IndexError, match="ids from 0 to 40 were looked up in a table of 40 rows"):
        model(torch.tensor([[0, NUM_ROWS]]))
    handle.module.to("meta")
    with pytest.raises(ModelChangedError, match="'table' .* was moved to meta"):
        model(torch.tensor([[0]]))


class OwnLookup(nn.Embedding):
    """Does not use torch's function."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


def test_a_lookup_by_other_means_is_refused() -> None:
    model = nn.Sequential(OwnLookup(NUM_ROWS, WIDTH))
    put_on_host(model, "0", device="cpu")
    with pytest.raises(ConfigError, match="OwnLookup at '0' did not look its table up by F.embedding"):
        model(torch.tensor([1]))


def test_other_tables_are_left_alone() -> None:
    class Two(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(NUM_ROWS, WIDTH)
            self.other = nn.Parameter(torch.randn(NUM_ROWS, WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + F.embedding(ids, self.other)

    model = nn.Sequential(Two())
    expected = model(torch.tensor([1, 2]))
    put_on_host(model, "0", device="cpu")
    assert torch.equal(model(torch.tensor([1, 2])), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_ids", [8, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_on_a_gpu(dtype: torch.dtype, num_ids: int, accumulation: int) -> None:
    results = []
    for build in (PlainReader, Reader):
        model = build(dtype)
        if build is Reader:
            model.to("cuda")
            put_on_host(model, "table", device="cuda")
        else:
            model.head.to("cuda")
        assert model.table.weight.device.type == "cpu"
        seen = run(model, num_ids=num_ids, device="cuda", accumulation=accumulation)
        results.append([tensor.cpu() for tensor in seen])
    assert_same_bits(*results)


@pytest.mark.gpu
def test_the_device_holds_little_of_a_huge_table() -> None:
    table = nn.Embedding(128_000, 4096, dtype=torch.bfloat16)
    model = nn.Sequential(table, nn.Linear(4096, 8, dtype=torch.bfloat16, device="cuda"))
    put_on_host(model, "0", device="cuda")
    ids = torch.randint(128_000, (4096,))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert table.weight.device.type == "cpu"
    assert torch.cuda.max_memory_allocated() - before < 200 * 2**20


def test_removal_leaves_what_was_installed_later() -> None:
    model = nn.Sequential(nn.Embedding(NUM_ROWS, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, 2))
    ids = ids_of(0, 160)
    expected = model(ids)
    handle = put_on_host(model, "0", device="cpu")
    with apply(model, {"0": "recompute"}) as applied:
        handle.remove()
        model[0].weight.data = model[0].weight.data.clone()
        out = model(ids)
        out.sum().backward()
        assert applied.stats().num_recomputed == 1
        assert torch.equal(out, expected)
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("row_sums", RowSums)
def test_no_ids_at_all(settings: dict[str, Any], row_sums: RowSums) -> None:
    model, plain = Reader(**settings), PlainReader(**settings)
    put_on_host(model, "table", device="cpu", row_sums=row_sums)
    for _ in range(2):
        for reader in (model, plain):
            reader(torch.zeros(2, 0, dtype=torch.long)).sum().backward()
        one, other = model.table.weight.grad, plain.table.weight.grad
        assert one is not None
        assert other is not None
        assert torch.equal(one.to_dense(), other.to_dense())


def test_the_callers_gradient_is_dense() -> None:
    model = Reader()
    put_on_host(model, "table", device="cpu")
    model(ids_of(0, 160)).sum().backward()
    before = model.table.weight.grad
    assert before is not None
    kept = before.clone()
    (found,) = torch.autograd.grad(model(ids_of(1, 160)).sum(), model.table.weight)
    assert found.layout is torch.strided
    loss = model(ids_of(1, 160)).sum()
    loss.backward(inputs=[model.head.weight])
    assert torch.equal(before, kept)


def test_hooks_after_the_accumulation_do_not_keep_rows_from_being_added(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[torch.layout] = []
    table_gradient = host_embedding._table_gradient

    def noted(*args: Any) -> Tensor:
        found = table_gradient(*args)
        layouts.append(found.layout)
        return found

    monkeypatch.setattr(host_embedding, "_table_gradient", noted)
    model, plain = Reader(), PlainReader()
    put_on_host(model, "table", device="cpu")
    seen: list[Tensor] = []
    for reader in (model, plain):
        reader.table.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        for step in range(3):
            reader(ids_of(step, 160)).square().sum().backward()
    assert layouts == [torch.strided, torch.sparse_coo, torch.sparse_coo]
    assert_same_bits(seen[:3], seen[3:])
