"""Cross entropy over the tiles of a head: the logits of one tile exist at a time, forward and backward.

Note [One tile at a time]
With z the logits of a token, its loss is log(sum(exp(z))) - z[target]. Each tile gives the two terms over its own rows, two
numbers a token; the whole is the log-sum-exp of the tiles' and the sum of the target's. Each tile is a checkpoint: in the backward
its module is called again, its logits are made again, and their gradient is used up before the next tile begins, since
autograd runs what was made last first. So a session brings a tile's weights twice, and never two tiles for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lowtide.activations.losses.chunked_loss import check_target
from lowtide.activations.tiling.layers import TiledLinear, tile_ranges, within_tile
from lowtide.errors import ConfigError

Reduction = Literal["mean", "sum", "none"]


def tiled_cross_entropy(
    hidden: Tensor,
    tiles: TiledLinear | Sequence[nn.Linear],
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """`F.cross_entropy(head(hidden).float(), target)` without the logits of all tiles at once.

    Equal to rounding: the sums over the vocabulary are grouped by tiles, in fp32. Costs one more matmul of the head in
    the backward. Memory beyond the hidden states: about 3 times `[tokens, rows of a tile]` in fp32.

    Args:
        hidden: `[..., in_features]`.
        tiles: The head, or its tiles in order: modules that give `[..., rows]`, each called by itself.
        target: `[...]`, class of each token, as int64 or int32.
        ignore_index: Tokens with this target count neither in the sum nor in the mean.
        reduction: As in torch. "none" gives the loss of each token, in the target's shape, 0 for those ignored.

    Example:
        >>> head = TiledLinear.from_linear(nn.Linear(4, 10), num_tiles=3)
        >>> hidden, target = torch.ones(6, 4), torch.tensor([0, 9, 5, -100, 3, 2])
        >>> loss = tiled_cross_entropy(hidden, head, target)
        >>> bool(torch.allclose(loss, nn.functional.cross_entropy(head(hidden), target)))
        True
    """
    given: object = tiles
    if isinstance(given, nn.Linear):
        raise ConfigError(
            "the head is a plain nn.Linear, which has no tiles; tile(model, {'path of the head': 8}) splits it, and "
            "linear_cross_entropy is the loss over a whole one",
            key="tiles",
        )
    modules = list(tiles.tiles if isinstance(tiles, TiledLinear) else tiles)
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction is {reduction!r}; give 'mean', 'sum' or 'none'", key="reduction")
    if not modules or hidden.shape[:-1] != target.shape:
        raise ConfigError(
            f"hidden states of shape {tuple(hidden.shape)} do not fit {len(modules)} tiles and targets of shape "
            f"{tuple(target.shape)}; give at least one tile, and a target for each token",
            key="target",
        )
    flat, counted = hidden.flatten(0, -2), target.flatten() != ignore_index
    totals, targets = [], []
    ranges = tile_ranges([_num_rows(module) for module in modules])
    check_target(target.flatten(), ranges[-1].stop, ignore_index)
    wanted = torch.where(counted, target.flatten(), 0)
    for module, rows in zip(modules, ranges, strict=True):
        inside = (wanted >= rows.start) & (wanted < rows.stop)
        total, found = _terms_of(module, flat, within_tile(wanted, rows, ranges[-1].stop))
        totals.append(total)
        targets.append(torch.where(inside, found, 0.0))
    losses = torch.logsumexp(torch.stack(totals), dim=0) - torch.stack(targets).sum(dim=0)
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def _num_rows(module: nn.Module) -> int:
    num_rows = getattr(module, "out_features", None)
    if not isinstance(num_rows, int):
        raise ConfigError(
            f"a tile is a {type(module).__name__}, which does not say its out_features; give linear layers", key="tiles"
        )
    return num_rows


def _terms_of(module: nn.Module, hidden: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the tile's rows, and the logit of a row, for each token in fp32."""

    def run(hidden: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        # `apply` has no types.
        terms: tuple[Tensor, Tensor] = _TileTerms.apply(module(hidden), local)  # type: ignore[no-untyped-call]  # torch's
        return terms

    if not torch.is_grad_enabled():
        return run(hidden, local)
    # A linear layer draws no random numbers.
    terms: tuple[Tensor, Tensor] = checkpoint(run, hidden, local, use_reentrant=False, preserve_rng_state=False)
    return terms


class _TileTerms(torch.autograd.Function):
    """In one function, so that the gradient of the logits is made in one buffer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        total = torch.logsumexp(wide, dim=-1)
        found = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, total, local)
        return total, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_found: Tensor) -> tuple[Tensor, None]:
        logits, total, local = ctx.saved_tensors
        gradient = (logits.float() - total.unsqueeze(-1)).exp_().mul_(of_total.unsqueeze(-1))
        gradient.scatter_add_(-1, local.unsqueeze(-1), of_found.unsqueeze(-1))
        return gradient.to(logits.dtype), None
