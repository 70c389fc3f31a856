"""TiledLinear and TiledEmbedding: a huge layer as a row of small ones, so that it does not set the budget.

The weight is split along its rows (output features, or rows of a table). Each tile is a module of its own with a
Parameter of its own, and is called by itself: under a session each is a group that comes and goes, so that the device holds
a tile or two in place of the layer. Saved and loaded, the layer looks like the ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowtide.activations.tiled_state import (
    join_parameters,
    keep_ordinary_state,
    split_parameter,
    tile_ranges,
    tile_sizes,
    within_tile,
)
from lowtide.errors import ConfigError


class TiledLinear(nn.Module):
    """`nn.Linear` whose output features are computed tile by tile. Outputs are those of the whole, to rounding.

    Example:
        >>> linear = nn.Linear(4, 10)
        >>> tiled = TiledLinear.from_linear(linear, num_tiles=3)
        >>> [tile.out_features for tile in tiled.tiles], list(tiled.state_dict())
        ([4, 3, 3], ['weight', 'bias'])
        >>> bool(torch.allclose(tiled(torch.ones(2, 4)), linear(torch.ones(2, 4))))
        True
    """

    def __init__(self, tiles: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.in_features = tiles[0].in_features
        self.out_features = sum(tile.out_features for tile in tiles)
        keep_ordinary_state(self)

    @classmethod
    def from_linear(cls, linear: nn.Linear, num_tiles: int) -> TiledLinear:
        """Split a layer. Its values are copied, its gradients too; the layer itself is left as it is."""
        sizes = tile_sizes(linear.out_features, num_tiles)
        weights = split_parameter(linear.weight, sizes)
        # torch's own types say that there is always a bias.
        bias_of: Tensor | None = linear.bias
        biases = [None] * num_tiles if bias_of is None else split_parameter(bias_of, sizes)
        tiles = []
        for size, weight, bias in zip(sizes, weights, biases, strict=True):
            tile = nn.Linear(linear.in_features, size, bias=False, device="meta")
            tile.weight = weight
            tile.register_parameter("bias", bias)
            tiles.append(tile)
        return cls(tiles).train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The ordinary layer, with copies of the values and gradients."""
        tiles = [tile for tile in self.tiles if isinstance(tile, nn.Linear)]
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = join_parameters([tile.weight for tile in tiles])
        biases: list[Tensor | None] = [tile.bias for tile in tiles]
        if present := [bias for bias in biases if bias is not None]:
            linear.register_parameter("bias", join_parameters(present))
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`. The whole output is made; see `tiled_cross_entropy` for a loss
        without it.
        """
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        """For printing."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class TiledEmbedding(nn.Module):
    """`nn.Embedding` that is looked up tile by tile. Outputs and, on the host, gradients have the same bits.

    Example:
        >>> table = nn.Embedding(10, 4)
        >>> ids = torch.tensor([[0, 9, 5]])
        >>> bool((TiledEmbedding.from_embedding(table, num_tiles=3)(ids) == table(ids)).all())
        True
    """

    def __init__(self, tiles: Sequence[nn.Embedding], padding_idx: int | None = None) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.num_embeddings = sum(tile.num_embeddings for tile in tiles)
        self.embedding_dim = tiles[0].embedding_dim
        self.padding_idx = padding_idx
        keep_ordinary_state(self)

    @classmethod
    def from_embedding(cls, table: nn.Embedding, num_tiles: int) -> TiledEmbedding:
        """Split a table. Its values are copied, its gradient too; the table itself is left as it is."""
        for name, value in (
            ("max_norm", table.max_norm is not None),
            ("scale_grad_by_freq", table.scale_grad_by_freq),
            ("sparse", table.sparse),
        ):
            if value:
                # Each tile is asked for all ids, those of other tiles too, whose results are then dropped.
                raise ConfigError(
                    f"an embedding with {name}={getattr(table, name)} cannot be tiled: each tile would act on rows that "
                    "were not looked up in it; put the table on the host, or leave it whole",
                    key=name,
                )
        sizes = tile_sizes(table.num_embeddings, num_tiles)
        tiles = []
        start = 0
        for size, weight in zip(sizes, split_parameter(table.weight, sizes), strict=True):
            padding_idx = None if table.padding_idx is None else table.padding_idx - start
            inside = padding_idx is not None and 0 <= padding_idx < size
            tile = nn.Embedding(size, table.embedding_dim, padding_idx if inside else None, device="meta")
            tile.weight = weight
            tiles.append(tile)
            start += size
        return cls(tiles, table.padding_idx).train(table.training)

    def to_embedding(self) -> nn.Embedding:
        """The ordinary table, with copies of the values and gradients."""
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        table.weight = join_parameters([tile.weight for tile in self.tiles if isinstance(tile, nn.Embedding)])
        return table.train(self.training)

    def forward(self, ids: Tensor) -> Tensor:
        """`[...]` to `[..., embedding_dim]`."""
        sizes = [tile.num_embeddings for tile in self.tiles if isinstance(tile, nn.Embedding)]
        out: Tensor | None = None
        for tile, rows in zip(self.tiles, tile_ranges(sizes), strict=True):
            found = tile(within_tile(ids, rows, self.num_embeddings))
            # Tiles come in order of their rows, so what a tile says of ids beyond it is replaced by the next.
            out = found if out is None else torch.where((ids >= rows.start).unsqueeze(-1), found, out)
        assert out is not None
        return out

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"
